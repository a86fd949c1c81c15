"""Where adapters can be put: the layers of each part of a pipeline that may be trained, and what files call them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..errors import ConfigError
from .keys import build_key_map, build_kohya_name


@dataclass(frozen=True)
class TargetComponent:
    """A model of the pipeline, and what in it gets an adapter."""

    name: str
    """The pipeline's attribute, such as ``unet`` or ``text_encoder_2``; it stands before the names in a state."""
    model: nn.Module
    target_modules: Sequence[str]
    key_style: str = "diffusers"
    """``Family.lora_names``, or ``Family.text_style``."""
    key_prefix: str = "lora_unet"
    """What stands before the names of its modules in sd-scripts' files."""
    unused_layers: Sequence[str] = ()
    """Layers that no gradient reaches; they get no adapter."""

    @property
    def is_text_encoder(self) -> bool:
        return self.key_style in ("clip", "t5")


@dataclass(frozen=True)
class TargetLayer:
    """One layer that may get an adapter."""

    component: str
    module: str
    kohya_name: str
    """Its name in sd-scripts' files; there, several sites may be one."""
    is_spatial_conv: bool
    """A convolution over more than one pixel, which has a rank of its own."""
    is_text_encoder: bool

    @property
    def name(self) -> str:
        """As a state names it."""
        return f"{self.component}.{self.module}"


def find_target_layers(component: TargetComponent) -> list[TargetLayer]:
    """All layers of a part that its targets name, in the model's own order."""
    modules = [name for name in match_target_modules(component.model, component.target_modules) if name not in set(component.unused_layers)]
    files = build_key_map((name for name, _ in component.model.named_modules()), component.key_style)
    original = {module: build_kohya_name(group.name, component.key_prefix) for group in files.group_modules(modules)
                for module in group.modules if module is not None}  # fmt: skip
    return [TargetLayer(component.name, module, original[module], _is_spatial_conv(component.model.get_submodule(module)), component.is_text_encoder)
            for module in modules]  # fmt: skip


def match_target_modules(model: nn.Module, target_modules: Sequence[str]) -> tuple[str, ...]:
    """Names of the linear layers and convolutions that a target names; a target without any is an error."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    idle = [target for target in target_modules if not any(_matches_suffix(name, target) for name in names)]
    if idle or not target_modules:
        found = ", ".join(map(repr, idle)) or "no target"
        raise ConfigError([f"LoRA targets: {found} matches no layer of {type(model).__name__}"])
    return tuple(name for name in names if any(_matches_suffix(name, target) for target in target_modules))


def _matches_suffix(name: str, target: str) -> bool:
    """Whether the last parts of a name are those of a target, in which ``*`` is any one part."""
    parts, wanted = name.split("."), target.split(".")
    return len(parts) >= len(wanted) and all(
        want in ("*", part) for part, want in zip(parts[::-1], wanted[::-1], strict=False)
    )


def _is_spatial_conv(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1)
