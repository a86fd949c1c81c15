"""Run one training step on torch's meta device: bytes and FLOPs of every block, with real shapes and without data.

The training code itself builds, adapts and partitions the model, so there is no table of models.
"""

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from inspect import Signature, signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..adapters.injection import Adapter
from ..adapters.precision import cast_trainable_parameters, leave_input_casts_to_autocast
from ..config import RunConfig
from ..dataloader.batch import Cond, Moments, PixelBatch
from ..distributed.devices import MIXED_PRECISION_DTYPES
from ..models.base import Family, T5Family
from ..models.detect import DetectedModel
from ..models.families import FAMILIES
from ..models.loading import load_pipeline_on_meta
from ..models.text_encoding import encode_text_on_meta
from ..models.trained_components import list_cached_text_components, select_trained_text_encoders
from ..optim.fused_backward import count_collected_bytes
from ..optim.optimizers import ParamGroup
from ..parallel.activation_checkpointing import enable_activation_checkpointing
from ..parallel.async_copy import CopyStream
from ..parallel.context_parallel import ContextParallel
from ..parallel.frozen_base import is_quantized_or_offloaded, list_experts, quantize_and_offload_base
from ..parallel.parallel_plan import Activations, build_parallel_plan
from ..parallel.pipeline_stages import StageRunner
from ..parallel.quantize import FrozenConv2d, FrozenLinear
from ..parallel.stored_base import explain_dequantization, keep_stored_layers
from ..parallel.tensor_parallel import TensorParallel
from ..parallel.tensor_parallel_weights import TensorParallelWeights
from ..training.full_weights import build_full_modules, build_full_param_groups, get_trained_dtypes
from ..training.network_weights import InitialWeights, add_training_adapter, read_initial_weights
from ..training.param_groups import build_param_groups
from ..training.setup import build_objective
from ..training.task import DiffusionTask
from ..training.trainable_modules import (
    TrainableModules,
    build_trainable_modules,
    fuse_layers,
    get_trainable_parameters,
)
from .base_storage import KERNELS_PER_UNPACKING, BlockStorage, BlockWeights, StoredBase, TrainedBlockWeights
from .meta_memory_meter import AutocastEmulation, MemoryMeter, run_backward
from .optimizer_memory import WeightKind, count_kinds
from .repeated_blocks import RepeatedBlocks
from .step_memory import MetaStep, StepRecorder

META = torch.device("meta")
COUNTS = ("trainable_bytes", "trainable_elements", "trainable_kinds", "collected_bytes")
FROZEN_COUNTS = ("sharded_bytes", "num_frozen_matrices")
"""Properties of ``MetaRun`` that are counted over thousands of tensors."""


@dataclass(frozen=True)
class LargestBatch:
    """The micro-batch that needs most memory: the largest bucket with the longest captions."""

    size: tuple[int, int]
    """Width and height in pixels."""
    captions: tuple[str, ...]
    buffered_shapes: float = 1.0
    """Sum over all image sizes in units of the largest; a pipeline has buffers for each."""
    control_sizes: tuple[tuple[int, int], ...] = ()
    """Width and height of each control image."""
    num_references: int = 0
    """How many of the control images, the last ones, are reference images of a clip."""
    can_be_split: bool = False
    """Whether ``train_batch_size`` sets it, and no dataset file."""
    num_frames: int = 1
    """The frames of each sample; 1 for images."""
    has_sound: bool = False
    """Whether sound is trained together with the frames."""


class FakeGroup:
    """A process group with one process: counts the bytes sent, and returns tensors of the right size."""

    rank = 0

    def __init__(self, size: int):
        self.size, self.sent_bytes = size, 0.0

    def all_reduce(self, tensor: Tensor) -> None:
        self.sent_bytes += count_all_reduce_bytes(tensor.nbytes, self.size)

    def all_to_all(
        self, tensor: Tensor, dependency: Tensor, owner_ranks: Tensor, rows: int, *, gather_heads: bool
    ) -> tuple[Tensor, Tensor]:
        """All-to-all of tokens and heads."""
        own = float((owner_ranks == self.rank).float().mean()) if gather_heads else 1 / self.size
        apply: Any = _FakeAllToAll.apply
        return apply(tensor, rows, tensor.nbytes * (1 - own), self), dependency


class _FakeAllToAll(torch.autograd.Function):
    """An all-to-all without data, whose backward sends the gradients back."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, rows: int, sent_bytes: float, group: FakeGroup) -> Tensor:
        ctx.rows, ctx.sent_bytes, ctx.group = sent.shape[0], sent_bytes, group
        group.sent_bytes += sent_bytes
        return sent.new_empty(rows, *sent.shape[1:])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _FakeAllToAll.forward(ctx, gradients[0], ctx.rows, ctx.sent_bytes, ctx.group), None, None, None


def count_all_reduce_bytes(size: float, ranks: int) -> float:
    """Count the bytes that each rank sends in a ring all-reduce."""
    return 2 * (ranks - 1) / ranks * size


class _MetaContextParallel(ContextParallel):
    """Context parallelism on the meta device, which has no autocast dtype and no fused attention."""

    def __init__(self, group: FakeGroup, dtype: torch.dtype | None):
        super().__init__(group)
        self._dtype = dtype

    def get_attention_dtype(self, tensor: Tensor) -> torch.dtype:
        return self._dtype or tensor.dtype

    def compute_full_attention(self, *args: Any, **kwargs: Any) -> Tensor:
        return F.scaled_dot_product_attention(*args, **kwargs)


def _checkpoint_within_budget(config: RunConfig) -> RunConfig:
    """Estimate what the compiler recomputes for ``activation_memory_budget`` as checkpointing with that budget."""
    train = config.train
    if config.distributed.torch_compile and train.activation_memory_budget and not train.gradient_checkpointing:
        return replace(config, train=replace(train, gradient_checkpointing=True))
    return config


class MetaRun:
    """A run as training builds it, on the meta device, partitioned as one rank holds it, and one step of it."""

    def __init__(
        self,
        config: RunConfig,
        model: DetectedModel,
        batch: LargestBatch,
        tp: int = 1,
        cp: int = 1,
        pipeline: bool = False,
        same_encoding: "MetaRun | None" = None,
    ):
        """Take the batch and the peaks of encoding from ``same_encoding``, a run that encodes in the same way.

        Where the model itself is trained, take what is frozen as well: nothing is added to it.
        """
        config = _checkpoint_within_budget(config)
        precision = config.distributed.mixed_precision or "no"
        self.config, self._dtype = config, None if precision == "no" else MIXED_PRECISION_DTYPES[precision]
        self.family: Family = FAMILIES.get(model.family)(config.model)
        self.pipe = self._load_pipeline(model, MIXED_PRECISION_DTYPES[precision], same_encoding)
        self._models = [part for part in self.pipe.components.values() if isinstance(part, nn.Module)]
        for part in self._models:
            part.requires_grad_(False)
        self.trained_encoders = select_trained_text_encoders(config.adapter, config.optim, self.family.facts)
        initial = read_initial_weights(config.adapter, self.family, model)
        add_training_adapter(self.pipe, self.family, initial)
        self.trained, self.adapter = self._select_trained_weights(config, initial)
        if config.distributed.full_bf16:
            cast_trainable_parameters(self.trained, torch.bfloat16)
        if self._dtype is not None:
            leave_input_casts_to_autocast(self.trained)
        self.denoiser: Any = self.trained.denoiser
        trained = TrainedBlockWeights if config.adapter.is_full else BlockWeights
        self.base_weights: BlockStorage = trained(self.denoiser)
        self.stored = self._store_base_weights(config)
        self._saved_bytes = self.stored.saved_bytes if config.adapter.is_full else 0
        self._whole_bytes: int | None = None
        self._ring: list[Tensor] = []
        self._quantize_and_fuse(config, precision)
        self._recorder = StepRecorder()
        self.task = DiffusionTask(
            family=self.family,
            pipe=self.pipe,
            denoiser=self.trained,
            objective=build_objective(config.noise, config.loss, self.family, self.pipe),
            seed=config.train.seed,
            to_device=CopyStream(META),
            trains_text_encoders=bool(self.trained_encoders),
            pads_texts=pipeline,
        ).list_expert_tasks()[0]
        self.encoding_peaks: dict[str, int] = {} if same_encoding is None else same_encoding.encoding_peaks
        """Peak bytes of the text encoders and of the VAE, where they are not cached."""
        self.batch: PixelBatch = self._build_batch(batch) if same_encoding is None else same_encoding.batch
        groups = FakeGroup(tp), FakeGroup(cp)
        self._partition(*groups, pipeline)
        self._watch_gradients()
        self.frozen = [parameter for parameter in self.trained.parameters() if not parameter.requires_grad]
        self.step = self._run_steps()
        self.sent_bytes = sum(group.sent_bytes for group in groups) / self._count_steps()
        """Bytes that a micro-batch sends to tensor- and context-parallel ranks."""

    def _load_pipeline(self, model: DetectedModel, dtype: torch.dtype, same_encoding: "MetaRun | None") -> Any:
        """Load the pipeline, with the frozen components of another run of full training if there is one.

        Weights that the model's files store quantized stay so where training keeps them.
        """
        config, dtypes, known = self.config, get_trained_dtypes(self.config, self.family), dict[str, Any]()
        can_quantize = config.deepspeed.zero_stage != 3
        is_kept = explain_dequantization(config.model, config.adapter, can_quantize=can_quantize) is None
        if same_encoding is not None and dtypes:
            known = {name: each for name, each in same_encoding.pipe.components.items() if name not in dtypes}
        pipe = load_pipeline_on_meta(self.family, model, dtype, dtypes, keeps_stored=is_kept, known=known)
        for name in self.family.facts.pipeline.denoisers:
            if isinstance(denoiser := getattr(pipe, name, None), nn.Module):
                keep_stored_layers(denoiser, config.model.quantize_base)
        return pipe

    def run_again(self, config: RunConfig) -> "MetaRun":
        """Run a step with other checkpointing, and with the base weights stored otherwise, on the same modules.

        Building the model takes as long as a step.  Once the weights are converted, they stay so: this is the last run
        on the modules then.  ``activation_memory_budget`` needs modules of its own if their LoRA is added in place.
        """
        other = copy.copy(self)
        other.config = config = _checkpoint_within_budget(config)
        self._disable_checkpointing()
        if config.train.gradient_checkpointing:
            enable_activation_checkpointing(self.trained.children(), self.denoiser, config.train)
        other._set_checkpoint_function()
        if config.adapter.is_full:
            other.stored = other._store_base_weights(config)
            other._saved_bytes = other.stored.saved_bytes
        elif is_quantized_or_offloaded(config.model, config.train):
            other.stored = other._store_base_weights(config)
            other._store_denoiser(config)
            other.frozen = [parameter for parameter in self.trained.parameters() if not parameter.requires_grad]
            for name in FROZEN_COUNTS:
                other.__dict__.pop(name, None)
        other._whole_bytes = None
        self._repeated.is_enabled = self._is_same_for_all_blocks(config)
        other.step = [other._run_step() for _ in range(other._count_steps())][-1]
        return other

    def _disable_checkpointing(self) -> None:
        for model in self.trained.children():
            disable: Any = getattr(model, "disable_gradient_checkpointing", None)
            (disable or getattr(model, "gradient_checkpointing_disable", lambda: None))()

    def _count_steps(self) -> int:
        """A checkpointing budget begins with the second step."""
        return 2 if self.config.train.activation_memory_budget else 1

    @staticmethod
    def _is_same_for_all_blocks(config: RunConfig) -> bool:
        """Whether equal blocks are treated alike: every n-th checkpointed one is not, nor are swapped frozen ones."""
        is_swapped = bool(config.train.blocks_to_swap) and not config.adapter.is_full
        return not is_swapped and config.train.gradient_checkpointing_every == 1

    def _run_steps(self) -> MetaStep:
        self._repeated.is_enabled = self._is_same_for_all_blocks(self.config)
        return [self._run_step() for _ in range(self._count_steps())][-1]

    def replace_cache_settings(self, config: RunConfig) -> "MetaRun":
        """Return the same run with other outputs of frozen encoders cached, which do not change the step."""
        other = copy.copy(self)
        other.config, other._whole_bytes = config, None
        return other

    def replace_storage(self, config: RunConfig) -> "MetaRun":
        """Return the same run with the base weights stored as ``config`` says; this one has them in the model's dtype.

        The step is not run again: a layer unpacks its weight, so the peak of each block has one more, and more kernels.
        """
        other, stored = self.replace_step(config, self.step), self._store_base_weights(config)
        other.stored, other._saved_bytes = stored, stored.saved_bytes
        kernels = round(other.num_unpacking_kernels / len(self.step.blocks))
        other.step = self.step.add_to_blocks(stored.largest_unpacked, kernels)
        return other

    def replace_swaps(self, config: RunConfig) -> "MetaRun":
        """Return the same run of ``replace_storage`` with another number of swapped blocks, which change no step."""
        other, stored = copy.copy(self), self._store_base_weights(config)
        other.config, other.stored, other._saved_bytes = config, stored, stored.saved_bytes
        return other

    def _store_base_weights(self, config: RunConfig) -> StoredBase:
        train = config.train
        return self.base_weights.store(config.model.quantize_base, train.blocks_to_swap, train.block_swap_ring_size)

    def replace_step(self, config: RunConfig, step: MetaStep) -> "MetaRun":
        """Return the same run with another step."""
        self._count_all()  # once for all copies
        other = copy.copy(self)
        other.config, other.step = config, step
        return other

    def _count_all(self) -> None:
        self._count_whole_bytes()
        for name in (*COUNTS, *FROZEN_COUNTS):
            getattr(self, name)

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The trained parameters, as they are partitioned."""
        return get_trainable_parameters(self.trained)

    @cached_property
    def trainable_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.trainable)

    @cached_property
    def trainable_elements(self) -> int:
        return sum(parameter.numel() for parameter in self.trainable)

    @cached_property
    def trainable_kinds(self) -> Counter[WeightKind]:
        """The number of trained parameters of each shape and dtype."""
        return count_kinds(self.trainable)

    @cached_property
    def collected_bytes(self) -> int:
        """Bytes of the gradients that a fused backward pass holds at most."""
        return count_collected_bytes([each.nbytes for each in self.trainable])

    @cached_property
    def sharded_bytes(self) -> int:
        """Bytes of the frozen weights that FSDP and ZeRO 3 shard."""
        return sum(parameter.nbytes for parameter in self.frozen)

    @cached_property
    def num_frozen_matrices(self) -> int:
        return sum(parameter.ndim > 1 for parameter in self.frozen)

    @property
    def has_fused_layers(self) -> bool:
        """Whether LoRA layers compute in fewer kernels."""
        distributed = self.config.distributed
        is_half = distributed.mixed_precision in ("fp16", "bf16")
        return is_half and distributed.fused_layers and not distributed.torch_compile

    @property
    def num_unpacking_kernels(self) -> int:
        """Kernels among those of the step that unpack quantized weights."""
        passes = 3 if self.config.train.gradient_checkpointing else 2
        return round(passes * KERNELS_PER_UNPACKING * self.stored.unpacked_weights)

    @property
    def stored_share(self) -> float:
        """Share of ``sharded_bytes`` that is stored, where ``replace_storage`` has changed the format."""
        return 1 - self._saved_bytes / max(1, self.sharded_bytes)

    @property
    def frozen_bytes(self) -> int:
        return self._count_whole_bytes() - self._saved_bytes

    def _count_whole_bytes(self) -> int:
        if self._whole_bytes is None:  # there are thousands of tensors
            self._whole_bytes = count_frozen_bytes(self.trained, *self.frozen_encoders)
        return self._whole_bytes

    @property
    def encoding_peak(self) -> int:
        """Peak memory of the encoders whose outputs are not cached."""
        cache = self.config.cache
        is_cached = {"text": cache.caches_text_outputs, "vae": cache.caches_latents}
        return max((peak for name, peak in self.encoding_peaks.items() if not is_cached[name]), default=0)

    @property
    def frozen_encoders(self) -> list[nn.Module]:
        """Frozen VAE and text encoders that stay on the device, as their outputs are not cached."""
        cache, adapter, optim = self.config.cache, self.config.adapter, self.config.optim
        names = [] if cache.caches_latents else [*self.family.facts.image_encoders]
        cached = list_cached_text_components(adapter, optim, self.family.facts) if cache.caches_text_outputs else ()
        names += [name for name in self.family.facts.text.components if name not in (*self.trained_encoders, *cached)]
        return [part for name in names if isinstance(part := getattr(self.pipe, name), nn.Module)]

    def build_param_groups(self) -> list[ParamGroup]:
        config, facts = self.config, self.family.facts
        if self.adapter is None:
            return build_full_param_groups(self.trained, config.optim, config.full, facts)
        return build_param_groups(self.trained, self.adapter, config.adapter, config.optim, facts)

    def _select_trained_weights(
        self, config: RunConfig, initial: InitialWeights
    ) -> tuple[TrainableModules, Adapter | None]:
        """Inject the adapters; for full training, select weights of the model instead."""
        if config.adapter.is_full:
            return build_full_modules(config, self.family, self.pipe), None
        return build_trainable_modules(config, self.family, self.pipe, initial.rank_alphas, initial.independent_modules)

    def _watch_gradients(self) -> None:
        """Count gradients of the model's own weights when backward has computed them."""
        weights: list[Any] = self.trainable if self.adapter is None else []
        for weight in weights:
            weight.register_post_accumulate_grad_hook(self._recorder.add_gradient)

    def _partition(self, tp_group: FakeGroup, cp_group: FakeGroup, pipeline: bool) -> None:
        """Apply TP, CP and PP in the order of training, in which the last wrapper of a block is the outermost."""
        plan = build_parallel_plan(self.family, self.denoiser)
        self.chain = plan.block_sequence
        if tp_group.size > 1:
            weights = TensorParallelWeights(None, META) if self.adapter is None else None
            sharding = TensorParallel(0, tp_group.size, tp_group.all_reduce, weights)
            sharding.shard_layers(self.denoiser, plan.tensor_parallel, plan.head_args)
        context = _MetaContextParallel(cp_group, self._dtype) if cp_group.size > 1 else None
        if context is not None:
            context.wrap_blocks(self.denoiser, plan)
            if not pipeline:
                context.wrap_sequence_ends()
        self._repeated = RepeatedBlocks(self.chain)
        self._runner = runner = StageRunner(self.chain)
        self._set_checkpoint_function()
        runner.set_full_forward(range(len(self.chain.blocks)), self._leave_block)
        if context is not None and pipeline:
            context.wrap_sequence_ends()
        for index, block in enumerate(self.chain.blocks):
            self.chain.hooks.wrap(block, partial(self._enter_block, index, signature(block.forward)))

    def _set_checkpoint_function(self) -> None:
        self._runner.checkpoint_function = None
        experts: list[Any] = [*list_experts(self.denoiser)]
        for expert in experts:
            if getattr(expert, "gradient_checkpointing", False):  # UNets checkpoint inside of their blocks
                expert.gradient_checkpointing = False
                self._runner.checkpoint_function = expert._gradient_checkpointing_func

    def _enter_block(self, index: int, form: Signature, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if index == 0:
            inputs = self.chain.collect_inputs(0, form.bind(*args, **kwargs), ())
            self._recorder.watch(0, tuple(dict.fromkeys(inputs)))  # a UNet has the same tensor twice
        self._recorder.end_forward()
        result = forward(*args, **kwargs)
        if index == len(self.chain.blocks) - 1:
            self._recorder.end_forward()
        return result

    def _leave_block(self, index: int, activations: Activations) -> Activations:
        self._recorder.watch(index + 1, activations)
        return activations

    def _run_step(self) -> MetaStep:
        with self._measure([self.trained], self._dtype) as meter:
            self._recorder.start(meter)
            loss = self.task(self.batch, 0).sum()
            self._recorder.end_forward()
            run_backward(loss)
        step = self._recorder.build_step()
        return replace(step, blocks=self._repeated.restore_skipped(step.blocks))

    @contextmanager
    def _measure(self, models: Iterable[nn.Module], dtype: torch.dtype | None) -> Iterator[MemoryMeter]:
        """Measure what is allocated besides weights, buffers, gradients and the ring of swapped blocks."""
        for parameter in self.trainable:
            parameter.grad = torch.zeros_like(parameter)
        allocated = [tensor for model in models for tensor in _list_tensors(model)]
        allocated += [parameter.grad for parameter in self.trainable if parameter.grad is not None]
        fused_attention = self.config.distributed.attn_mode != "math"
        allocated += self._ring
        with MemoryMeter(META, allocated) as meter, AutocastEmulation(dtype, fused_attention=fused_attention):
            yield meter

    def _build_batch(self, batch: LargestBatch) -> PixelBatch:
        """Build the encoded batch, and measure the encoders."""
        (width, height), count, cache = batch.size, len(batch.captions), self.config.cache
        cond: Cond | None = encode_text_on_meta(self.family, self.pipe, batch.captions, batch.control_sizes)
        if self.trained_encoders:
            cond = None
            if cache.caches_text_outputs and isinstance(self.family, T5Family):
                with torch.no_grad():
                    cond = self.family.encode_t5_prompts(self.pipe, batch.captions)
        elif not cache.caches_text_outputs and not self.family.facts.text.has_variable_length:
            with self._measure(self._models, self._dtype) as meter:
                self.family.encode_prompts_on_meta(self.pipe, batch.captions[: cache.text_encoder_batch_size])
            self.encoding_peaks["text"] = meter.peak
        with torch.no_grad(), self._measure(self._models, dtype=None) as meter:  # the VAE runs in float32
            frames = (batch.num_frames,) if batch.num_frames > 1 else ()
            pixels = torch.empty(min(count, cache.vae_batch_size), 3, *frames, height, width, device=META)
            moments = self.family.encode_moments(self.pipe, pixels)
            frame_cond = self.family.encode_frame_cond(self.pipe, pixels, moments)
            latents = moments.mean_and_std
        self.encoding_peaks["vae"] = meter.peak
        moments = Moments(latents.new_empty(count, *latents.shape[1:]))
        size_conditioning, loss_weights = torch.zeros(count, 6, device=META), torch.ones(count, device=META)
        positions, keys = tuple(range(count)), tuple(map(str, range(count)))
        fields = (None, batch.captions, size_conditioning, loss_weights, positions, keys)
        controls, cond_of_controls = self._build_controls(pixels[:1], count, batch.control_sizes, batch.num_references)
        frame_cond = {name: each.new_empty(count, *each.shape[1:]) for name, each in frame_cond.items()}
        frame_cond |= cond_of_controls
        built = PixelBatch(*fields, moments=moments, cond=cond, control_latents=controls, frame_cond=frame_cond or None)
        built = replace(built, num_references=batch.num_references)
        rule = self.family.frame_rule
        if not batch.has_sound or rule is None:
            return built
        shape = count, rule.count_sound_latents(batch.num_frames), rule.sound_channels
        return replace(built, sound=torch.empty(shape, device=META))

    def _build_controls(
        self, pixels: Tensor, count: int, control_sizes: Sequence[tuple[int, int]], num_references: int
    ) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Build what the family makes of control images of these (width, height), which is not measured."""
        if not control_sizes:
            return (), {}
        first = len(control_sizes) - num_references
        shapes = [*[pixels.shape[:-2]] * first, *[(*pixels.shape[:2], 1)] * num_references]
        controls = [
            pixels.new_empty(*shape, height, width)
            for shape, (width, height) in zip(shapes, control_sizes, strict=True)
        ]
        with torch.no_grad():
            encoded = self.family.encode_all_controls(self.pipe, controls, pixels, num_references)
            cond = self.family.encode_control_cond(self.pipe, controls)
        built = tuple(each.new_empty(count, *each.shape[1:]) for each in encoded)
        return built, {name: each.new_empty(count, *each.shape[1:]) for name, each in cond.items()}

    def _quantize_and_fuse(self, config: RunConfig, precision: str) -> None:
        if is_quantized_or_offloaded(config.model, config.train, self.denoiser) and not config.adapter.is_full:
            self._store_denoiser(config)
        if not config.distributed.torch_compile:
            fuse_layers(self.trained, config.distributed, config.train, precision)

    def _store_denoiser(self, config: RunConfig) -> None:
        """Quantize and offload the frozen weights of the denoiser's blocks."""
        self._ring = quantize_and_offload_base(self.denoiser, (META, META), config.model, config.train).device_buffers
        for layer in self.denoiser.modules():
            if isinstance(layer, (FrozenLinear, FrozenConv2d)):
                # These layers ask the device for its autocast dtype, and the meta device has none.
                layer.autocast_dtype = self._dtype


@contextmanager
def disable_logging() -> Iterator[None]:
    """Suppress what building a run logs, and accelerate's warnings about devices that this machine lacks."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def count_frozen_bytes(*modules: nn.Module) -> int:
    """Count the bytes of frozen weights and of buffers, shared tensors once."""
    tensors = {id(tensor): tensor for module in modules for tensor in _list_tensors(module)}
    return sum(tensor.nbytes for tensor in tensors.values() if not tensor.requires_grad)


def _list_tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
