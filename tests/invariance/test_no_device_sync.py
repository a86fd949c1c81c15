"""Training steps never make the host wait for the device, except when metrics are read.

Steps run on torch's device ``meta``, whose tensors have no data: ``item``, ``float``, ``bool``, ``tolist``, ``cpu`` and
boolean masks fail.
"""

import re
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rank_processes import run_on_ranks
from tiny_pipelines import TINY
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.synthetic_run import build_run, write_dataset
from library.models.families import FAMILIES
from library.parallel.async_copy import AsyncScalarQueue, CopyStream
from library.training import loop
from library.training.trainable_modules import get_trainable_parameters

DEVICE = torch.device("meta")
SITE_PACKAGES, PACKAGE = re.compile(r"site-packages.(diffusers|transformers)\b"), re.compile(r"[/\\]library[/\\]")
MODELS = "random:sd1:tiny random:sdxl:tiny random:sd3:tiny random:flux:tiny random:z_image:tiny random:qwen_image:tiny".split()


class BlockingCopyDetector(TorchDispatchMode):
    """Fails at copies to the device for which the host waits."""

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        kwargs = kwargs or {}
        output = function(*arguments, **kwargs)
        if function is torch.ops.aten._to_copy.default:
            source, target, is_non_blocking = arguments[0], output, kwargs.get("non_blocking")
        elif function is torch.ops.aten.copy_.default:
            target, source, is_non_blocking = *arguments[:2], arguments[2:] == (True,) or kwargs.get("non_blocking")
        else:
            return output
        assert is_non_blocking or source.device == target.device, f"the host waits for {function}"
        return output


class Float64Detector(TorchDispatchMode):
    """Collects the places of this package that compute in float64 on the device, which MPS cannot.

    diffusers and transformers look for MPS themselves, and take float64 on other devices.
    """

    def __init__(self):
        super().__init__()
        self.places = set()

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        output = function(*arguments, **(kwargs or {}))
        tensors = [each for each in tree_leaves(output) if isinstance(each, torch.Tensor)]
        if any(each.device == DEVICE and each.dtype in (torch.float64, torch.complex128) for each in tensors):
            frame = sys._getframe(1)
            while frame is not None and not SITE_PACKAGES.search(frame.f_code.co_filename):
                if PACKAGE.search(frame.f_code.co_filename):
                    self.places.add(f"{frame.f_code.co_filename}:{frame.f_lineno}: {function}")
                    break
                frame = frame.f_back
        return output


class FakeScalarQueue:
    """Replaces the queue in pinned memory, which the meta device does not have."""

    def __init__(self):
        self.count = 0

    def __len__(self):
        return self.count

    def push(self, number):
        assert number.device == DEVICE
        self.count += 1

    def pop(self):
        self.count -= 1
        return 0.0


def move_to_meta_device(run):
    """Move model, optimizer and queues of the run to the meta device."""
    model = run.strategy.unwrap_model(run.model).to(DEVICE)
    trainable = get_trainable_parameters(model)
    run.param_groups = [type(group)(group.name, trainable, group.lr) for group in run.param_groups]
    run.optimizer = torch.optim.AdamW(trainable, lr=1e-4, foreach=True)
    run.strategy.device = run.strategy.accelerator.state.device = DEVICE
    run.task.to_device = CopyStream(DEVICE)
    run.strategy._stop_flags = FakeScalarQueue()


@contextmanager
def run_on_meta_device(tmp_path, *flags):
    """A run on the meta device, without reading metrics, which synchronizes anyway."""
    with build_run(write_dataset(flags, tmp_path, 4), tmp_path) as run:
        move_to_meta_device(run)
        run.is_warmed_up = True
        run.nan_guard = SimpleNamespace(
            take_snapshot=lambda run: None,
            check_or_roll_back=lambda run, metrics: True,
            check_interval=10,
            choose_check_interval=lambda run, num_steps: None,
            restart_timer=lambda: None,
            should_step=run.nan_guard.should_step,
        )
        run.bad_samples.sync_across_ranks = lambda strategy: None
        run.metric_logger.log_steps = lambda run, values: None
        yield run


def find_float64_on_meta_device(model, folder, *options):
    flags = ["--pretrained_model_name_or_path", model, "--resolution", "64", "--network_dim", "2", *options]
    with run_on_meta_device(folder, *flags) as run, Float64Detector() as detector:
        loop.train(run)
    return sorted(detector.places)


NOISE_OPTIONS = "--noise_offset 0.1 --multires_noise_iterations 3 --loss_type huber --min_snr_gamma 5".split()


@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_computed_in_float64_on_the_device(model, tmp_path):
    """MPS has no float64: quantiles and schedules are computed on the host."""
    options = NOISE_OPTIONS if "sd1" in model else []
    assert run_on_ranks(1, find_float64_on_meta_device, model, tmp_path, *options) == [[]]


def double_on_the_device():
    with Float64Detector() as detector:
        metrics_double = compile("tensor.double()", str(Path(loop.__file__)), "eval")
        eval(metrics_double, {"tensor": torch.zeros(2, device=DEVICE)})
    return detector.places


def test_float64_of_this_package_is_found():
    (place,) = double_on_the_device()

    assert "loop.py:1" in place


def train_on_meta_device(model, folder, *options):
    flags = ["--pretrained_model_name_or_path", model, "--resolution", "64", "--network_dim", "2", *options]
    with run_on_meta_device(folder, *flags) as run:
        plan, run.plan = run.plan, replace(run.plan, steps=1)
        loop.train(run)  # some models cache tensors in their first step
        run.plan = plan
        with BlockingCopyDetector():
            loop.train(run)
    return run.state.step, str(run.parameters[0].device)


@pytest.mark.parametrize("model", MODELS)
def test_a_step_never_waits_for_the_device(model, tmp_path):
    assert run_on_ranks(1, train_on_meta_device, model, tmp_path) == [(4, "meta")]


def test_a_step_with_checkpoints_on_the_host_and_a_quantized_base_never_waits_for_the_device(tmp_path):
    options = ("--gradient_checkpointing", "--cpu_offload_checkpointing", "--quantize_base", "nf4")
    assert run_on_ranks(1, train_on_meta_device, "random:flux:tiny", tmp_path, *options) == [(4, "meta")]


@pytest.mark.parametrize("name", ["sd1", "sdxl"])
def test_encoding_captions_in_a_step_does_not_wait_for_the_device(name):
    tiny, family = TINY[name](), FAMILIES.get(name)()
    for part in family.facts.text.components:
        if isinstance(module := getattr(tiny.pipe, part), torch.nn.Module):
            module.to(DEVICE)
    with BlockingCopyDetector():
        cond = family.encode_prompts(tiny.pipe, ["a cat", "two dogs"])
    assert {str(tensor.device) for tensor in cond.values()} == {"meta"}


class Streams:
    """Replaces torch's device module: each stream has its own clock, and host code takes no time."""

    class Stream:
        def __init__(self, device):
            self.time, self.waited_for = 0, []

        def wait_stream(self, other):
            self.time = max(self.time, other.time)
            self.waited_for.append(other)

    def __init__(self):
        self.computing = self.active = self.Stream(DEVICE)

    def current_stream(self, device):
        return self.active

    @contextmanager
    def stream(self, stream):
        before, self.active = self.active, stream
        yield
        self.active = before


class Clocks(TorchDispatchMode):
    """Advances the clock of the current stream by one with each operation on the device."""

    def __init__(self, streams):
        super().__init__()
        self.streams, self.arrivals, self.copy_times = streams, {}, []
        self.copied = Counter()

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        output, stream = function(*arguments, **(kwargs or {})), self.streams.active
        inputs = [leaf for leaf in tree_leaves((arguments, kwargs)) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.device == DEVICE]
        if stream is not self.streams.computing:
            self.copied.update(tuple(tensor.shape) for tensor in outputs)
            self.copy_times.append((stream.time, self.streams.computing.time))
        for tensor in inputs:
            assert stream.time >= self.arrivals.get(tensor.untyped_storage()._cdata, (0,))[0], (
                "read before its copy is complete"
            )
        stream.time += bool(outputs)
        if stream is not self.streams.computing:  # keep the storage, so that its address is not reused
            self.arrivals |= {each.untyped_storage()._cdata: (stream.time, each.untyped_storage()) for each in outputs}
        return output


def record_copies(folder):
    flags = [
        *"--resolution 64 --network_dim 2 --gradient_accumulation_steps 2 --network_dropout 0.1".split(),
    ]
    recorded = Counter()
    with run_on_meta_device(folder, *flags) as run, pytest.MonkeyPatch.context() as patch:
        streams = Streams()
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: recorded.update([tuple(tensor.shape)]))
        run.task.to_device = CopyStream(DEVICE, streams)
        batch = next(run.loader.iter_steps(0)).micro_batches[0]
        batch_tensors = [
            batch.size_conditioning,
            batch.loss_weights,
            batch.moments.mean_and_std,
            *batch.cond.values(),
            torch.zeros(1),
        ]
        with Clocks(streams) as clocks:
            loop.train(run)
    expected = Counter(tuple(tensor.shape) for tensor in batch_tensors for _ in range(2 * run.state.step))
    assert clocks.copied == expected == recorded, (clocks.copied, expected, recorded)
    assert set(map(type, streams.computing.waited_for)) == {Streams.Stream}
    (copy_stream,) = set(streams.computing.waited_for)
    assert not copy_stream.waited_for, "the copy stream waits for no other"
    return clocks.copy_times


def test_inputs_of_a_step_are_copied_while_the_previous_step_runs(tmp_path):
    (copy_times,) = run_on_ranks(1, record_copies, tmp_path)
    assert all(copying < computing for copying, computing in copy_times[len(copy_times) // 8 :])


def read_device_tensors(folder):
    reads = [
        lambda weight: float(weight.sum()),
        lambda weight: bool(weight.isfinite().all()),
        lambda weight: weight.cpu(),
        lambda weight: weight.tolist(),
        lambda weight: weight[weight > 0],
        lambda weight: torch.ones(3).to(weight),
    ]
    with run_on_meta_device(folder, "--resolution", "64") as run, BlockingCopyDetector():
        for read in reads:
            run.state.step = 0
            run.metric_logger.advance_progress = lambda run, read=read: read(run.parameters[0].detach())
            with pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
                loop.train(run)
    return len(reads)


def test_host_reads_of_device_tensors_are_detected(tmp_path):
    assert run_on_ranks(1, read_device_tensors, tmp_path) == [6]


def test_the_scalar_queue_is_first_in_first_out_on_a_cpu():
    queue = AsyncScalarQueue()
    for number in (3.0, 1.0, 2.0):
        queue.push(torch.tensor(number))
    assert len(queue) == 3
    assert [queue.pop(), queue.pop(), queue.pop()] == [3.0, 1.0, 2.0] and not len(queue)
