"""Where adapters can be put: the layers of each part of a pipeline that may be trained, and what files call them."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..errors import ConfigError
from .keys import file_names, kohya_name


@dataclass(frozen=True)
class Part:
    """A model of the pipeline, and what in it gets an adapter."""

    name: str
    """The pipeline's attribute, such as ``unet`` or ``text_encoder_2``; it stands before the names in a state."""
    model: nn.Module
    targets: Sequence[str]
    style: str = "diffusers"
    """``Family.lora_names``, or ``Family.text_style``."""
    prefix: str = "lora_unet"
    """What stands before the names of its modules in sd-scripts' files."""
    idle: Sequence[str] = ()
    """Layers that no gradient reaches; they get no adapter."""

    @property
    def is_text(self) -> bool:
        return self.style in ("clip", "t5")


@dataclass(frozen=True)
class Site:
    """One layer that may get an adapter."""

    part: str
    module: str
    original: str
    """Its name in sd-scripts' files; there, several sites may be one."""
    is_wide: bool
    """A convolution over more than one pixel, which has a rank of its own."""
    is_text: bool

    @property
    def name(self) -> str:
        """As a state names it."""
        return f"{self.part}.{self.module}"


def sites_of(part: Part) -> list[Site]:
    """All layers of a part that its targets name, in the model's own order."""
    modules = [name for name in matching(part.model, part.targets) if name not in set(part.idle)]
    files = file_names((name for name, _ in part.model.named_modules()), part.style)
    original = {module: kohya_name(group.name, part.prefix) for group in files.groups(modules)
                for module in group.modules if module is not None}  # fmt: skip
    return [Site(part.name, module, original[module], _is_wide(part.model.get_submodule(module)), part.is_text)
            for module in modules]  # fmt: skip


def matching(model: nn.Module, targets: Sequence[str]) -> tuple[str, ...]:
    """Names of the linear layers and convolutions that a target names; a target without any is an error."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    idle = [target for target in targets if not any(_ends(name, target) for name in names)]
    if idle or not targets:
        found = ", ".join(map(repr, idle)) or "no target"
        raise ConfigError([f"LoRA targets: {found} matches no layer of {type(model).__name__}"])
    return tuple(name for name in names if any(_ends(name, target) for target in targets))


def _ends(name: str, target: str) -> bool:
    """Whether the last parts of a name are those of a target, in which ``*`` is any one part."""
    parts, wanted = name.split("."), target.split(".")
    return len(parts) >= len(wanted) and all(
        want in ("*", part) for part, want in zip(parts[::-1], wanted[::-1], strict=False)
    )


def _is_wide(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1)
