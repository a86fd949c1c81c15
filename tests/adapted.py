"""For tests: what a model with an adapter is called in files, and its file's tensors."""

from typing import Any

from torch import Tensor, nn

from library.adapters import lora
from library.adapters.formats import Format, to_file
from library.adapters.keys import PartNames
from library.families import FAMILIES


def names_of(model: nn.Module, family: Any = None) -> PartNames:
    """Those of a denoiser."""
    family = family or FAMILIES.get("sd1")
    return PartNames.of(model, family.denoiser, family.lora_prefix, family.lora_names, family.lora_other_names)


def state_of(model: nn.Module, adapter: lora.Adapter, part: str = "unet") -> tuple[dict[str, Tensor], dict[str, float]]:
    """State and alphas as files are written from them."""
    state = {f"{part}.{name}": tensor for name, tensor in lora.state(model).items()}
    return state, {f"{part}.{module}": adapter.alpha for module in adapter.modules}


def written(model: nn.Module, adapter: lora.Adapter, form: Format, family: Any = None) -> dict[str, Tensor]:
    names = names_of(model, family)
    return to_file(*state_of(model, adapter, names.name), [names], form)[0]


def kohya(model: nn.Module, adapter: lora.Adapter, family: Any = None) -> dict[str, Tensor]:
    return written(model, adapter, "kohya", family)
