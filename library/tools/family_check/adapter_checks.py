"""The checks of a family's LoRA: gradients reach every layer, checkpointing changes none, files are read back."""

import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...adapters import injection
from ...adapters.file_comparison import compare_file_with_model
from ...adapters.file_reader import read_adapter_file
from ...adapters.file_writer import write_adapter_file
from ...adapters.kohya_diffusers_comfyui_keys import convert_from_file_format
from ...config.schema import AdapterConfig, RunConfig
from ...models.base import Family
from ...models.collect_component_keys import collect_component_keys
from ...models.recomputed_activations import recompute_activations
from ...parallel.activation_checkpointing import BlockCheckpointing
from ...parallel.fuse_lora import fuse_lora_layers
from ...parallel.lora_linear import FusedLoraForward
from ...training.save_adapter import build_adapter_file
from ...training.trainable_modules import build_lora_dropout, build_trainable_modules
from .cases import CheckFailedError, CheckSkippedError, ForwardOnlyWrapper, TinyCase, ensure, ensure_close, slice_rows
from .checks import TEXTS, TIMESTEPS

MAX_NAMES_SHOWN = 3
DROPOUTS = ((), ("rank_dropout=0.3", "module_dropout=0.3"))


@torch.no_grad()
def draw_lora_up_weights(denoiser: nn.Module) -> None:
    """Draw the up matrices of an adapter, which are zero at first."""
    generator = torch.Generator().manual_seed(0)
    for name, weight in injection.iter_adapter_parameters(denoiser):
        if "lora_B" in name:
            weight.copy_(torch.randn(weight.shape, generator=generator))


def inject_lora(family: Family, denoiser: nn.Module) -> None:
    """Inject a LoRA into the layers that get one by default."""
    lora = family.facts.lora
    config = AdapterConfig(network_dim=3, network_alpha=2)
    unused = family.get_unused_layers(denoiser)
    injection.inject_into_model(denoiser, config, lora.targets, 0, key_style=lora.key_style, unused_layers=unused)


def check_lora_gradients(family: Family, case: TinyCase) -> None:
    """Compute the gradients of a LoRA in every layer; DDP would wait forever for a missing one."""
    denoiser = getattr(case.pipe, family.facts.denoiser_name)
    inject_lora(family, denoiser)
    draw_lora_up_weights(denoiser)
    t = torch.tensor(TIMESTEPS)
    experts = family.facts.pipeline.experts
    for expert in ("",) if experts is None else experts.list_trained():
        batch = replace(case.batch, expert=expert)
        predicted = family.predict(case.pipe, ForwardOnlyWrapper(denoiser), batch.latents, t, batch)
        predicted.square().sum().backward()  # type: ignore[no-untyped-call]
    names = [
        name
        for name, weight in injection.iter_adapter_parameters(denoiser)
        if weight.grad is None or not weight.grad.any()
    ]
    shown = ", ".join(names[:MAX_NAMES_SHOWN])
    ensure(not names, f"{len(names)} LoRA weights get no gradient: {shown}; see get_unused_layers")


@torch.no_grad()
def check_fused_layers(family: Family, case: TinyCase) -> None:
    """Compute LoRA layers together that should read one input; otherwise outputs are computed that nothing reads."""
    denoiser = getattr(case.pipe, family.facts.denoiser_name)
    lora = family.facts.lora
    injection.inject_into_model(denoiser, AdapterConfig(network_dim=3), lora.targets, 0, lora.key_style)
    if not fuse_lora_layers(denoiser, torch.bfloat16):
        raise CheckFailedError("no LoRA layer can be fused (--fused_layers)")
    recompute_activations(denoiser)
    forwards = [vars(module).get("forward") for module in denoiser.modules()]
    groups: list[Any] = [
        each.group for each in forwards if isinstance(each, FusedLoraForward) and each.group is not None
    ]
    if not groups:
        raise CheckSkippedError("no layers of lora.targets are named as those that read one input, such as to_k, to_v")
    with torch.autocast(next(denoiser.parameters()).device.type, torch.bfloat16):
        family.predict(case.pipe, denoiser, case.batch.latents, torch.tensor(TIMESTEPS), case.batch)
    (pending,) = {group.pending for group in groups}
    pending.clear()
    ensure(pending.discarded == 0, f"{pending.discarded} layers that are computed together do not read one input")


def check_gradient_checkpointing(family: Family, case: TinyCase) -> None:
    """Compute a gradient with and without checkpointing; diffusers has checkpointed calls that leave arguments out."""
    denoiser = getattr(case.pipe, family.facts.denoiser_name)
    with torch.no_grad():
        cond = case.encode_prompts(family, case.pipe, [TEXTS[0] * 4, TEXTS[1]])
    batch, t = replace(case.batch, cond=cond), torch.tensor(TIMESTEPS)

    def compute_input_gradient() -> Tensor:
        latents = case.batch.latents.clone().requires_grad_()
        predicted = family.predict(case.pipe, denoiser, latents, t, batch)
        predicted.square().sum().backward()  # type: ignore[no-untyped-call]
        ensure(latents.grad is not None, "no gradient reaches the latents")
        return Tensor(latents.grad)

    expected = compute_input_gradient()
    denoiser.enable_gradient_checkpointing(BlockCheckpointing(1, offload=False))
    reason = "gradient checkpointing changes the gradient"
    ensure_close(compute_input_gradient(), expected, reason, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def check_dropout(family: Family, case: TinyCase) -> None:
    """Let LoRA dropout depend on a sample alone: neither on its batch nor on the padding of its text."""
    for network_args in DROPOUTS:
        _check_dropout(family, replace(case, pipe=copy.deepcopy(case.pipe)), network_args)


def _check_dropout(family: Family, case: TinyCase, network_args: tuple[str, ...]) -> None:
    denoiser, batch = getattr(case.pipe, family.facts.denoiser_name), case.batch
    rates = AdapterConfig(network_train_unet_only=True, network_dropout=0.3, network_args=network_args)
    config = RunConfig(adapter=rates)
    trained, adapter = build_trainable_modules(config, family, case.pipe)
    dropout: Any = build_lora_dropout(config.adapter, family, trained, adapter)
    draw_lora_up_weights(denoiser)
    t, keys = torch.tensor(TIMESTEPS), torch.tensor([5, 6])
    cond = case.encode_prompts(family, case.pipe, ['"GLYPHS"' + " in a red circle" * 40, "Blau, 7"])

    def predict(rows: slice, text_pad_multiple: int = 1) -> Tensor:
        dropout.sample_keys = keys[rows]
        each = replace(slice_rows(replace(batch, cond=cond), rows), text_pad_multiple=text_pad_multiple)
        return family.predict(case.pipe, denoiser, batch.latents[rows], t[rows], each)

    both = slice(0, 2)
    pair = predict(both)
    for row in (slice(0, 1), slice(1, 2)):
        reason = "the LoRA dropout of a sample depends on its batch; see blocks.token_layouts"
        ensure_close(predict(row), pair[row], reason, rtol=1e-3, atol=1e-4)
    reason = "the LoRA dropout of a sample depends on the padding of its text; see blocks.token_layouts"
    ensure_close(predict(both, family.facts.text.pad_multiple), pair, reason, rtol=1e-3, atol=1e-4)
    dropout.sample_keys = None
    without = family.predict(case.pipe, denoiser.eval(), batch.latents, t, replace(batch, cond=cond))
    ensure(not torch.allclose(pair, without), "LoRA dropout changes nothing")


def check_lora_file(family: Family, case: TinyCase) -> None:
    """Write a LoRA in each file format, read it back, and compare the update of each layer with the model's."""
    config = RunConfig(adapter=AdapterConfig(network_dim=3, network_alpha=2, network_train_unet_only=True))
    trained, adapter = build_trainable_modules(config, family, case.pipe)
    draw_lora_up_weights(trained.eval().denoiser)
    state, components = injection.get_adapter_state_dict(trained), collect_component_keys(family, case.pipe)
    for file_format in ("auto", "kohya", "diffusers"):
        file = build_adapter_file(state, adapter, family, case.pipe, file_format)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "lora.safetensors")
            write_adapter_file(path, file.tensors, file.metadata)
            tensors, metadata = read_adapter_file(path)
        content = convert_from_file_format(tensors, {**metadata, **file.metadata}, components)
        for text in compare_file_with_model(trained, content, adapter.alphas):
            raise CheckFailedError(f"the file of the format {file_format} has another LoRA than the model: {text}")


ADAPTER_CHECKS: Mapping[str, Callable[[Family, TinyCase], None]] = {
    "every LoRA layer gets a gradient": check_lora_gradients,
    "layers that are computed together read one input": check_fused_layers,
    "gradient checkpointing changes no gradient": check_gradient_checkpointing,
    "the dropout of a sample does not depend on its batch": check_dropout,
    "a LoRA file is read back as it was written": check_lora_file,
}
"""The checks by the sentence that they prove."""
