"""Step profiler: phase times add up, FLOPs are counted once, and the run does not change."""

import gzip
import json
import time
from types import SimpleNamespace

import pytest
import torch
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from training_runs import even_dataset, train

from library.config.types import StepRange
from library.distributed import step_phases
from library.distributed.devices import HOST
from library.models.families import FAMILIES
from library.training import profiler
from library.training.profiler import PHASES, DenoiserCalls, StepProfiler, measure_peak_flops, sum_phase_seconds

__all__ = ["even_dataset"]  # a fixture


def test_the_time_of_a_phase_excludes_nested_phases():
    with torch.profiler.profile() as profile, step_phases.record_phase("other"):
        time.sleep(0.01)
        with step_phases.record_phase("forward"):
            time.sleep(0.02)
            with step_phases.record_phase("encode"):
                time.sleep(0.04)
        with step_phases.record_phase("forward"):
            torch.ones(1).add_(1)
    seconds = sum_phase_seconds(profile.events())
    assert seconds.keys() == {"other", "forward", "encode"}
    assert 0.04 <= seconds["encode"] < 0.06 and 0.02 <= seconds["forward"] < 0.04 and 0.01 <= seconds["other"] < 0.03


@pytest.mark.parametrize("is_profiled", [False, True])
def test_a_phase_synchronizes_the_device_only_when_profiled(is_profiled):
    waits = []
    token = step_phases.SYNCHRONIZE.set(lambda: waits.append(1)) if is_profiled else None
    with step_phases.record_phase("forward"), step_phases.record_phase("encode"):
        pass
    if token is not None:
        step_phases.SYNCHRONIZE.reset(token)
    assert len(waits) == (4 if is_profiled else 0)


def test_peak_flops_are_measured_on_accelerators_only(monkeypatch):
    assert measure_peak_flops(HOST, torch.float32) is None
    monkeypatch.setattr(profiler, "HOST", torch.device("meta"))
    flops = measure_peak_flops(torch.device("cpu"), torch.float32, size=256)
    assert 1e8 < flops < 1e14


def test_peak_flops_are_none_when_out_of_memory(monkeypatch):
    def fail(*shape, **settings):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "randn", fail)
    assert measure_peak_flops(torch.device("meta"), torch.float32) is None


@pytest.mark.slow
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_flops_counted_on_the_meta_device_equal_those_of_the_real_model(is_checkpointed):
    family = FAMILIES.get("sd1")()
    unet = family.load("random:sd1:tiny", torch.float32, ["unet"]).unet.requires_grad_(False).train()
    width = unet.config.cross_attention_dim

    def call(count):
        sample = torch.randn(count, 4, 8, 8, requires_grad=True)
        return unet(sample, torch.ones(count), encoder_hidden_states=torch.randn(count, 77, width, requires_grad=True))

    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        call(2).sample.sum().backward()
    calls = DenoiserCalls()
    if is_checkpointed:
        unet.enable_gradient_checkpointing()
    with calls.record(unet), torch.no_grad():
        call(2), call(2), call(1)
    flops = calls.count_flops(unet)
    assert flops == 2.5 * counter.get_total_flops() and len(calls.counts) == 2
    call(1)
    assert sum(calls.counts.values()) == 3  # calls are no longer counted


@pytest.mark.slow
def test_profiling_does_not_change_a_run_and_reports_phases(even_dataset, tmp_path):
    flags = (
        "--dataset_config",
        str(even_dataset),
        *"--train_batch_size 2 --max_train_steps 9 --network_dim 2 --learning_rate 0.1".split(),
    )
    plain = run_on_ranks(2, train, *flags, "--output_dir", str(tmp_path / "plain"))[0]
    profiled = run_on_ranks(2, train, *flags, "--output_dir", str(tmp_path / "profiled"), "--profile_steps", "2:8")[0]
    one, other = load_file(plain), load_file(profiled)
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)

    lines = [json.loads(line) for line in (tmp_path / "profiled" / "lora.metrics.jsonl").read_text().splitlines()]
    (metrics,) = (line for line in lines if "profile/step_seconds" in line)
    assert metrics["step"] == 8 and all(metrics[f"profile/{phase}_seconds"] > 0 for phase in PHASES)
    assert metrics["profile/collectives_seconds"] > 0
    assert metrics["profile/step_teraflop"] > 0 and "profile/mfu" not in metrics  # the peak FLOPS of a CPU are unknown
    with gzip.open(tmp_path / "profiled" / "lora.trace.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert "gloo:all_reduce" in names and names.count("phase/forward") == names.count("phase/optimizer") / 2 == 3


def test_callbacks_between_steps_are_not_counted(tmp_path):
    """Steps 2 to 7 take 2 ms each; a callback after each step takes 20 ms and calls the model, too."""
    model = torch.nn.Identity()
    run = SimpleNamespace(
        state=SimpleNamespace(step=0),
        plan=SimpleNamespace(steps=9),
        strategy=SimpleNamespace(
            device=HOST, comm=SimpleNamespace(is_main=True), model_parallel_size=1, mixed_precision="no"
        ),
        task=SimpleNamespace(pipe=SimpleNamespace(unet=model), family=FAMILIES.get("sd1")()),
    )

    class SlowCallback:
        id, is_deferrable = "slow", True
        should_run = staticmethod(lambda run: True)

        def __call__(self, run):
            model(torch.ones(1))
            time.sleep(0.02)

    logged, profiler = {}, StepProfiler(StepRange(2, 7), tmp_path / "trace.json")
    assert profiler.num_timed == 2 and profiler.num_profiled == 3
    run.metric_logger = SimpleNamespace(log_values=lambda run, values: logged.update(values))
    profiler.calls.count_flops = lambda denoiser: sum(profiler.calls.counts.values())
    callbacks = profiler.wrap([SlowCallback()])
    for step in range(1, 10):
        with step_phases.record_phase("forward"):
            model(torch.ones(1))
            time.sleep(0.002)
        run.state.step = step
        for callback in [callback for callback in callbacks if callback.should_run(run)]:
            callback(run)
    assert logged["profile/step_teraflop"] * 1e12 == 1
    assert 0.002 <= logged["profile/step_seconds"] < 0.01 and 0.002 <= logged["profile/forward_seconds"] < 0.01
    assert logged["profile/other_seconds"] < 0.008


def test_rolled_back_steps_are_profiled_when_repeated(tmp_path):
    run = SimpleNamespace(
        state=SimpleNamespace(step=0),
        plan=SimpleNamespace(steps=9),
        strategy=SimpleNamespace(
            device=HOST, comm=SimpleNamespace(is_main=True), model_parallel_size=1, mixed_precision="no"
        ),
        task=SimpleNamespace(pipe=SimpleNamespace(unet=torch.nn.Identity()), family=FAMILIES.get("sd1")()),
    )
    logged_steps = []
    run.metric_logger = SimpleNamespace(log_values=lambda run, values: logged_steps.append(run.state.step))
    callbacks = StepProfiler(StepRange(2, 6), tmp_path / "trace.json").wrap([])
    for step in (1, 2, 1, 2, 3, 4, 3, 4, 5, 6, 5, 6, 7):
        run.state.step = step
        for callback in [callback for callback in callbacks if callback.should_run(run)]:
            callback(run)
    assert logged_steps == [6] and (tmp_path / "trace.json").is_file()


@pytest.mark.parametrize(
    ("first_step", "last_step", "warning"), [(0, 9, ""), (3, 9, "steps 4 to 9"), (0, 5, "steps 1 to 5")]
)
def test_a_run_without_all_profiled_steps_logs_a_warning(first_step, last_step, warning, tmp_path, caplog):
    run = SimpleNamespace(state=SimpleNamespace(step=first_step), plan=SimpleNamespace(steps=last_step))
    for callback in StepProfiler(StepRange(2, 7), tmp_path / "trace").wrap([]):
        callback.on_train_begin(run)
    assert warning in caplog.text and bool(warning) is bool(caplog.text)
