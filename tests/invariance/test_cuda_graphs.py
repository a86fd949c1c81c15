"""Training with CUDA graphs: static inputs and gradients change no bit, and nothing in a graph needs the host.

On a CPU a graph is replayed by calling its function; what a capture would refuse is found on the ``meta`` device.
"""

import tempfile
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from problem_lines import format_lines
from rank_processes import run_on_ranks
from replayed_graphs import CallingCapture, build_run_with_graphs
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.correctness import record_losses
from benchmarks.synthetic_run import build_run, write_dataset
from library.config import parse_config
from library.models import constant_copies
from library.models.constant_copies import ConstantCopies
from library.models.families import FAMILIES
from library.parallel.async_copy import CopyStream
from library.parallel.cuda_graphs import GradientBuffers, StepGraphs
from library.training.validate_model import validate_cuda_graphs

SIZES = [(64, 64), (96, 64)]
META = torch.device("meta")


def train(model, options, max_graphs, sizes=SIZES, steps=4):
    """Train with at most so many graphs; return losses, weights, captures and replays."""
    folder = Path(tempfile.mkdtemp())
    flags = ["--pretrained_model_name_or_path", model, "--resolution", "64", "--network_dim", "2", *options]
    argv = write_dataset([*flags, "--learning_rate", "1e-2"], folder, steps, sizes=sizes, min_images=4)
    if not max_graphs:
        with build_run(argv, folder) as run:
            return record_losses(run), copy_weights(run), None
    with build_run_with_graphs(argv, folder, max_graphs) as (run, capture):
        losses = record_losses(run)
        return losses, copy_weights(run), (capture.captured, capture.replayed, run.strategy.step_graphs.num_eager)


def copy_weights(run):
    return [parameter.detach().numpy().copy() for parameter in run.parameters]


def compare_with_graphs(model, options, max_graphs, expected_counts, world_size=1):
    plain = run_on_ranks(world_size, train, model, options, 0)
    graphed = run_on_ranks(world_size, train, model, options, max_graphs)
    for (losses, weights, _), (graph_losses, graph_weights, counts) in zip(plain, graphed, strict=True):
        assert graph_losses == losses
        assert all((first == second).all() for first, second in zip(weights, graph_weights, strict=True))
        assert counts == expected_counts, counts


ACCUMULATED = ("--gradient_accumulation_steps", "2", "--min_snr_gamma", "5")


def test_a_step_of_replays_is_equal_to_the_bit():
    compare_with_graphs("random:sdxl:tiny", ACCUMULATED, 8, (2, 8, 0))


@pytest.mark.parametrize(
    ("model", "options", "max_graphs", "counts"),
    [
        ("random:sd1:tiny", (*ACCUMULATED, "--network_dropout", "0.3", "--mixed_precision", "bf16"), 8, (2, 8, 0)),
        ("random:sd1:tiny", ACCUMULATED, 1, (1, 4, 4)),  # the second size runs without a graph
        ("random:flux:tiny", ("--gradient_checkpointing", "--max_grad_norm", "0.01"), 8, (2, 4, 0)),
    ],
)
def test_dropout_half_precision_checkpointing_and_sizes_beyond_the_limit_are_equal_to_the_bit(
    model, options, max_graphs, counts
):
    compare_with_graphs(model, options, max_graphs, counts)


def test_two_processes_all_reduce_the_gradients_of_their_graphs():
    options = ("--optimizer_type", "SGD", *ACCUMULATED)
    plain, graphed = (run_on_ranks(2, train, "random:sd1:tiny", options, graphs) for graphs in (0, 8))
    for (losses, weights, _), (graph_losses, graph_weights, counts) in zip(plain, graphed, strict=True):
        assert graph_losses == pytest.approx(losses, rel=1e-6) and counts[2] == 0
        for first, second in zip(weights, graph_weights, strict=True):
            torch.testing.assert_close(torch.from_numpy(second), torch.from_numpy(first), rtol=1e-4, atol=1e-7)
    assert all((first == second).all() for first, second in zip(graphed[0][1], graphed[1][1], strict=True))


@pytest.mark.quick
def test_gradients_that_are_there_are_added_to():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    gradients = GradientBuffers()
    buffers = gradients.get(parameters)
    for buffer in buffers:
        buffer.fill_(7)  # of the step before
    parameters[1].grad = torch.full((2,), 3.0)
    parameters[2].grad = buffers[2]
    gradients.attach(parameters)
    assert [parameter.grad.tolist() for parameter in parameters] == [[0, 0], [3, 3], [7, 7]]
    assert all(parameter.grad is buffer for parameter, buffer in zip(parameters, buffers, strict=True))
    assert all(map(torch.Tensor.is_set_to, gradients.get(parameters[1:]), buffers[1:])), "all graphs share them"


class LinearTask:
    """The loss of a linear layer, with inputs of any length and one parameter that gets no gradient."""

    def __init__(self):
        self.recorded = []

    def prepare(self, batch, step):
        return LinearInputs(batch, torch.linspace(0.5, 1, len(batch)))

    def compute_losses(self, inputs, model):
        return model[0](inputs.states).square().mean(1)

    def record_losses(self, inputs, losses, step):
        self.recorded.append(losses)


@dataclass
class LinearInputs:
    states: torch.Tensor
    loss_weights: torch.Tensor

    def get_tensors(self):
        return {"states": self.states, "rest": (self.loss_weights, None)}

    def replace_tensors(self, tensors):
        return LinearInputs(tensors["states"], tensors["rest"][0])


@pytest.mark.quick
@pytest.mark.parametrize("max_graphs", [0, 1, 2, 8])
def test_micro_batches_of_a_step_with_and_without_graphs_are_added_up(max_graphs):
    """Graphs are captured, and others replayed, while there are gradients of earlier micro-batches."""
    results, batches = [], [torch.randn(size, 3) for size in (2, 4, 2, 3, 2, 4)]
    for limit in (0, max_graphs):
        torch.manual_seed(0)
        model = torch.nn.ModuleList([torch.nn.Linear(3, 5), torch.nn.Linear(1, 1)])
        graphs, task = StepGraphs(model, nullcontext, CallingCapture(), limit), LinearTask()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        losses = []
        for _ in range(3):
            for batch in batches:
                losses.append(graphs.run_micro_batch(task, batch, 0, 17, lambda loss: (loss * 4 / 3).backward()))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        assert model[1].weight.grad is None and graphs.count == min(limit, 3)
        results.append([*losses, *task.recorded, *model.parameters()])
    assert all(map(torch.equal, *results))
    assert not torch.equal(results[0][0], results[0][len(batches)]), "it trains"


class HostCopyDetector(TorchDispatchMode):
    """Records copies from the host to the device, which a graph cannot have."""

    def __init__(self):
        super().__init__()
        self.copies = []

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        output = function(*arguments, **(kwargs or {}))
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            source = arguments[1] if function is torch.ops.aten.copy_.default else arguments[0]
            if source.device.type == "cpu" and output.device.type == "meta":
                self.copies.append(str(function))
        return output


def find_host_copies(model, *options):
    """Run what a graph would capture on the meta device, twice; return the copies of the second time."""
    folder, constant_copies._CONSTANTS = Path(tempfile.mkdtemp()), ConstantCopies(keeps_meta_tensors=True)
    flags = ["--pretrained_model_name_or_path", model, "--resolution", "64", "--network_dim", "2", *options]
    with build_run(write_dataset(flags, folder, 2), folder) as run:
        model = run.strategy.unwrap_model(run.model).to(META)
        run.task.to_device = CopyStream(META)
        steps = run.loader.iter_steps(0)
        (batch, *_) = next(steps).micro_batches
        steps.close()
        inputs = run.task.prepare(batch, 0)
        for _ in range(2):  # some models cache tensors in their first forward
            with HostCopyDetector() as detector:
                (run.task.compute_losses(inputs, model) * inputs.loss_weights).sum().backward()
        return detector.copies


@pytest.mark.parametrize("model", ["sd1", "sdxl"])
def test_nothing_in_a_graph_comes_from_the_host(model):
    options = ("--min_snr_gamma", "5", "--loss_type", "huber", "--huber_schedule", "snr", "--gradient_checkpointing")
    assert run_on_ranks(1, find_host_copies, f"random:{model}:tiny", *options) == [[]]


@pytest.mark.parametrize("model", [name for name in FAMILIES.list_names() if name not in ("sd1", "sdxl")])
def test_nothing_in_a_graph_of_any_family_comes_from_the_host(model):
    """Families whose images all need control images are not tried; they compute as those without do."""
    facts = FAMILIES.get(model).facts
    if facts.control.num_images[0]:
        pytest.skip("needs control images")
    if facts.pipeline.frames is not None and facts.pipeline.frames.least > 1:
        pytest.skip("is not trained on images")
    if facts.pipeline.experts is not None:
        assert "cuda_graphs" in facts.blocks.unsupported_strategies
        pytest.skip("another expert computes in another step, which is no copy")
    (copies,) = run_on_ranks(1, find_host_copies, f"random:{model}:tiny", "--network_train_unet_only")
    assert bool(copies) == ("cuda_graphs" in facts.blocks.unsupported_strategies), copies


@pytest.mark.quick
def test_a_constant_is_copied_once_and_found_by_its_values():
    copies, first = ConstantCopies(2, keeps_meta_tensors=True), torch.arange(6.0).view(2, 3)
    copy = copies.get(first, META)
    assert copies.get(first.clone(), META) is copy and copy.is_meta and copy.shape == (2, 3)
    others = [first + 1, first.view(3, 2), first.bfloat16()]
    assert all(copies.get(other, META) is not copy for other in others)
    assert copies.get(first, META) is copy, "none is given up"
    assert copies.get(others[-1], META) is not copies.get(others[-1], META), "there was no room for it"
    assert copies.get(first, torch.device("cpu")) is first


@pytest.mark.quick
def test_combinations_that_a_graph_cannot_have_are_refused_with_the_reason():
    flags = "--cuda_graphs --blocks_to_swap 1 --on_oom recover --fsdp --pp_size 2 --t5_dropout_rate 0.1".split()
    lines = format_lines(parse_config(flags).problems)
    named = [line.split("cannot be combined with ")[1].split(":")[0] for line in lines if "--cuda_graphs" in line]
    assert {"blocks_to_swap", "on_oom", "fsdp", "pp_size"} <= set(named)
    family = FAMILIES.get("sd1")()
    (problem,) = validate_cuda_graphs(parse_config(["--cuda_graphs"]).config, family, True, None)
    assert problem.fix == "add --network_train_unet_only"
    config = parse_config(["--cuda_graphs", "--network_train_unet_only"]).config
    assert not [*validate_cuda_graphs(config, family, True, torch.device("cuda"))]
    lines = format_lines([*validate_cuda_graphs(config, family, False, torch.device("cpu"))])
    assert [line.partition(";")[0] for line in lines] == [
        "--cuda_graphs: needs a CUDA device, and this run has cpu",
        "--cuda_graphs: the launcher asks for an engine whose hooks a graph does not have",
    ]
