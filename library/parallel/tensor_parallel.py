"""Tensor parallelism: linear layers sharded column-wise or row-wise (Megatron), with replicated LoRA adapters.

A column-wise layer (torch's ``ColwiseParallel``; the *rows* of its weight are sharded) computes some of its outputs; a
row-wise layer takes some of its inputs and all-reduces its output.  An adapter uses the same slice of
its own matrices, so its gradient on a rank is partial, and the sum over the tensor-parallel group is the gradient.
Which layers are column-wise and which row-wise is decided in ``parallel_plan``.

With ``--train full`` the shards themselves are trained (``tensor_parallel_weights``), and their gradients are complete.

Shards are plain tensors and not DTensors, on which most optimizers fail.  diffusers' own plan is not used because it
refuses models with adapters.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from .parallel_plan import TensorParallelPlan, list_split_attentions
from .quantize import FrozenLayer, Ranges, take_ranges
from .tensor_parallel_norms import ShardedNorm, iter_norms_over_heads
from .tensor_parallel_weights import TensorParallelWeights, WeightLayout, iter_head_norms


class TensorParallel:
    """The shard of a model's linear layers on this rank."""

    def __init__(
        self,
        rank: int,
        size: int,
        all_reduce: Callable[[Tensor], object],
        weights: TensorParallelWeights | None = None,
    ):
        """``all_reduce`` sums a tensor over the tensor-parallel group, in place; ``weights`` collects trained ones."""
        self.rank, self.size, self.all_reduce, self.weights = rank, size, all_reduce, weights
        self.partial_grad_parameters: set[nn.Parameter] = set()
        """Replicated parameters whose gradient on a rank is partial; that of others is complete on every rank."""
        self._is_bypassed = False
        self._sharded_adapters = set[nn.Module]()
        self._latest_input: tuple[Tensor, bool, Tensor] | None = None
        """The latest input of column-wise layers, whether grad was enabled, and its copy with all-reduced gradient."""

    @classmethod
    def from_group(cls, group: dist.ProcessGroup, weights: TensorParallelWeights | None = None) -> "TensorParallel":
        return cls(dist.get_rank(group), dist.get_world_size(group), partial(dist.all_reduce, group=group), weights)

    def shard_layers(
        self, model: nn.Module, plan: TensorParallelPlan, head_args: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Replace each layer of the plan by this rank's shard; ``head_args`` of attention layers have all heads."""
        norms = list(iter_norms_over_heads(model, plan))  # by the number of heads of all ranks together
        self._shard_attention_heads(model, plan, head_args)
        for norm, width in norms:
            self._shard_norm(norm, width)
        for name, (style, sizes) in plan.items():
            layer = model.get_submodule(name)
            shard = self._shard_colwise if style == "colwise" else self._shard_rowwise
            shard(layer, self._compute_local_ranges(sizes))
            if self.weights is None:
                trained = {parameter for parameter in layer.parameters() if parameter.requires_grad}
                self.partial_grad_parameters |= trained
        if self.weights is not None:
            whole = (norm for norm in iter_head_norms(model, plan) if self.weights.get_whole_shape(norm) is None)
            self.partial_grad_parameters |= set(whole)

    def replace_parameters(self, parameters: Mapping[Tensor, nn.Parameter]) -> None:
        """Take over what is known of parameters for those that FSDP put in their place."""
        self.partial_grad_parameters = {parameters.get(each, each) for each in self.partial_grad_parameters}
        if self.weights is not None:
            self.weights.replace(parameters)

    @contextmanager
    def bypass(self) -> Iterator[None]:
        """Let layers compute unsharded, without collectives, within the context; callers give full frozen weights."""
        self._is_bypassed = True
        try:
            yield
        finally:
            self._is_bypassed = False

    def _compute_local_ranges(self, sizes: Sequence[int]) -> Ranges:
        ranges, offset = [], 0
        for size in sizes:
            start, end = (size // self.size * rank + min(rank, size % self.size) for rank in (self.rank, self.rank + 1))
            ranges.append((offset + start, end - start))
            offset += size
        return tuple(ranges)

    def _shard_attention_heads(self, model: nn.Module, plan: TensorParallelPlan, head_args: Mapping[str, int]) -> None:
        attentions = list_split_attentions(plan)
        for name, module in model.named_modules():
            if f"{name}.proj_mlp" in plan and hasattr(module, "mlp_hidden_dim"):
                module.mlp_hidden_dim = module.mlp_hidden_dim // self.size  # where gate and value are split at it
            heads = getattr(module, "heads", getattr(module, "num_heads", None))
            if heads is None or name not in attentions:
                continue
            if heads % self.size:  # refused in preflight
                raise AssertionError(f"{heads} heads of {name} are not divisible by tp_size {self.size}")
            # Attention processors compute the head size from them.
            for size in ("heads", "num_heads", "num_kv_heads", "inner_dim", "inner_kv_dim"):
                if hasattr(module, size):
                    setattr(module, size, getattr(module, size) // self.size)
            if head_args:
                module.register_forward_pre_hook(partial(self._take_heads, head_args), with_kwargs=True)

    def _take_heads(
        self, head_args: Mapping[str, int], module: nn.Module, inputs: Any, arguments: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Return the arguments of an attention layer with this rank's part of what has all heads."""
        taken = {}
        for name, axis in head_args.items():
            if not self._is_bypassed and arguments.get(name) is not None:
                taken[name] = tuple(each.chunk(self.size, axis)[self.rank] for each in arguments[name])
        return inputs, {**arguments, **taken}

    def _shard_colwise(self, layer: nn.Module, ranges: Ranges) -> None:
        base = _get_base_layer(layer)
        self._shard_weight(base, 0, ranges)
        if base.bias is not None:
            self._shard_parameter(base, "bias", 0, ranges)
        layer.register_forward_pre_hook(lambda _, inputs: self._copy_input(inputs))

        def shard_output(_: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            return output if self._is_bypassed else take_ranges(output, -1, ranges)

        for lora_b in self._take_adapter_layers(layer, "lora_B"):
            lora_b.register_forward_hook(shard_output)

    def _shard_rowwise(self, layer: nn.Module, ranges: Ranges) -> None:
        base = _get_base_layer(layer)
        self._shard_weight(base, 1, ranges)
        if base.bias is not None and self.weights is not None:  # a trained bias is whole on all ranks
            base.forward = lambda input: functional.linear(input, base.weight)
            layer.register_forward_hook(
                lambda _, inputs, output: (total := self._all_reduce_output(output)) + base.bias.to(total.dtype)
            )
            return
        if base.bias is not None and self.rank:  # rank 0 adds the bias
            _set_frozen_parameter(base, "bias", torch.zeros_like(base.bias))
        layer.register_forward_hook(lambda _, inputs, output: self._all_reduce_output(output))
        for lora_a in self._take_adapter_layers(layer, "lora_A"):
            lora_a.forward = self._build_sharded_forward(lora_a, ranges)

    def _take_adapter_layers(self, layer: nn.Module, name: str) -> list[Any]:
        """List the layers of adapters that are not sharded yet: two experts may have one adapter."""
        layers = [each for each in getattr(layer, name, {}).values() if each not in self._sharded_adapters]
        self._sharded_adapters.update(layers)
        return layers

    def _shard_norm(self, norm: Any, width: int) -> None:
        if norm.weight is not None:
            self._shard_parameter(norm, "weight", 0, self._compute_local_ranges((width,)))
        norm.forward = ShardedNorm(norm, width, self.all_reduce)

    def _shard_weight(self, base: Any, dim: int, ranges: Ranges) -> None:
        """Keep these rows (0) or columns (1) of the weight, and of the training adapter's update of it."""
        if (update := getattr(base, "training_adapter", None)) is not None:
            name = "down" if dim else "up"
            _set_frozen_parameter(update, name, take_ranges(getattr(update, name), dim, ranges))
        if isinstance(base, FrozenLayer):
            base.store_weight(base.fetch_weight().take_ranges(dim, ranges))
        else:
            self._shard_parameter(base, "weight", dim, ranges)

    def _shard_parameter(self, base: Any, name: str, dim: int, ranges: Ranges) -> None:
        whole = getattr(base, name)
        if self.weights is None:
            _set_frozen_parameter(base, name, take_ranges(whole, dim, ranges))
            return
        layout = WeightLayout(dim, ranges, whole.shape)
        setattr(base, name, nn.Parameter(layout.take(whole), requires_grad=whole.requires_grad))
        self.weights.add(getattr(base, name), layout)

    def _build_sharded_forward(self, lora_a: Any, ranges: Ranges) -> Callable[[Tensor], Tensor]:
        full_forward = lora_a.forward

        def forward(input: Tensor) -> Tensor:
            if self._is_bypassed:
                return full_forward(input)  # type: ignore[no-any-return]
            return functional.linear(input, take_ranges(lora_a.weight, 1, ranges))

        return forward

    def _copy_input(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return inputs whose gradient is all-reduced; layers with the same input share one all-reduce."""
        if self._is_bypassed:
            return inputs
        is_grad_enabled = torch.is_grad_enabled()
        latest = self._latest_input
        if latest is None or latest[0] is not inputs[0] or latest[1] != is_grad_enabled:
            apply: Any = _CopyToTensorParallel.apply
            latest = self._latest_input = inputs[0], is_grad_enabled, apply(inputs[0], self.all_reduce)
        return latest[2], *inputs[1:]

    def _all_reduce_output(self, output: Tensor) -> Tensor:
        self._latest_input = None  # column-wise layers come before this one: hold their input no longer than needed
        if self._is_bypassed:
            return output
        apply: Any = _ReduceFromTensorParallel.apply
        total: Tensor = apply(output, self.all_reduce)
        return total


class _CopyToTensorParallel(torch.autograd.Function):
    """Identity in forward, all-reduce in backward: the input of column-wise layers."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, all_reduce: Any) -> Tensor:
        ctx.all_reduce = all_reduce
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        ctx.all_reduce(total)
        return total, None


class _ReduceFromTensorParallel(torch.autograd.Function):
    """All-reduce in forward, identity in backward: the output of row-wise layers."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, all_reduce: Any) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def _get_base_layer(layer: nn.Module) -> Any:
    """Return the model's own layer inside of a peft layer."""
    return getattr(layer, "base_layer", layer)


def _set_frozen_parameter(layer: nn.Module, name: str, shard: Tensor) -> None:
    setattr(layer, name, nn.Parameter(shard.detach().clone(memory_format=torch.contiguous_format), requires_grad=False))
