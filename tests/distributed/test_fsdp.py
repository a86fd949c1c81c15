"""FSDP: previews, validation, checkpoints and adapters equal those of DDP; each rank holds its shard of the model."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import all_options_run
import pytest
import torch
from all_options_run import read_validation_losses
from one_result import write_even_dataset
from rank_processes import find_free_port, run_on_ranks
from resumed_runs import copy_as_killed
from safetensors.torch import load_file
from training_runs import max_relative_difference, train

from library.config import parse_config

ROOT = Path(__file__).resolve().parents[2]


# previews, validation, EMA and max norm


@pytest.fixture(scope="module")
def ddp_and_fsdp_folders(tmp_path_factory) -> dict[str, Path]:
    """The output directories of two runs with all options, with DDP and with FSDP."""
    folder = tmp_path_factory.mktemp("both")
    common = (*all_options_run.build_flags(folder), "--no-network_train_unet_only")
    for name, more in {"ddp": (), "fsdp": ("--fsdp",)}.items():
        run_on_ranks(2, train, *common, "--output_dir", str(folder / name), *more)
    return {name: folder / name for name in ("ddp", "fsdp")}


@pytest.mark.parametrize("name", ["lora", "lora-ema"])
def test_prodigy_max_norm_and_ema_equal_those_of_ddp(ddp_and_fsdp_folders, name):
    ddp, fsdp = (load_file(folder / f"{name}.safetensors") for folder in ddp_and_fsdp_folders.values())

    assert max_relative_difference(ddp, fsdp) < 1e-3


def test_previews_before_the_first_step_are_bitwise_equal_to_those_of_ddp(ddp_and_fsdp_folders):
    actual = {name: sorted((folder / "sample").glob("*.png")) for name, folder in ddp_and_fsdp_folders.items()}
    assert [len(paths) for paths in actual.values()] == [6, 6]

    for ddp, fsdp in zip(*actual.values(), strict=True):
        assert ddp.name[:15] == fsdp.name[:15]
        if "_000000_" in ddp.name:
            assert ddp.read_bytes() == fsdp.read_bytes()


def test_validation_losses_equal_those_of_ddp(ddp_and_fsdp_folders):
    ddp, fsdp = (read_validation_losses(folder) for folder in ddp_and_fsdp_folders.values())

    assert len(ddp) == len(fsdp) == 3
    assert ddp[0] == fsdp[0]  # losses of the base model are bitwise equal
    for one, other in zip(ddp, fsdp, strict=True):
        assert other == pytest.approx(one, rel=1e-4)


# checkpoints


@pytest.mark.daily
@pytest.mark.parametrize(
    ("ranks", "fsdp"),
    [(2, ("--fsdp",)), pytest.param(4, ("--fsdp", "--dp_replicate_size", "2"), marks=pytest.mark.slow)],
)
def test_resume_is_exact_and_works_across_strategies(ranks, fsdp, tmp_path):
    data = write_even_dataset(tmp_path)
    flags = (
        "--dataset_config",
        str(data),
        *(
            "--max_train_steps 6 --network_dim 2 --learning_rate 1e-2 --save_every_n_steps 2 --save_state --auto_resume"
        ).split(),
    )

    def run(folder: Path, ranks: int, batch: int, *more: str) -> dict[str, torch.Tensor]:
        own = ("--output_dir", str(folder), "--train_batch_size", str(batch))
        return load_file(run_on_ranks(ranks, train, *flags, *own, *more)[0])

    one = run(tmp_path / "one", 1, 4)
    resumed_with_fsdp = run(copy_as_killed(tmp_path / "one", tmp_path / "spread", 2), ranks, 4 // ranks, *fsdp)
    second = run(copy_as_killed(tmp_path / "spread", tmp_path / "again", 4), ranks, 4 // ranks, *fsdp)
    restored = run(copy_as_killed(tmp_path / "spread", tmp_path / "back", 4), 2, 2)

    assert max_relative_difference(resumed_with_fsdp, second) == 0.0
    assert max_relative_difference(one, resumed_with_fsdp) < 1e-3
    assert max_relative_difference(one, restored) < 1e-3


# memory


def measure_memory(parts: int, *flags: str) -> tuple[int, int, int]:
    """Return the bytes of all frozen weights, of those on this rank, and of the adapter."""
    from library.distributed.accelerator import prepare_accelerator
    from library.distributed.communicator import Communicator
    from library.distributed.devices import HOST
    from library.distributed.fsdp_settings import FSDPSettings
    from library.models.families import FAMILIES
    from library.parallel.frozen_base import quantize_and_offload_base
    from library.parallel.fsdp import FSDPStrategy
    from library.parallel.strategy import StrategySettings
    from library.training.trainable_modules import build_trainable_modules

    config = parse_config(["--no-network_train_unet_only", *flags]).config
    strategy = FSDPStrategy(Communicator(prepare_accelerator(config)), StrategySettings(fsdp=FSDPSettings(1, parts)))
    family = FAMILIES.get("sdxl")()
    trained, _ = build_trainable_modules(config, family, family.load("random:sdxl:tiny", torch.float32))
    trainable = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    if config.model.quantize_base != "none":
        quantize_and_offload_base(trained.denoiser, (HOST, HOST), config.model, config.train)
    total = sum(parameter.nbytes for parameter in trained.parameters() if not parameter.requires_grad)
    strategy.wrap(trained, torch.optim.SGD(trainable))
    frozen = [parameter.to_local() for parameter in trained.parameters() if not parameter.requires_grad]
    local_bytes = sum(
        {parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes() for parameter in frozen}.values()
    )
    strategy.comm.destroy_process_group()
    return total, local_bytes, sum(parameter.untyped_storage().nbytes() for parameter in trainable)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("parts", "flags"),
    [
        (1, ()),
        (2, ("--quantize_base", "nf4")),
        pytest.param(2, (), marks=pytest.mark.slow),
        pytest.param(4, (), marks=pytest.mark.slow),
    ],
)
def test_each_rank_holds_its_shard_of_the_frozen_model_and_the_full_adapter(parts, flags):
    single = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(find_free_port()),
    }
    actual = run_on_ranks(parts, measure_memory, parts, *flags, environment=single if parts == 1 else None)
    total, _, trainable = actual[0]

    assert {(total_here, same) for total_here, _, same in actual} == {(total, trainable)} and trainable > 0
    assert all(local_bytes < 1.02 * total / parts for _, local_bytes, _ in actual)
    assert sum(local_bytes for _, local_bytes, _ in actual) >= total


# accelerate launch


@pytest.mark.slow
def test_accelerate_launch_with_fsdp_shards_the_model(tmp_path):
    data = write_even_dataset(tmp_path)
    launch = shlex.split(
        "launch --use_fsdp --fsdp_version 2 --num_processes 2 --num_machines 1 --mixed_precision no "
        "--dynamo_backend no --fsdp_offload_params true"
    )
    words = [
        str(Path(sys.executable).parent / "accelerate"),
        *launch,
        str(ROOT / "train_lora.py"),
        "--dataset_config",
        str(data),
        *"--pretrained_model_name_or_path random:sdxl:tiny --no-network_train_unet_only".split(),
        "--output_dir",
        str(tmp_path / "out"),
        "--max_train_steps",
        "1",
    ]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "MASTER_", "FSDP_"))}
    result = subprocess.run(
        words,
        cwd=tmp_path,
        timeout=240,
        capture_output=True,
        text=True,
        env={**clean, "HF_HOME": str(tmp_path / "home"), "ACCELERATE_USE_CPU": "true"},
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert (
        "FSDP: 1 x 2 processes" in result.stderr + result.stdout and "in host memory" in result.stderr + result.stdout
    )
    assert (tmp_path / "out" / "lora.safetensors").exists()


# errors on one rank


def run_scaled_step(infinite_on: int) -> tuple[float, float]:
    """Return weight and loss scale after an fp16 step in which one rank may have an infinite gradient."""
    from library.distributed.accelerator import prepare_accelerator
    from library.parallel.gradient_sync import FlatGradients

    accelerator = prepare_accelerator(parse_config([]).config)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.25), torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(1, 1)).sum()).backward()
    if accelerator.process_index == infinite_on:
        model.weight.grad.fill_(float("inf"))
    FlatGradients(model.parameters()).all_reduce_mean(2)
    scaler.step(optimizer)
    scaler.update()
    actual = float(model.weight), scaler.get_scale()
    accelerator.end_training()
    return actual


@pytest.mark.parametrize(("infinite_on", "expected"), [(1, (1.0, 2.0)), (-1, (0.75, 4.0))])
def test_an_infinite_gradient_on_one_rank_skips_the_step_on_all(infinite_on, expected):
    assert run_on_ranks(2, run_scaled_step, infinite_on) == [expected, expected]


def test_a_preview_that_cannot_be_written_does_not_end_the_run(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sample").write_text("no folder")
    (tmp_path / "prompts.txt").write_text("a leaf --w 64 --h 64 --s 1\n")
    files = run_on_ranks(
        2,
        train,
        "--pretrained_model_name_or_path",
        "random:sd1:tiny",
        "--dataset_config",
        str(write_even_dataset(tmp_path)),
        "--output_dir",
        str(tmp_path / "out"),
        *"--max_train_steps 1 --network_dim 2".split(),
        "--sample_prompts",
        str(tmp_path / "prompts.txt"),
        "--sample_at_first",
        "--fsdp",
    )
    assert Path(files[0]).is_file()


def run_with_failing_previews(failing_ranks: list[int], folder: Path, flags: tuple[str, ...]) -> str:
    """Train with previews that fail on these ranks; return the LoRA file or the error."""
    from library.training import preview

    preview.ALL_RANKS_TIMEOUT_SECONDS = 2.0
    original = preview.Preview._generate_frames

    def generate_frames(self, run, index, prompt):
        if run.strategy.comm.rank in failing_ranks:
            raise RuntimeError("cannot be drawn here")
        return original(self, run, index, prompt)

    preview.Preview._generate_frames = generate_frames
    try:
        return train(*flags, "--output_dir", str(folder))
    except Exception as error:
        return f"ended: {error}"


@pytest.mark.parametrize(
    ("failing_ranks", "more"),
    [
        pytest.param([0, 1], ["--fsdp"], marks=pytest.mark.slow),
        ([1], ["--fsdp"]),
        ([1], []),
    ],
)
def test_a_failing_preview_ends_the_run_only_if_other_ranks_would_deadlock(failing_ranks, more, tmp_path):
    (tmp_path / "prompts.txt").write_text("a leaf --w 64 --h 64 --s 1\nred --w 64 --h 64 --s 1\n")
    flags = (
        "--pretrained_model_name_or_path",
        "random:sd1:tiny",
        "--dataset_config",
        str(write_even_dataset(tmp_path)),
        *"--max_train_steps 1 --network_dim 2".split(),
        "--sample_prompts",
        str(tmp_path / "prompts.txt"),
        "--sample_at_first",
        *more,
    )
    actual = run_on_ranks(2, run_with_failing_previews, failing_ranks, tmp_path / "out", flags)

    others_wait = bool(more) and len(failing_ranks) == 1
    assert [outcome.startswith("ended: ") for outcome in actual] == [others_wait] * 2, actual
    assert not others_wait or any("cannot be drawn here" in outcome for outcome in actual)
    preview_count = len([*(tmp_path / "out" / "sample").glob("*.png")])
    assert preview_count == (0 if more else 1)


def test_unknown_fsdp_wrap_classes_are_refused(tmp_path):
    environment = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "BasicTransformerBlock,LlamaLayer",
    }
    with pytest.raises(
        AssertionError, match="fsdp_transformer_layer_cls_to_wrap LlamaLayer: this model has no such class"
    ):
        run_on_ranks(
            2,
            train,
            "--dataset_config",
            str(write_even_dataset(tmp_path)),
            "--output_dir",
            str(tmp_path),
            environment=environment,
        )
