"""Tensor, pipeline and context parallelism train the adapter of one process; previews, validation, checkpoints too."""

import json
import random
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import all_options_run
import pytest
import torch
from all_options_run import read_validation_losses
from one_result import BOUNDS, REFERENCE, train_layout, write_even_dataset
from problem_lines import format_lines
from rank_processes import run_on_ranks
from resumed_runs import copy_as_killed
from safetensors.torch import load_file
from training_runs import max_relative_difference, train

from library.config import parse_config
from library.distributed.parallel_dims import ParallelDims, build_parallel_dims, validate_parallel_dims
from library.distributed.world import World
from library.errors import ConfigError
from library.models.detect import detect_model
from library.models.families import FAMILIES
from library.parallel.pipeline_stages import partition_blocks
from library.parallel.strategy import Strategy
from library.parallel.strategy_registry import STRATEGIES
from library.training.preflight import RunFacts, check_run_settings

LONG = pytest.mark.slow
MODULATION = ("--network_module=networks.lora_qwen_image", "--network_args=train_modulation=True")
"""The layers of modulation get an adapter, too, as in musubi-tuner's runs."""

# equal adapters


@pytest.mark.parametrize(
    ("model", "name", "precision", "flags"),
    [
        pytest.param("flux", "TP 2 x PP 2", "no", ("--gradient_checkpointing",), marks=LONG),
        pytest.param("flux", "PP 2, interleaved", "no", (), marks=LONG),
        pytest.param("flux", "PP 4, 1f1b", "no", (), marks=LONG),
        pytest.param("sd3_deep", "PP 4, gpipe", "no", (), marks=LONG),
        pytest.param("sd3_deep", "PP 4, interleaved", "no", ("--gradient_checkpointing",), marks=LONG),
        pytest.param("sdxl", "FSDP 2 x TP 2", "no", (), marks=LONG),
        pytest.param("sdxl", "TP 2", "no", (), marks=LONG),
        pytest.param("sdxl", "PP 2, 1f1b", "no", ("--gradient_checkpointing",), marks=LONG),
        pytest.param("sdxl", "PP 4, gpipe", "no", (), marks=LONG),
        pytest.param("sdxl", "PP 2, interleaved", "no", (), marks=LONG),
        pytest.param("sd1", "TP 2 x PP 2", "no", (), marks=LONG),
        pytest.param("z_image", "PP 2 x DP 2", "no", ("--network_train_unet_only",), marks=LONG),
        ("qwen_image", "TP 2", "no", ("--network_train_unet_only",)),
        *(
            pytest.param("qwen_image", layout, "no", ("--network_train_unet_only", *MODULATION), marks=LONG)
            for layout in ("TP 2 x PP 2", "CP 2")
        ),
        pytest.param("aura_flow", "TP 2 x PP 2", "no", ("--network_train_unet_only",), marks=LONG),
        pytest.param("ovis_image", "TP 2 x PP 2", "no", ("--network_train_unet_only",), marks=LONG),
        pytest.param("hunyuan_image", "TP 2 x PP 2", "no", ("--network_train_unet_only",), marks=LONG),
        pytest.param("hunyuan_video", "TP 2 x PP 2", "no", ("--network_train_unet_only",), marks=LONG),
        pytest.param("longcat_image", "TP 2 x PP 2", "no", ("--network_train_unet_only",), marks=LONG),
        pytest.param("ernie_image", "TP 2 x PP 2", "no", ("--network_train_unet_only",), marks=LONG),
        pytest.param("lumina2", "TP 2", "no", ("--network_train_unet_only",), marks=LONG),
        pytest.param("cogview4", "TP 2", "no", ("--network_train_unet_only",), marks=LONG),
        pytest.param("pixart_sigma", "TP 2 x PP 2", "no", ("--network_train_unet_only",), marks=LONG),
        pytest.param("hunyuan_video15", "TP 2 x PP 2", "no", ("--network_train_unet_only",), marks=LONG),
        pytest.param("ltx_video", "PP 2, 1f1b", "no", ("--network_train_unet_only",), marks=LONG),
        pytest.param("kolors", "TP 2 x PP 2", "no", ("--network_train_unet_only",), marks=LONG),
        pytest.param("bria", "FSDP 2 x 2", "no", ("--network_train_unet_only",), marks=LONG),
        pytest.param("hidream", "FSDP 2 x TP 2", "no", ("--network_train_unet_only",), marks=LONG),
        pytest.param("kandinsky5_image", "FSDP 2 x TP 2", "no", ("--network_train_unet_only",), marks=LONG),
        pytest.param("kandinsky6_video", "TP 2", "no", ("--network_train_unet_only",), marks=LONG),
        pytest.param("krea2", "TP 2", "no", ("--network_train_unet_only", "--learning_rate=0.02"), marks=LONG),
        pytest.param("sd3", "PP 2, gpipe", "bf16", (), marks=LONG),
    ],
)
def test_model_parallel_trains_the_adapter_of_one_process(model, name, precision, flags, tmp_path):
    data, more = write_even_dataset(tmp_path), ("--mixed_precision", precision)
    texts = [flag for flag in flags if flag != "--gradient_checkpointing"]  # what is trained, and how
    one = train_layout(REFERENCE, model, data, tmp_path, *more, *texts)
    sharded = train_layout(name, model, data, tmp_path, *more, *flags)

    assert max_relative_difference(one, sharded) < BOUNDS[precision]


def train_and_read_log(*flags):
    """Train as ``train_lora.py`` does; return what it prints."""
    import contextlib
    import io

    from library.cli import main

    with contextlib.redirect_stderr(io.StringIO()) as text:
        assert main([*flags]) == 0, text.getvalue()
    return text.getvalue()


def test_the_log_confirms_tensor_parallelism_with_the_bytes_of_the_shard(tmp_path):
    data = write_even_dataset(tmp_path)
    flags = ["--pretrained_model_name_or_path", "random:flux:tiny", "--dataset_config", str(data), "--tp_size", "2"]
    flags += ["--network_train_unet_only", "--max_train_steps", "1", "--output_dir", str(tmp_path), "--network_dim"]
    log, other = run_on_ranks(2, train_and_read_log, *flags, "2", "--max_data_loader_n_workers", "0")
    pattern = r"tensor parallel: rank 0 of 2 holds its shard of (\d+) linear layers, (\S+) of (\S+) MiB of the denoiser"
    (line,) = re.findall(pattern, log)
    layers, shard, full = map(float, line)
    assert layers > 10 and 0.4 * full < shard < full, line
    assert "tensor parallel" not in other


# previews, validation, EMA and checkpoints


@pytest.fixture(
    scope="module", params=[(4, "--pp_size", "2", "--tp_size", "2"), pytest.param((2, "--cp_size", "2"), marks=LONG)]
)
def run_folders(request, tmp_path_factory) -> dict[str, Path]:
    """The folders of two runs with all options, on one rank and with model parallelism."""
    folder = tmp_path_factory.mktemp("both")
    flags = (
        *all_options_run.build_flags(folder),
        *(
            "--pretrained_model_name_or_path random:sd3:tiny --gradient_accumulation_steps 2 --network_train_unet_only"
        ).split(),
    )
    run_on_ranks(1, train, *flags, "--output_dir", str(folder / "one"))
    ranks, *layout = request.param
    run_on_ranks(ranks, train, *flags, "--output_dir", str(folder / "several"), *layout)
    return {name: folder / name for name in ("one", "several")}


@pytest.mark.parametrize("name", ["lora", "lora-ema"])
def test_prodigy_max_norm_and_ema_equal_those_of_one_process(run_folders, name):
    one, several = (load_file(folder / f"{name}.safetensors") for folder in run_folders.values())
    assert max_relative_difference(one, several) < 1e-3


def test_validation_losses_equal_those_of_one_process(run_folders):
    one, several = (read_validation_losses(folder) for folder in run_folders.values())
    assert len(one) == len(several) == 3
    for ours, theirs in zip(one, several, strict=True):
        assert theirs == pytest.approx(ours, rel=1e-4)


def test_losses_by_bucket_and_timestep_equal_those_of_one_process(run_folders):
    """Also for steps with several image sizes, which a pipeline runs in another order."""
    one, several = (
        [json.loads(line) for line in (folder / "lora.metrics.jsonl").read_text().splitlines()]
        for folder in run_folders.values()
    )
    expected = [{name: value for name, value in line.items() if name.startswith("loss/")} for line in one]
    assert len(one) == len(several) and sum(map(len, expected)) > 20
    for ours, theirs in zip(expected, several, strict=True):
        assert {name: theirs[name] for name in ours} == pytest.approx(ours, rel=1e-4)


def test_every_preview_is_generated_once(run_folders):
    names = [sorted(path.name[:15] for path in (folder / "sample").glob("*.png")) for folder in run_folders.values()]
    assert names[0] == names[1] and len(names[0]) == 6


def test_resume_is_exact_and_works_across_parallel_layouts(tmp_path):
    data = write_even_dataset(tmp_path)
    flags = (
        "--pretrained_model_name_or_path",
        "random:flux:tiny",
        "--dataset_config",
        str(data),
        *(
            "--max_train_steps 6 --network_dim 2 --learning_rate 1e-2 --save_every_n_steps 2 --save_state "
            "--auto_resume --train_batch_size 2 --gradient_accumulation_steps 2"
        ).split(),
    )

    def run(folder: Path, ranks: int, *more: str) -> dict[str, torch.Tensor]:
        return load_file(run_on_ranks(ranks, train, *flags, "--output_dir", str(folder), *more)[0])

    one = run(tmp_path / "one", 1)
    piped = run(copy_as_killed(tmp_path / "one", tmp_path / "piped", 2), 2, "--pp_size", "2")
    second = run(copy_as_killed(tmp_path / "piped", tmp_path / "again", 4), 2, "--pp_size", "2")
    tensor = run(copy_as_killed(tmp_path / "piped", tmp_path / "tensor", 4), 2, "--tp_size", "2")
    shared = run(copy_as_killed(tmp_path / "piped", tmp_path / "shared", 2), 2, "--cp_size", "2")
    single = run(copy_as_killed(tmp_path / "shared", tmp_path / "alone", 4), 1)

    assert max_relative_difference(piped, second) == 0.0
    assert max_relative_difference(one, shared) < 1e-3 and max_relative_difference(one, single) < 1e-3
    assert max_relative_difference(one, piped) < 1e-3 and max_relative_difference(one, tensor) < 1e-3


# pipeline stages and rank coordinates


def test_the_largest_pipeline_stage_is_minimal():
    draw = random.Random(5)
    for _ in range(200):
        weights = [draw.randint(1, 9) for _ in range(draw.randint(1, 9))]
        stages = draw.randint(1, min(4, len(weights)))
        actual = partition_blocks(weights, stages)
        assert actual[0] == 0 and actual[-1] == len(weights) and all(a < b for a, b in pairwise(actual))
        assert max(sum(weights[a:b]) for a, b in pairwise(actual)) == min(
            max(sum(weights[a:b]) for a, b in pairwise(partition))
            for partition in list_all_partitions(len(weights), stages)
        )


def list_all_partitions(blocks: int, stages: int) -> list[list[int]]:
    if stages == 1:
        return [[0, blocks]]
    return [
        [*partition[:-1], last, blocks]
        for last in range(stages - 1, blocks)
        for partition in list_all_partitions(last, stages - 1)
    ]


def test_ranks_have_distinct_coordinates_and_share_a_pipeline_with_their_group():
    layout = ParallelDims(dp=2, pp=3, tp=2, cp=2)
    coordinates = {
        (
            layout.get_data_parallel_rank(rank),
            layout.get_pipeline_stage(rank),
            rank % 4,
            layout.get_tensor_parallel_rank(rank),
        )
        for rank in range(24)
    }
    assert len(coordinates) == 24
    layout = ParallelDims(dp=2, pp=3, tp=2)
    for rank in range(12):
        group = layout.get_pipeline_ranks(rank)
        assert rank in group and [layout.get_pipeline_stage(other) for other in group] == [0, 1, 2]
        assert {(layout.get_data_parallel_rank(other), layout.get_tensor_parallel_rank(other)) for other in group} == {
            (layout.get_data_parallel_rank(rank), layout.get_tensor_parallel_rank(rank))
        }
    assert [
        (layout.get_data_parallel_rank(rank), layout.get_pipeline_stage(rank)) for rank in layout.get_loss_ranks()
    ] == [(0, 2), (1, 2)]


@pytest.mark.quick
def test_every_strategy_of_the_table_is_imported():
    assert all(issubclass(STRATEGIES.get(name), Strategy) for name in STRATEGIES.list_names())


@pytest.mark.quick
def test_parallel_dims_divide_the_world_size():
    config = parse_config(["--dataset_config", __file__, "--pp_size", "2", "--tp_size", "2"]).config
    assert build_parallel_dims(config.parallel, 8) == ParallelDims(2, 2, 2) and not [
        *format_lines(validate_parallel_dims(config, World(world_size=8)))
    ]
    (problem,) = format_lines(validate_parallel_dims(config, World(world_size=6)))
    assert problem.startswith("--pp_size 2: with tp_size 2, the world size 6 is not a multiple of 4; start 8")
    shared = replace(config, parallel=replace(config.parallel, pp_size=1, cp_size=3))
    assert build_parallel_dims(shared.parallel, 12) == ParallelDims(2, 1, 2, 3)


# refused settings


@pytest.mark.quick
@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        (
            "sdxl",
            ("--cp_size", "2"),
            "has convolutions, which cannot be split by tokens; use --tp_size 2, or --fsdp",
        ),
        (
            "flux",
            ("--cp_size", "2", "--tp_size", "2"),
            "--tp_size 2: with cp_size 2, 2 attention heads are not divisible by 4; use 2 in total",
        ),
        ("z_image", ("--cp_size", "3"), "--cp_size 3: 2 attention heads are not divisible; use 2"),
        ("sd3", ("--pp_size", "3"), "has 2 blocks, too few for 3 devices; use 2"),
        ("mochi", ("--pp_size", "9"), "blocks, too few for 9 devices"),  # whose pooling has no count of heads
        ("flux", ("--pp_size", "4", "--pp_schedule", "interleaved"), "with 2 stages each; use 2"),
        ("flux", ("--tp_size", "3"), "--tp_size 3: 2 attention heads are not divisible; use 2"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_refused_before_it_is_loaded(model, flags, message):
    loaded = parse_config(
        [
            *("--dataset_config", __file__, "--pretrained_model_name_or_path", f"random:{model}:tiny"),
            *("--network_train_unet_only", *flags),
        ]
    )
    config = loaded.config
    with pytest.raises(ConfigError) as caught:
        check_run_settings(config, RunFacts(FAMILIES.get(model)(config.model), detect_model(config.model)))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--tp_size", "2", "--network_module", "lycoris.kohya", "--network_args", "algo=loha"),
            "not loha; use pp_size, cp_size or fsdp",
        ),
        (
            ("--tp_size", "2", "--network_args", "use_dora=True"),
            "tensor parallelism supports lora only, not dora; use pp_size, cp_size or fsdp",
        ),
        (("--pp_size", "2", "--deepspeed"), "cannot be combined with pp_size; use fsdp with tp_size"),
        (("--cp_size", "2", "--deepspeed"), "cannot be combined with cp_size; use fsdp with cp_size"),
        (("--cp_size", "2", "--attn_mode", "flash"), "context parallelism does not support flash; use sdpa or cudnn"),
    ],
)
def test_incompatible_options_are_refused(flags, message):
    with pytest.raises(ConfigError) as caught:
        parse_config(["--dataset_config", __file__, *flags]).require_valid()
    assert message in str(caught.value)
