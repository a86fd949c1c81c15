"""Where the time of a step goes: parts that add up, operations that are counted once, and a run that stays the same."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from ranks import on_ranks
from safetensors.torch import load_file
from test_run import even, train
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from library.config.values import Steps
from library.distributed import memory, peaks
from library.families import FAMILIES
from library.training import anatomy, stopwatch
from library.training.anatomy import Anatomy, _together
from library.training.flops import Calls
from library.training.stopwatch import Stopwatch

__all__ = ["even"]  # a fixture

PARTS = ["data", "encode", "forward", "backward", "communication", "optimizer", "other"]


def test_a_part_inside_of_another_counts_for_itself_alone(monkeypatch):
    clock = iter([0, 1, 3, 6, 10, 15])
    monkeypatch.setattr(stopwatch.time, "perf_counter", lambda: next(clock))
    waits = []
    watch = Stopwatch(lambda: waits.append(1))
    watch.start()
    with watch.part("forward"), watch.part("encode"):
        pass
    watch.stop()
    assert dict(watch.seconds) == {"other": 1 + 5, "forward": 2 + 4, "encode": 3} and len(waits) == 6


def test_what_overlaps_counts_once():
    assert _together([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4 and _together([]) == 0


@pytest.mark.parametrize(("name", "tera"), [
    ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989), ("NVIDIA L40S", 362),
    ("NVIDIA L40", 181), ("NVIDIA L4", 121), ("NVIDIA GeForce RTX 4090", 165.2), ("NVIDIA A10G", 70),
    ("NVIDIA A100-SXM4-80GB", 312), ("Radeon", None)])  # fmt: skip
def test_the_peak_is_that_of_the_device(name, tera, monkeypatch):
    monkeypatch.setattr(peaks, "device_title", lambda device: name)
    device = torch.device("cpu")
    assert peaks.peak_flops(device, "bf16") == (None if tera is None else tera * 1e12)
    assert peaks.peak_flops(device, "no") is None


@pytest.mark.parametrize("twice", [False, True])
def test_operations_counted_without_weights_are_those_of_the_model(twice):
    family = FAMILIES.get("sd1")()
    unet = family.load("random:sd1:tiny", torch.float32, ["unet"]).unet.requires_grad_(False).train()
    width = unet.config.cross_attention_dim

    def call(count):
        sample = torch.randn(count, 4, 8, 8, requires_grad=True)
        return unet(sample, torch.ones(count), encoder_hidden_states=torch.randn(count, 77, width, requires_grad=True))

    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        call(2).sample.sum().backward()
    calls = Calls()
    if twice:
        unet.enable_gradient_checkpointing()
    with calls.of(unet), torch.no_grad():
        call(2), call(2), call(1)
    flops = calls.flops(unet)
    assert flops == 2.5 * counter.get_total_flops() and len(calls.counts) == 2
    call(1)
    assert sum(calls.counts.values()) == 3  # nobody counts any more


def test_a_run_is_the_same_and_tells_where_its_time_goes(even, tmp_path):
    words = ("--dataset_config", str(even), "--train_batch_size", "2", "--max_train_steps", "9", "--network_dim", "2",
             "--learning_rate", "0.1")  # fmt: skip
    plain = on_ranks(2, train, *words, "--output_dir", str(tmp_path / "plain"))[0]
    found = on_ranks(2, train, *words, "--output_dir", str(tmp_path / "told"), "--profile_steps", "2:8")[0]
    one, other = load_file(plain), load_file(found)
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)

    lines = [json.loads(line) for line in (tmp_path / "told" / "lora.metrics.jsonl").read_text().splitlines()]
    (told,) = (line for line in lines if "profile/step_seconds" in line)
    assert told["step"] == 8 and all(told[f"profile/{part}_seconds"] > 0 for part in PARTS if part != "encode")
    assert told["profile/communication_in_trace_seconds"] > 0
    assert told["profile/step_teraflop"] > 0 and "profile/mfu" not in told  # of a processor no peak is known
    with gzip.open(tmp_path / "told" / "lora.trace.json.gz") as file:
        assert any(event.get("name") == "gloo:all_reduce" for event in json.load(file)["traceEvents"])


def test_what_is_done_between_steps_is_no_part_of_them(monkeypatch, tmp_path):
    """Of steps 2 to 7, with a second each, and an hour after each of them in which the model is called, too."""
    now, model = [0.0], torch.nn.Identity()
    for module in (anatomy, stopwatch):
        monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    run = SimpleNamespace(
        state=SimpleNamespace(step=0), plan=SimpleNamespace(steps=9), actions=[],
        strategy=SimpleNamespace(device=torch.device("cpu"), is_main=False, together=1, precision="no"),
        task=SimpleNamespace(pipe=SimpleNamespace(unet=model), family=SimpleNamespace(denoiser="unet")),
    )  # fmt: skip

    class Drawing:
        can_wait = True
        is_due = staticmethod(lambda run: True)

        def __call__(self, run):
            model(torch.ones(1))
            now[0] += 3600

    run.actions, told, profiled = [Drawing()], {}, Anatomy(Steps(2, 7), tmp_path / "trace")
    run.teller = SimpleNamespace(noted=lambda run, figures: told.update(figures))
    profiled.calls.flops = lambda denoiser: sum(profiled.calls.counts.values())
    actions = profiled.around(run)
    for step in range(1, 10):
        with memory.phase("forward"):
            model(torch.ones(1))
            now[0] += 1
        run.state.step = step
        for action in [action for action in actions if action.is_due(run)]:
            action(run)
    assert told["profile/step_seconds"] == told["profile/forward_seconds"] == told["profile/step_teraflop"] * 1e12 == 1
    assert told["profile/other_seconds"] == 0


@pytest.mark.parametrize(("begins", "ends", "said"), [(0, 9, ""), (3, 9, "begins after step 3"), (0, 5, "with step 5")])
def test_steps_that_do_not_come_are_told(begins, ends, said, tmp_path, caplog):
    run = SimpleNamespace(state=SimpleNamespace(step=begins), plan=SimpleNamespace(steps=ends), actions=[])
    Anatomy(Steps(2, 7), tmp_path / "trace").around(run)
    assert said in caplog.text and bool(said) is bool(caplog.text)
