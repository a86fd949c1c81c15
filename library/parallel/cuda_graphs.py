"""CUDA graphs (``--cuda_graphs``): forward and backward of a micro-batch are captured once and replayed as a whole.

A step of thousands of small kernels takes as long as the host needs to launch them; a graph launches them at once.
What the host decides stays outside: loading, encoding, random numbers and noise run as always, and their results are
copied into the inputs of the graph, which stay where they are.  Within the graph are the model, the loss of each
sample, the backward pass, and the sum of gradients over micro-batches.

There is one graph for each layout of the inputs: bucket, batch size, lengths of texts, with masks or without.  Graphs
share one memory pool, since only one runs at a time.  Beyond ``MAX_GRAPHS`` layouts a micro-batch runs as always.

The gradient of the loss is an input as well: it has the division by the samples of the step, accelerate's, and the
scale of fp16.
"""

import gc
import logging
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..dataloader.batch import PixelBatch
from ..distributed.step_phases import record_phase

logger = logging.getLogger(__name__)
T = TypeVar("T")
MAX_GRAPHS = 32
"""Layouts that are captured: each graph has tens of MB of descriptions of kernels, and layouts may never end."""
WARMUP_CALLS = 3
"""Calls before the capture, in which libraries choose their kernels and allocate their workspaces."""


class GraphInputs(Protocol):
    """What the loss of a micro-batch is computed from (``training.task.StepInputs``)."""

    @property
    def loss_weights(self) -> Tensor: ...

    def get_tensors(self) -> dict[str, Any]:
        """Return all tensors, in dicts, lists and tuples."""

    def replace_tensors(self, tensors: dict[str, Any]) -> Any:
        """Return the same inputs with other tensors."""


class GraphedTask(Protocol):
    """The training task in two parts: what the host decides, and what a graph has."""

    def prepare(self, batch: PixelBatch, step: int, /) -> Any:
        """Encode and add noise; return ``GraphInputs``."""

    def compute_losses(self, inputs: Any, denoiser: nn.Module, /) -> Tensor:
        """Compute the loss of each sample, before its weight, with this module instead of the wrapped one."""

    def record_losses(self, inputs: Any, losses: Tensor, step: int, /) -> None:
        """Keep the losses for logging."""


Capture = Callable[[Callable[[], T], Callable[[], T]], tuple[T, Callable[[], None]]]
"""Captures the first function, which it does not run, after it has run the second one, which has the same kernels.

Returns the outputs, which every replay writes to the same memory, and the function that replays.
"""


class CudaCapture:
    """Captures functions on one stream and with one memory pool."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], T], warm_up: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        # Nodes that autograd made for parameters on another stream would join that stream to the capture.
        gc.collect()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(WARMUP_CALLS):
                warm_up()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Threads of the loader may allocate pinned memory meanwhile, which the mode "global" forbids.
        mode = "thread_local"
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode=mode):
            outputs = function()
        return outputs, graph.replay


class GradientBuffers:
    """Gradients that stay where they are, for all graphs to add to."""

    def __init__(self) -> None:
        self._buffers: dict[nn.Parameter, Tensor] = {}

    def get(self, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """Return the buffers of parameters; new ones are not attached yet."""
        for parameter in parameters:
            if parameter not in self._buffers:
                self._buffers[parameter] = torch.zeros_like(parameter, requires_grad=False)
        return [self._buffers[parameter] for parameter in parameters]

    def attach(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let each of these parameters have its buffer as gradient, with the gradient that it has, or zeros."""
        empty = []
        for parameter, buffer in zip(parameters, self.get(parameters), strict=True):
            if parameter.grad is buffer:
                continue
            if parameter.grad is None:
                empty.append(buffer)
            else:
                buffer.copy_(parameter.grad)
            parameter.grad = buffer
        if empty:
            torch._foreach_zero_(empty)


@dataclass(frozen=True)
class StepGraph:
    """Forward and backward for one layout of the inputs."""

    inputs: Sequence[Tensor]
    grad_output: Tensor
    """The gradient of the sum of the weighted losses."""
    losses: Tensor
    total: Tensor
    parameters: Sequence[nn.Parameter]
    """The parameters that get a gradient."""
    replay: Callable[[], None]

    def run(self, inputs: Sequence[Tensor], grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """Add to the buffers of gradients; return the losses of samples and the sum of the weighted ones."""
        torch._foreach_copy_([*self.inputs, self.grad_output], [*inputs, grad_output])
        self.replay()
        return self.losses.clone(), self.total.clone()


class StepGraphs:
    """The graphs of a run, by the layout of their inputs."""

    def __init__(
        self,
        model: nn.Module,
        autocast: Callable[[], AbstractContextManager[Any]],
        capture: Capture[tuple[Tensor, Tensor]],
        max_graphs: int = MAX_GRAPHS,
    ):
        """``model``: the trained modules without wrappers; ``autocast`` is accelerate's."""
        self._model, self._autocast, self._capture, self.max_graphs = model, autocast, capture, max_graphs
        self.count = self.num_eager = 0
        """Graphs, and micro-batches that ran without one."""
        self._graphs: dict[Hashable, StepGraph] = {}
        self._gradients = GradientBuffers()
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._addresses: list[int] = []

    def run_micro_batch(
        self,
        task: GraphedTask,
        batch: PixelBatch,
        step: int,
        num_samples: int,
        backward: Callable[[Tensor], None],
    ) -> Tensor:
        """Compute the gradients of a micro-batch; return its part of the loss."""
        with record_phase("forward", batch), self._autocast():
            inputs = task.prepare(batch, step)
        with record_phase("forward", batch):
            graph = self._find_or_capture(task, inputs)
        if graph is None:
            self.num_eager += 1
            with record_phase("forward", batch), self._autocast():
                losses = task.compute_losses(inputs, self._model)
                loss: Tensor = (losses * inputs.loss_weights).sum() / num_samples
            task.record_losses(inputs, losses.detach(), step)
            with record_phase("backward", batch):
                backward(loss)
            return loss.detach()
        with record_phase("forward", batch):
            self._gradients.attach(graph.parameters)
            losses, total = graph.run(_list_tensors(inputs), compute_grad_output(graph.total, num_samples, backward))
        task.record_losses(inputs, losses, step)
        return total / num_samples

    def _find_or_capture(self, task: GraphedTask, inputs: GraphInputs) -> StepGraph | None:
        self._forget_moved_parameters()
        key = _get_layout(inputs)
        if key not in self._graphs and len(self._graphs) < self.max_graphs:
            self._graphs[key] = self._build_graph(task, inputs)
            self.count += 1
            logger.info("CUDA graphs: captured forward and backward for %d layouts of the inputs", len(self._graphs))
            if len(self._graphs) == self.max_graphs:
                logger.warning("CUDA graphs: no more layouts are captured; batches of others run without a graph")
        return self._graphs.get(key)

    def _forget_moved_parameters(self) -> None:
        """Capture again if a parameter is no longer where the graphs read it."""
        addresses = [parameter.data_ptr() for parameter in self._parameters]
        if addresses != self._addresses:
            self._graphs.clear()
            self._addresses = addresses

    def _build_graph(self, task: GraphedTask, inputs: GraphInputs) -> StepGraph:
        leaves, spec = tree_flatten(inputs.get_tensors())
        static = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        static_inputs = inputs.replace_tensors(spec.unflatten(static))
        grad_output = torch.ones((), device=inputs.loss_weights.device)

        def compute(parameters: Sequence[nn.Parameter]) -> tuple[Tensor, Tensor, Any]:
            with self._autocast():
                losses = task.compute_losses(static_inputs, self._model)
                total = (losses * static_inputs.loss_weights).sum()
            grads = torch.autograd.grad(total, parameters, grad_output, allow_unused=True)
            return losses.detach(), total.detach(), grads

        grads = compute(self._parameters)[-1]
        reached = [parameter for parameter, grad in zip(self._parameters, grads, strict=True) if grad is not None]
        del grads
        buffers = self._gradients.get(reached)

        def compute_and_add() -> tuple[Tensor, Tensor]:
            losses, total, grads = compute(reached)
            torch._foreach_add_(buffers, grads)
            return losses, total

        (losses, total), replay = self._capture(compute_and_add, lambda: compute(reached)[:2])
        tensors = [leaf for leaf in static if isinstance(leaf, Tensor)]
        return StepGraph(tensors, grad_output, losses, total, parameters=reached, replay=replay)


def compute_grad_output(like: Tensor, num_samples: int, backward: Callable[[Tensor], None]) -> Tensor:
    """Compute the gradient of the sum of the weighted losses as autograd would, with every scale of the engine."""
    total = torch.zeros_like(like).requires_grad_()
    backward(total / num_samples)
    assert total.grad is not None
    return total.grad


def _list_tensors(inputs: GraphInputs) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(inputs.get_tensors())[0] if isinstance(leaf, Tensor)]


def _get_layout(inputs: GraphInputs) -> Hashable:
    """Return a key that is equal for inputs that one graph can have."""
    leaves, spec = tree_flatten(inputs.get_tensors())
    layouts = [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return str(spec), tuple(layouts)


def find_graph_obstacle(device: torch.device) -> str:
    """Say why a device has no graphs; empty if it has."""
    return "" if device.type == "cuda" else f"needs a CUDA device, and this run has {device.type}"
