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
    found = sum_phase_seconds(profile.events())
    assert found.keys() == {"other", "forward", "encode"}
    assert 0.04 <= found["encode"] < 0.06 and 0.02 <= found["forward"] < 0.04 and 0.01 <= found["other"] < 0.03


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
    found = measure_peak_flops(torch.device("cpu"), torch.float32, size=256)
    assert 1e8 < found < 1e14


def test_peak_flops_are_none_when_out_of_memory(monkeypatch):
    def fail(*shape, **settings):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "randn", fail)
    assert measure_peak_flops(torch.device("meta"), torch.float32) is None


@pytest.mark.parametrize("twice", [False, True])
def test_flops_counted_on_the_meta_device_are_those_of_the_model(twice):
    family = FAMILIES.get("sd1")()
    unet = family.load("random:sd1:tiny", torch.float32, ["unet"]).unet.requires_grad_(False).train()
    width = unet.config.cross_attention_dim

    def call(count):
        sample = torch.randn(count, 4, 8, 8, requires_grad=True)
        return unet(sample, torch.ones(count), encoder_hidden_states=torch.randn(count, 77, width, requires_grad=True))

    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        call(2).sample.sum().backward()
    calls = DenoiserCalls()
    if twice:
        unet.enable_gradient_checkpointing()
    with calls.record(unet), torch.no_grad():
        call(2), call(2), call(1)
    flops = calls.count_flops(unet)
    assert flops == 2.5 * counter.get_total_flops() and len(calls.counts) == 2
    call(1)
    assert sum(calls.counts.values()) == 3  # nobody counts any more


@pytest.mark.slow
def test_profiling_does_not_change_a_run_and_reports_phases(even_dataset, tmp_path):
    words = (
        "--dataset_config",
        str(even_dataset),
        "--train_batch_size",
        "2",
        "--max_train_steps",
        "9",
        "--network_dim",
        "2",
        "--learning_rate",
        "0.1",
    )
    plain = run_on_ranks(2, train, *words, "--output_dir", str(tmp_path / "plain"))[0]
    found = run_on_ranks(2, train, *words, "--output_dir", str(tmp_path / "told"), "--profile_steps", "2:8")[0]
    one, other = load_file(plain), load_file(found)
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)

    lines = [json.loads(line) for line in (tmp_path / "told" / "lora.metrics.jsonl").read_text().splitlines()]
    (told,) = (line for line in lines if "profile/step_seconds" in line)
    assert told["step"] == 8 and all(told[f"profile/{phase}_seconds"] > 0 for phase in PHASES)
    assert told["profile/collectives_seconds"] > 0
    assert told["profile/step_teraflop"] > 0 and "profile/mfu" not in told  # of a processor no peak is known
    with gzip.open(tmp_path / "told" / "lora.trace.json.gz") as file:
        names = [event.get("name") for event in json.load(file)["traceEvents"]]
    assert "gloo:all_reduce" in names and names.count("phase/forward") == names.count("phase/optimizer") / 2 == 3


def test_callbacks_between_steps_are_not_counted(tmp_path):
    """Of steps 2 to 7, with 2 ms each, and 20 ms after each of them in which the model is called, too."""
    model = torch.nn.Identity()
    run = SimpleNamespace(
        state=SimpleNamespace(step=0),
        plan=SimpleNamespace(steps=9),
        strategy=SimpleNamespace(
            device=HOST, comm=SimpleNamespace(is_main=True), model_parallel_size=1, mixed_precision="no"
        ),
        task=SimpleNamespace(pipe=SimpleNamespace(unet=model), family=SimpleNamespace(denoiser_name="unet")),
    )

    class Drawing:
        id, is_deferrable = "drawing", True
        should_run = staticmethod(lambda run: True)

        def __call__(self, run):
            model(torch.ones(1))
            time.sleep(0.02)

    told, profiled = {}, StepProfiler(StepRange(2, 7), tmp_path / "trace.json")
    assert profiled.num_timed == 2 and profiled.num_profiled == 3
    run.metric_logger = SimpleNamespace(log_values=lambda run, figures: told.update(figures))
    profiled.calls.count_flops = lambda denoiser: sum(profiled.calls.counts.values())
    callbacks = profiled.wrap([Drawing()])
    for step in range(1, 10):
        with step_phases.record_phase("forward"):
            model(torch.ones(1))
            time.sleep(0.002)
        run.state.step = step
        for callback in [callback for callback in callbacks if callback.should_run(run)]:
            callback(run)
    assert told["profile/step_teraflop"] * 1e12 == 1
    assert 0.002 <= told["profile/step_seconds"] < 0.01 and 0.002 <= told["profile/forward_seconds"] < 0.01
    assert told["profile/other_seconds"] < 0.008


def test_rolled_back_steps_are_profiled_when_repeated(tmp_path):
    run = SimpleNamespace(
        state=SimpleNamespace(step=0),
        plan=SimpleNamespace(steps=9),
        strategy=SimpleNamespace(
            device=HOST, comm=SimpleNamespace(is_main=True), model_parallel_size=1, mixed_precision="no"
        ),
        task=SimpleNamespace(
            pipe=SimpleNamespace(unet=torch.nn.Identity()), family=SimpleNamespace(denoiser_name="unet")
        ),
    )
    told = []
    run.metric_logger = SimpleNamespace(log_values=lambda run, figures: told.append(run.state.step))
    callbacks = StepProfiler(StepRange(2, 6), tmp_path / "trace.json").wrap([])
    for step in (1, 2, 1, 2, 3, 4, 3, 4, 5, 6, 5, 6, 7):
        run.state.step = step
        for callback in [callback for callback in callbacks if callback.should_run(run)]:
            callback(run)
    assert told == [6] and (tmp_path / "trace.json").is_file()


@pytest.mark.parametrize(("begins", "ends", "said"), [(0, 9, ""), (3, 9, "steps 4 to 9"), (0, 5, "steps 1 to 5")])
def test_a_run_without_all_profiled_steps_logs_a_warning(begins, ends, said, tmp_path, caplog):
    run = SimpleNamespace(state=SimpleNamespace(step=begins), plan=SimpleNamespace(steps=ends))
    for callback in StepProfiler(StepRange(2, 7), tmp_path / "trace").wrap([]):
        callback.on_train_begin(run)
    assert said in caplog.text and bool(said) is bool(caplog.text)
