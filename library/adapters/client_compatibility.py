"""The layouts of a LoRA file that diffusers and ComfyUI read right: the default of a run, and what other layouts lose.

The keys themselves are written in ``kohya_diffusers_comfyui_keys``.

Measured with diffusers 0.42.1, ComfyUI 0.30.0, sd-scripts and LyCORIS 4.1.3 by ``tests/interop/client_table.py``.
"""

from collections.abc import Iterator, Mapping, Sequence

from .component_key_names import ComponentKeys
from .kohya_diffusers_comfyui_keys import FileFormat, resolve_comfy_format
from .module_adapter import BIAS, DOWN, ModuleAdapter
from .original_module_names import T5_KEYS

ModuleAdapters = Mapping[str, ModuleAdapter]
"""The adapters of a file by module name, as in a state dict: component first."""


def choose_file_format(
    adapters: ModuleAdapters, components: Sequence[ComponentKeys], family_format: FileFormat
) -> FileFormat:
    """The layout that most programs read right; ``family_format`` is the family's for LoRA."""
    types = {adapter.adapter_type for adapter in adapters.values()}
    denoiser = _find_denoiser(components)
    if types & {"oft", "boft"}:
        return "diffusers"  # peft's own names
    if denoiser.name == "unet":
        return "kohya"
    if "dora" in types:
        if not denoiser.key_style.is_kohya_in_comfyui:
            return "diffusers"
        return "comfy" if denoiser.key_style.comfyui_style else "kohya"
    if types & {"loha", "lokr"} and (family_format != "kohya" or not denoiser.key_style.keeps_names):
        return "comfy"  # the adapters of fused modules cannot be fused
    if denoiser.key_style.diffusers_width and not _is_convertible_in_diffusers(adapters, components):
        return "diffusers"
    return family_format


def needs_equal_alphas(adapters: ModuleAdapters, components: Sequence[ComponentKeys], file_format: FileFormat) -> bool:
    """Whether modules have different alphas, which diffusers 0.42.1 mixes up in kohya files of U-Nets."""
    is_unet = _find_denoiser(components).name == "unet" and file_format != "diffusers"
    is_lora = all(adapter.adapter_type == "lora" for adapter in adapters.values())
    return is_unet and is_lora and len({adapter.alpha for adapter in adapters.values()}) > 1


def list_client_losses(
    adapters: ModuleAdapters, components: Sequence[ComponentKeys], file_format: FileFormat, equal_alphas: bool = False
) -> dict[str, str]:
    """Describe for diffusers and for ComfyUI what they do not read right of a file in this layout."""
    types = {adapter.adapter_type for adapter in adapters.values()}
    if types & {"oft", "boft"}:
        name = "/".join(sorted(types)).upper()
        return {"diffusers": f"does not load {name}", "ComfyUI": f"does not load {name}; peft does"}
    reasons: dict[str, list[str]] = {"diffusers": [], "ComfyUI": []}
    for client, reason in _iter_losses(adapters, types, components, file_format, equal_alphas):
        reasons[client].append(reason)
    return {client: " and ".join(each) for client, each in reasons.items() if each}


def format_client_losses(losses: Mapping[str, str]) -> str:
    """One line of warning."""
    return "; ".join(f"{client} {reason}" for client, reason in losses.items())


def _iter_losses(
    adapters: ModuleAdapters,
    types: set[str],
    components: Sequence[ComponentKeys],
    file_format: FileFormat,
    equal_alphas: bool,
) -> Iterator[tuple[str, str]]:
    denoiser = _find_denoiser(components)
    style, is_comfy = denoiser.key_style, file_format == "comfy"
    file_format = resolve_comfy_format(file_format, types, components)
    is_unet, is_kohya = denoiser.name == "unet", file_format == "kohya"
    if "dora" in types:
        yield "ComfyUI", "normalizes DoRA by the base weights, so images differ a little"
    if is_unet and not is_kohya:
        yield "ComfyUI", "loads only part of the layers of this layout"
    has_own_names = is_comfy and is_kohya and style.comfyui_style is not None
    if not has_own_names and (unread := style.unread_in_comfyui.get(file_format)):
        yield "ComfyUI", unread
    if style.layout and not is_kohya and any(BIAS in adapter.tensors for adapter in adapters.values()):
        yield "ComfyUI", "loads no changes of biases (diff_b) under diffusers' names"
    for reason in _iter_losses_in_diffusers(adapters, types, components, file_format):
        yield "diffusers", reason
    attention_alphas = {adapter.alpha for module, adapter in adapters.items() if ".attn" in module}
    if is_unet and file_format != "diffusers" and not equal_alphas and len(attention_alphas) > 1:
        yield "diffusers", "mixes up different alphas of this layout"


def _iter_losses_in_diffusers(
    adapters: ModuleAdapters, types: set[str], components: Sequence[ComponentKeys], file_format: FileFormat
) -> Iterator[str]:
    style, is_kohya, is_plain = _find_denoiser(components).key_style, file_format == "kohya", file_format == "diffusers"
    encoders = [component for component in _list_trained(adapters, components) if component.is_text_encoder]
    if lycoris_types := sorted(types & {"loha", "lokr"}):
        # diffusers takes a FLUX.1 file for one of LoRA by the keys of its text encoders alone.
        has_lokr = style.has_lokr_in_diffusers or (style.diffusers_width and encoders)
        if types != {"lokr"} or file_format != "comfy" or not has_lokr:
            yield f"does not load {'/'.join({'loha': 'LoHa', 'lokr': 'LoKr'}[each] for each in lycoris_types)}"
        elif encoders:
            yield "loads no LoKr of text encoders"
        return
    if "input-dora" in types:
        yield "has no DoRA with a dora_scale per input"
        return
    if any(BIAS in adapter.tensors for adapter in adapters.values()):
        yield "loads no changes of biases (diff_b)"
    unread = style.unread_in_diffusers.get(file_format)
    is_converted = style.is_read_by_diffusers and (is_kohya or style.is_comfy_format_in_diffusers)
    is_converted |= style.is_comfy_format_alone_in_diffusers and not is_kohya
    if not (unread or is_plain or is_converted):
        yield "loads nothing of this layout" if is_kohya else "does not load this layout"
        return
    loss = _describe_conversion_loss(adapters, components) if style.diffusers_width and is_kohya else None
    reasons = (
        "loads no LoRA of T5" if any(encoder.key_style == T5_KEYS for encoder in encoders) else None,
        *(unread, loss),
        "ignores the DoRA magnitudes of this layout" if "dora" in types and not is_plain else None,
    )
    yield from filter(None, reasons)


def _find_denoiser(components: Sequence[ComponentKeys]) -> ComponentKeys:
    return next(component for component in components if not component.is_text_encoder)


def _list_trained(adapters: ModuleAdapters, components: Sequence[ComponentKeys]) -> list[ComponentKeys]:
    names = {module.partition(".")[0] for module in adapters}
    return [component for component in components if component.name in names]


def _describe_conversion_loss(adapters: ModuleAdapters, components: Sequence[ComponentKeys]) -> str | None:
    """Describe what diffusers does not convert of the denoiser in a kohya file with fused modules."""
    denoiser = _find_denoiser(components)
    prefix, width, loss = f"{denoiser.name}.", denoiser.key_style.diffusers_width, None
    own = {module.removeprefix(prefix): each for module, each in adapters.items() if module.startswith(prefix)}
    for group in denoiser.get_key_map().group_modules(own):
        parts = [own[module] for module in group.modules if module is not None]
        if len(group.modules) == 4 and any(part.tensors[DOWN].shape[1] != width for part in parts):
            return f"converts this layout for a width of {width} only"
        if "{}" not in group.original.name:  # outside of the blocks
            loss = "loads no outer layers of this layout"
        elif len({part.scale for part in parts}) > 1:
            loss = "loads no fused layers with different alphas"  # fused_qkv.py refuses to write them
    return loss


def _is_convertible_in_diffusers(adapters: ModuleAdapters, components: Sequence[ComponentKeys]) -> bool:
    """Whether diffusers converts all of a kohya file with fused modules."""
    has_t5 = any(component.key_style == T5_KEYS for component in _list_trained(adapters, components))
    return not has_t5 and _describe_conversion_loss(adapters, components) is None
