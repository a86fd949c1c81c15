"""NVMe offload: the same adapter with previews between steps, and no leftover files."""

import json
import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import fake_async_io
import pytest
from one_result import BOUNDS, write_even_dataset
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import max_relative_difference, train

from library.errors import ConfigError

pytestmark = pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
SMALLEST = 2048
"""The smallest tensor that is offloaded, in bytes; DeepSpeed's default of 1 MiB would offload nothing of a tiny model."""


def has_libaio() -> bool:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return bool(AsyncIOBuilder().is_compatible())


def train_with_nvme_offload(is_real: bool, *build_flags: str) -> str:
    """Train in this process; return the path of the LoRA file."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed.ops.op_builder as builders
    from deepspeed.runtime.swap_tensor import partitioned_param_swapper as swapper

    swapper.MIN_AIO_BYTES = SMALLEST
    if not is_real:
        builders.AsyncIOBuilder = swapper.AsyncIOBuilder = fake_async_io.Builder
    return train(*build_flags)


def build_flags(data: Path, folder: Path, ranks: int, *more: str) -> tuple[str, ...]:
    """Flags of a run with previews, which call the modules in another order."""
    (folder / "prompts.txt").write_text("a red circle --w 64 --h 96 --d 1 --s 2 --l 3\n")
    return (
        "--dataset_config",
        str(data),
        "--pretrained_model_name_or_path",
        "random:sdxl:tiny",
        "--output_dir",
        str(folder / "out"),
        "--train_batch_size",
        str(4 // ranks),
        *(
            "--max_train_steps 3 --learning_rate 0.5 --network_dim 4 --optimizer_type SGD --mixed_precision "
            "no --no-network_train_unet_only"
        ).split(),
        "--sample_prompts",
        str(folder / "prompts.txt"),
        "--sample_every_n_steps",
        "2",
        *more,
    )


def build_launcher_environment(folder: Path, **offload: object) -> dict[str, str]:
    """The environment of accelerate launch with a DeepSpeed config file."""
    (folder / "disk").mkdir(exist_ok=True)
    zero = {
        "stage": 3,
        "stage3_param_persistence_threshold": 100,
        "stage3_max_reuse_distance": 0,
        "offload_param": {"device": "nvme", "nvme_path": str(folder / "disk"), **offload},
    }
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": zero, "aio": {"block_size": SMALLEST}}))
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(folder / "ds.json")}


@pytest.mark.parametrize(
    ("ranks", "is_real", "offload"),
    [
        (2, False, {}),
        pytest.param(1, False, {"buffer_count": 2}, marks=pytest.mark.slow),
        pytest.param(2, False, {"buffer_count": 300}, marks=pytest.mark.slow),
        pytest.param(2, True, {}, marks=pytest.mark.slow),
    ],
)
def test_nvme_offload_trains_the_adapter_of_one_process(ranks, is_real, offload, tmp_path):
    if is_real and not has_libaio():
        pytest.skip("libaio is missing")
    data = write_even_dataset(tmp_path)
    one = load_file(run_on_ranks(1, train, *build_flags(data, tmp_path, 1, "--output_name", "one"))[0])
    files = run_on_ranks(
        ranks,
        train_with_nvme_offload,
        is_real,
        *build_flags(data, tmp_path, ranks),
        environment=build_launcher_environment(tmp_path, **offload),
        seconds=900,
    )

    assert max_relative_difference(one, load_file(files[0])) < BOUNDS["no"]
    assert not list((tmp_path / "disk").iterdir())


def test_only_directories_of_dead_processes_are_removed(tmp_path):
    from library.distributed.watchdog import ProcessIdentity
    from library.parallel.deepspeed.nvme_offload import DIR_PREFIX, OWNER_FILE, remove_stale_dirs

    own = ProcessIdentity.get_current()
    owners = {"mine": own, "dead": replace(own, began=own.began - 1000), "elsewhere": replace(own, host="elsewhere")}
    for name, owner in owners.items():
        (tmp_path / f"{DIR_PREFIX}{name}").mkdir()
        (tmp_path / f"{DIR_PREFIX}{name}" / OWNER_FILE).write_text(json.dumps(owner.to_json()))
    (tmp_path / f"{DIR_PREFIX}of-nobody").mkdir()
    remove_stale_dirs(tmp_path)

    assert sorted(path.name.removeprefix(DIR_PREFIX) for path in tmp_path.iterdir()) == [
        "elsewhere",
        "mine",
        "of-nobody",
    ]


@pytest.mark.parametrize(
    ("ranks", "offload", "expected"),
    [
        (
            1,
            {"buffer_size": 1000},
            r"buffer_size is 1000, and the largest partition has \d+ elements; set",
        ),
        pytest.param(1, {"buffer_count": 1}, "buffer_count is 1; set at least 2", marks=pytest.mark.slow),
        pytest.param(2, {"max_in_cpu": 10}, r"max_in_cpu is 10, and the adapter has \d+", marks=pytest.mark.slow),
        pytest.param(
            1,
            {"buffer_size": 10**13},
            r"cannot lock \d+ MiB of memory per process; raise `ulimit -l`",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_buffer_settings_that_would_crash_deepspeed_are_refused(ranks, offload, expected, tmp_path):
    with pytest.raises(AssertionError, match=expected):
        run_on_ranks(
            ranks,
            train_with_nvme_offload,
            False,
            *build_flags(write_even_dataset(tmp_path), tmp_path, ranks),
            environment=build_launcher_environment(tmp_path, **offload),
        )
    assert not list((tmp_path / "disk").iterdir())


@pytest.mark.quick
def test_missing_libaio_is_reported_before_a_model_is_loaded(tmp_path):
    (text,) = run_on_ranks(
        1,
        read_error_without_libaio,
        *build_flags(write_even_dataset(tmp_path), tmp_path, 1),
        environment=build_launcher_environment(tmp_path),
    )
    assert "DeepSpeed's async_io needs libaio and a compiler; apt install libaio-dev g++" in text
    assert not list((tmp_path / "disk").iterdir())


def read_error_without_libaio(*build_flags: str) -> str:
    from library.models.base import Family

    fake_async_io.Builder.is_compatible = lambda _: False
    Family.load = None  # the check for libaio needs it
    try:
        train_with_nvme_offload(False, *build_flags)
    except ConfigError as error:
        return str(error)
    return ""
