"""Pipelines with several image sizes per step, any number of micro-batches, fp16 scaling, dropout and checkpointing."""

import json
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch
from one_result import BOUNDS, REFERENCE, train_layout, write_even_dataset
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from tiny_pipelines import TINY
from torch import nn
from training_runs import max_relative_difference, train, write_images

from library.config import parse_config
from library.config.types import StepRange
from library.distributed.parallel_dims import ParallelDims
from library.distributed.step_phases import record_phase
from library.models.families import FAMILIES
from library.parallel.gradient_accumulation import TrainingTask
from library.parallel.parallel_plan import BlockSequence, ParallelPlan, UNetBlockSequence
from library.parallel.pipeline import PipelineStep, PipelineStrategy
from library.parallel.pipeline_stages import StageBoundary, StageRunner
from library.training.oom_advice import suggest_oom_fixes
from library.training.profiler import DenoiserCalls, StepProfiler


def run(folder: Path, ranks: int, *flags: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Train with SGD on images of two sizes; return the adapter and the last value of each metric."""
    data = folder / "dataset.toml"
    words = (
        "--pretrained_model_name_or_path",
        "random:flux:tiny",
        "--dataset_config",
        str(data),
        *(
            "--train_batch_size 1 --gradient_accumulation_steps 5 --max_train_steps 3 --learning_rate 0.5 "
            "--network_dim 4 --optimizer_type SGD --network_train_unet_only"
        ).split(),
    )
    file = Path(run_on_ranks(ranks, train, *words, "--output_dir", str(folder / f"of{ranks}"), *flags)[0])
    lines = file.with_name("lora.metrics.jsonl").read_text().splitlines()
    return load_file(file), {name: value for line in lines for name, value in json.loads(line).items()}


@pytest.mark.parametrize("sizes", [pytest.param({(96, 64): 5}, marks=pytest.mark.slow), {(96, 64): 3, (64, 96): 2}])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_a_step_may_have_any_number_of_micro_batches_of_any_sizes(sizes, schedule, tmp_path):
    write_images(tmp_path, sizes)
    one, metrics = run(tmp_path, 1)
    pipelined, pipeline_metrics = run(tmp_path, 2, "--pp_size", "2", "--pp_schedule", schedule)

    assert max_relative_difference(one, pipelined) < BOUNDS["no"]
    kinds = [name for name in metrics if name.startswith(("loss/timestep/", "loss/bucket/"))]
    assert len(kinds) > len(sizes)
    one_by_one, pipelined_values = (
        {name: values.get(name) for name in kinds} for values in (metrics, pipeline_metrics)
    )
    assert pipelined_values == pytest.approx(one_by_one, rel=1e-3)


def test_recomputation_repeats_dropout(tmp_path):
    data, flags = write_even_dataset(tmp_path), ("--network_dropout", "0.4", "--gradient_checkpointing")
    one = train_layout(REFERENCE, "flux", data, tmp_path, *flags)
    pipelined = train_layout("PP 2, gpipe", "flux", data, tmp_path, *flags)

    assert max_relative_difference(one, pipelined) < BOUNDS["no"]


class Blocks(nn.Module):
    """Four blocks, and a checkpointing function that tests replace."""

    def __init__(self):
        super().__init__()
        self.row = nn.ModuleList([Block(2, 2) for _ in range(4)])
        self.gradient_checkpointing, self._gradient_checkpointing_func = True, None


class Block(nn.Linear):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states)


def build_single_process_pipeline() -> PipelineStrategy:
    """A pipeline with all stages in this process, without a process group."""
    pipeline = PipelineStrategy.__new__(PipelineStrategy)
    pipeline.dims, pipeline.schedule, pipeline.pipeline_stage, pipeline.is_last_stage = ParallelDims(), "1f1b", 0, True
    pipeline.device, pipeline.tensor_parallel, pipeline.stage_group = torch.device("cpu"), None, None
    pipeline._sharded = None
    return pipeline


@pytest.mark.parametrize("every", [1, 2])
def test_every_nth_block_is_checkpointed_by_the_models_own_function(every, monkeypatch):
    from library.parallel import activation_checkpointing

    model, pipeline, checkpointed = Blocks(), build_single_process_pipeline(), []
    model._gradient_checkpointing_func = activation_checkpointing.BlockCheckpointing(every, offload=False)
    monkeypatch.setattr(
        activation_checkpointing,
        "checkpoint",
        lambda call, *inputs, **named: checkpointed.append(call) or call(*inputs),
    )
    pipeline._partition_model(model, ParallelPlan(BlockSequence.from_lists(model, ["row"], ["hidden_states"])))
    pipeline.stage_runner.set_stage_forward(0, 4, None)
    for _ in range(2):
        inputs = torch.ones(1, 2)
        for block in model.row:
            inputs = block(inputs)

    assert len(checkpointed) == 2 * 4 // every


def test_the_grad_scaler_can_unscale_gradients_on_every_stage():
    weight, scaler = nn.Parameter(torch.tensor(3.0)), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer, pipeline = torch.optim.SGD([weight], lr=0.25), build_single_process_pipeline()
    pipeline.accelerator = SimpleNamespace(scaler=scaler, autocast=nullcontext)
    pipeline._all_reduce_gradients, pipeline._all_reduce_loss = lambda processes: None, lambda total: total
    task = create_autospec(TrainingTask, side_effect=lambda batch, step: weight * batch)

    def all_stages(loss_of, *more):
        losses = [loss_of(batch) for batch in more[-1]]
        sum(losses).backward()
        return sum(losses).detach()

    pipeline.pipeline_schedules = SimpleNamespace(run=all_stages)
    assert float(pipeline.compute_gradients(task, [1.0, 2.0], 2, 0)) == 4.5
    assert float(weight.grad) == 6.0
    scaler.unscale_(optimizer)
    assert float(weight.grad) == 1.5

    pipeline.pipeline_schedules = SimpleNamespace(run=lambda *_: torch.zeros(()))  # on a stage that is not the last
    pipeline.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    pipeline.compute_gradients(task, [1.0, 2.0], 2, 0)
    scaler.unscale_(optimizer)


def test_flops_of_a_micro_batch_are_counted_once():
    model, calls, job = nn.Identity(), DenoiserCalls(), PipelineStep(None, None, ["first", "second"])
    with calls.record(model):
        for number in (0, 0, 1, 0, 1):  # shape inference first, a second stage last
            with job.start_micro_batch(number) as batch:
                model(torch.ones(1))
                assert batch == job.batches[number]
        model(torch.ones(1))
    assert sum(calls.counts.values()) == 3


@pytest.mark.slow
def test_profiled_flops_of_a_pipeline_are_per_device(tmp_path):
    write_images(tmp_path, {(96, 64): 3, (64, 96): 2})
    words = ("--max_train_steps", "4", "--profile_steps", "2:4")
    _, one = run(tmp_path, 1, *words)
    _, two = run(tmp_path, 2, *words, "--pp_size", "2", "--pp_schedule", "interleaved")
    assert two["profile/step_teraflop"] == pytest.approx(one["profile/step_teraflop"] / 2)


def test_profiled_flops_are_divided_by_the_model_parallel_size(tmp_path):
    profiler, metrics = StepProfiler(StepRange(2, 6), tmp_path / "trace.json.gz"), {}
    profiler.calls, profiler.seconds = SimpleNamespace(count_flops=lambda denoiser: 4e12), 1.0
    run = SimpleNamespace(
        strategy=SimpleNamespace(model_parallel_size=2, device=torch.device("cpu"), mixed_precision="bf16"),
        task=SimpleNamespace(pipe=SimpleNamespace(unet=None), family=FAMILIES.get("sd1")()),
        metric_logger=SimpleNamespace(log_values=lambda run, values: metrics.update(values)),
    )
    with torch.profiler.profile() as profile, record_phase("other"):
        pass
    profiler._report(run, profile)
    assert metrics["profile/step_teraflop"] == 2.0


def test_oom_advice_for_context_parallel_includes_offload_and_quantization():
    config = parse_config(["--dataset_config", __file__, "--gradient_checkpointing", "--cp_size", "2"]).config
    message = " ".join(suggest_oom_fixes(config, "forward", 4))
    assert "--blocks_to_swap" in message and "--quantize_base" in message and "--on_oom" not in message


@pytest.mark.parametrize(
    "flags", [("--pp_size", "2"), ("--tp_size", "2"), ("--fsdp",), ("--deepspeed", "--zero_stage", "3")]
)
def test_oom_advice_omits_options_that_would_be_refused(flags):
    config = parse_config(["--dataset_config", __file__, "--gradient_checkpointing", *flags]).config
    message = " ".join(suggest_oom_fixes(config, "forward", 4))
    assert "--blocks_to_swap" not in message and ("--quantize_base" in message) is ("--deepspeed" not in flags)
    assert "--on_oom" not in message and "--cpu_offload_checkpointing" in message


@pytest.mark.quick
@pytest.mark.parametrize("model", ["sd1", "sdxl"])
def test_unet_stages_compute_the_same_as_the_full_unet(model):
    """Also for sizes that do not halve evenly, for which up blocks read the size of the next skip connection."""
    tiny = TINY[model]()
    unet, batch = tiny.pipe.unet, tiny.batch
    latents = torch.randn(2, batch.latents.shape[1], 9, 13, generator=torch.Generator().manual_seed(1))
    predict = partial(FAMILIES.get(tiny.family)().predict, tiny.pipe, unet, latents, torch.full((2,), 0.5), batch)
    with torch.no_grad():
        expected = predict()
        runner = StageRunner(UNetBlockSequence.from_unet(unet))
        ends = [0, 1, 2, 3, 4, len(runner.block_sequence.blocks)]
        received = None
        for first, end in pairwise(ends):
            runner.set_stage_forward(first, end, received)
            try:
                message = predict()
            except StageBoundary as boundary:
                received = boundary.activations
        assert len(ends) == 6 and torch.equal(message, expected)
        runner.set_full_forward(range(len(runner.block_sequence.blocks)), lambda place, flow: flow)
        assert torch.equal(predict(), expected)


def test_a_checkpointing_budget_trains_the_same_lora_in_a_pipeline(tmp_path):
    flags = [
        "--pretrained_model_name_or_path",
        "random:flux:tiny",
        "--dataset_config",
        str(write_even_dataset(tmp_path)),
        *(
            "--max_train_steps 3 --learning_rate 0.5 --optimizer_type SGD --network_dim 2 "
            "--gradient_accumulation_steps 2"
        ).split(),
    ]
    budget = ("--gradient_checkpointing", "--activation_memory_budget", "0.5")
    one = run_on_ranks(1, train, *flags, "--output_dir", str(tmp_path / "one"))[0]
    two = run_on_ranks(2, train, *flags, *budget, "--output_dir", str(tmp_path / "two"), "--pp_size", "2")[0]
    assert max_relative_difference(load_file(one), load_file(two)) < BOUNDS["no"]
