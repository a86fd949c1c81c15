"""Which layout of a LoRA file other programs read right: the default layout of a run, and what is lost in which program.

Measured by output with diffusers 0.42.1, ComfyUI 0.30.0, sd-scripts and LyCORIS 4.1.3: ``tests/interop/client_table.py``.
"""

from collections.abc import Mapping, Sequence

from .formats import FileFormat
from .key_names import ComponentKeys
from .state_dict import DOWN, ModuleUpdate

FLUX_WIDTH = 3072
"""The only width of single blocks that diffusers splits in kohya files."""


def choose_file_format(
    updates: Mapping[str, ModuleUpdate], components: Sequence[ComponentKeys], family_format: FileFormat
) -> FileFormat:
    """The layout that most programs read right; ``family_format`` is the family's for LoRA."""
    types = {update.adapter_type for update in updates.values()}
    denoiser = next(component for component in components if not component.is_text_encoder)
    if types & {"oft", "boft"}:
        return "diffusers"  # peft's own names
    if denoiser.name == "unet":
        return "kohya"
    if types == {"dora"}:
        return "diffusers"
    if types & {"loha", "lokr"}:
        return family_format if denoiser.key_style == "diffusers" and family_format == "kohya" else "comfy"
    if family_format == "kohya" and denoiser.key_style == "flux" and not _is_flux_file_for_all(updates, components):
        return "diffusers"
    return family_format


def _is_flux_file_for_all(updates: Mapping[str, ModuleUpdate], components: Sequence[ComponentKeys]) -> bool:
    """Whether diffusers converts a kohya file of FLUX.1: of the published width, without T5 and outer layers."""
    for component in components:
        prefix = f"{component.name}."
        own = {module.removeprefix(prefix): each for module, each in updates.items() if module.startswith(prefix)}
        if component.is_text_encoder:
            if own and component.key_style == "t5":
                return False
            continue
        for group in component.get_key_map().group_modules(own):
            parts = [own[module] for module in group.modules if module is not None]
            if not group.name.startswith(("double_blocks.", "single_blocks.")):
                return False
            is_linear1 = len(group.modules) == 4
            if is_linear1 and any(part.tensors[DOWN].shape[1] != FLUX_WIDTH for part in parts):
                return False
            if len({part.scale for part in parts}) > 1:
                return False
    return True
