"""Gradient synchronization: when gradients are all-reduced, how they are scaled and divided, for every strategy.

The loss of a micro-batch is the sum over its samples, divided by the samples of the whole optimizer step (of all ranks
and micro-batches).  So gradients are summed over micro-batches and ranks.  Where accelerate, DDP or DeepSpeed
average them instead,
``scale_loss`` multiplies the loss beforehand:

| strategy                | all-reduce                               | loss multiplied by | gradients divided by   |
|-------------------------|------------------------------------------|--------------------|------------------------|
| single process          | none                                     | accumulation steps | accumulation steps (a) |
| DDP                     | in backward of the last micro-batch,     | accumulation steps | accumulation steps (a) |
|                         | per bucket                               | x world size       | x world size (DDP)     |
| DDP, --on_oom recover   | flat, after the last micro-batch,        | as DDP             | accumulation steps (a) |
|                         | when no rank ran out of memory           |                    | x world size           |
| FSDP, tensor parallel,  | flat, over all ranks, after the last     | as DDP             | accumulation steps (a) |
| context parallel        | micro-batch (adapters are replicated)    |                    | x world size x cp (*)  |
| tensor parallel,        | those of sharded weights over the ranks  | as DDP             | accumulation steps (a) |
| --train full            | with the same shard, others over all     |                    | x world size           |
| FSDP, --train full      | reduce-scatter in backward of every      | as DDP             | accumulation steps (a) |
|                         | micro-batch; HSDP: all-reduce in the last|                    | x world size x cp      |
|                         | x TP: then those of whole weights, flat  |                    | (FSDP), others also tp |
| pipeline                | flat, over all ranks, after the schedule | 1                  | cp (*)                 |
| DeepSpeed               | in backward, by DeepSpeed                | world size         | world size (DeepSpeed) |
| gradient probe, warm-up | none with DDP and DeepSpeed; FSDP's and  | 1 (0 before the    | dp x cp (*)            |
| (``Strategy.backward``) | ZeRO 3's own with --train full, else     | last stage)        |                        |
|                         | flat over all                            |                    |                        |

(a) By accelerate, in ``Accelerator.backward``.
(*) Tensor parallel: gradients that are complete on every rank of a group are divided by tp first; those of adapters in
sharded layers are partial.  Context parallel: the backward of the all-gather of tokens sums over
cp ranks, hence the factor cp (``ulysses``).
"""

from collections.abc import Callable, Container, Iterable
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ..distributed.parallel_dims import ParallelDims
from ..distributed.step_phases import record_phase
from .sharded_weights import get_local_shard

MAX_FLAT_ELEMENTS = 2**27
"""Elements of gradients that are copied into one tensor for an all-reduce."""


def scale_loss(
    loss: Tensor, engine: Literal["accelerate", "deepspeed"], accumulation_steps: int, world_size: int
) -> Tensor:
    """Cancel the averages that follow: over micro-batches (by accelerate only) and over ranks."""
    if engine == "deepspeed":  # whose own gradient_accumulation_steps is 1
        return loss * world_size
    return loss * accumulation_steps * world_size


class FlatGradients:
    """A copy of all gradients in one tensor.  Creating it allocates memory, the all-reduce does not."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, include_missing: bool = False):
        """``include_missing``: use zeros for trainable parameters without a gradient, which other ranks may have."""
        parameters = list(parameters)
        if include_missing:
            for parameter in parameters:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        self._gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self._flat = torch.cat([gradient.reshape(-1) for gradient in self._gradients]) if self._gradients else None

    def all_reduce_mean(self, divisor: int, group: dist.ProcessGroup | None = None) -> None:
        """Sum over all ranks, or those of ``group``, divide by ``divisor``, and copy the result to the gradients."""
        if self._flat is None:
            return
        dist.all_reduce(self._flat, group=group)
        self._flat /= divisor
        parts = torch.split(self._flat, [gradient.numel() for gradient in self._gradients])
        for gradient, part in zip(self._gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def all_reduce_gradients(
    model: nn.Module,
    dims: ParallelDims,
    divisor: int,
    partial_grad_parameters: Container[nn.Parameter],
    *,
    include_missing: bool,
    sharded: Container[nn.Parameter] = (),
    replica_group: dist.ProcessGroup | None = None,
) -> None:
    """All-reduce gradients over all ranks of FSDP, tensor, context and pipeline parallelism; divide by divisor x cp.

    ``include_missing``: ranks have gradients of different parameters, and use zeros for the others.  Gradients of
    ``sharded`` parameters are those of a part, and all-reduced over the ranks that have the same (``replica_group``).
    """
    parameters = [each for each in model.parameters() if each.requires_grad]
    parts = [each for each in parameters if each in sharded]
    others = [each for each in parameters if each not in sharded]
    if dims.tp > 1:
        for parameter in others:
            if parameter.grad is not None and parameter not in partial_grad_parameters:
                parameter.grad /= dims.tp
    with record_phase("communication"):
        for each, group in ((others, None), (parts, replica_group)):
            for members in group_by_size(each):
                gradients = FlatGradients(members, include_missing=include_missing)
                gradients.all_reduce_mean(divisor * dims.cp, group)


@torch.no_grad()
def all_reduce_replicated(
    parameters: Iterable[nn.Parameter],
    partial_grad_parameters: Container[nn.Parameter],
    group: dist.ProcessGroup,
    device: torch.device,
) -> None:
    """All-reduce the gradients, which FSDP shards, of weights that every tensor-parallel rank has: means and sums.

    Those of ``partial_grad_parameters`` are summed; others are equal but for the rounding of a device's atomic sums.
    """
    for members in group_by_size(each for each in parameters if each.grad is not None):
        gradients = [get_local_shard(cast(Tensor, each.grad)) for each in members]
        for parameter, gradient in zip(members, gradients, strict=True):
            if parameter not in partial_grad_parameters:
                gradient /= group.size()
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).to(device)
        dist.all_reduce(flat, group=group)
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


def group_by_size(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Group parameters so that the flat copy of a group's gradients is small; adapters are one group."""
    groups, used = list[list[nn.Parameter]](), 0
    for parameter in parameters:
        if not groups or used + parameter.numel() > MAX_FLAT_ELEMENTS:
            groups.append([])
            used = 0
        groups[-1].append(parameter)
        used += parameter.numel()
    return groups


def all_reduce_loss(accelerator: Accelerator, loss: Tensor, *, stop_requested: bool) -> tuple[Tensor, Tensor]:
    """Sum the loss over all ranks; return it with the number of ranks that were asked to stop, on the device."""
    stop_flag = loss.new_full((), float(stop_requested))
    with record_phase("communication"):
        total, num_stop_requests = accelerator.reduce(torch.stack([loss, stop_flag]), reduction="sum")
    return total, num_stop_requests


def exclude_frozen_from_ddp(model: nn.Module) -> None:
    """Have DDP ignore frozen parameters and buffers: they are equal on all ranks and need no broadcast at the start."""
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    ignored: Any = model
    ignored._ddp_params_and_buffers_to_ignore = [*frozen, *(name for name, _ in model.named_buffers())]


def register_ddp_comm_hook(model: nn.Module, on_last_bucket: Callable[[], None]) -> None:
    """All-reduce DDP's buckets as DDP does without a hook; call ``on_last_bucket`` before the last."""

    def all_reduce_bucket(_: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined, unused-ignore]
        if bucket.is_last():
            on_last_bucket()
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]

    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            module.register_comm_hook(None, all_reduce_bucket)
