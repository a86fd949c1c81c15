"""Which learning rate every trained weight has."""

from collections.abc import Iterator

from torch import nn

from ..adapters import lora
from ..config.schema import OptimConfig
from ..families.facts import Facts
from ..optim.optimizers import Group


def groups_of(trained: nn.Module, adapter: lora.Adapter, config: OptimConfig, facts: Facts) -> list[Group]:
    """The trained weights by learning rate; a weight that modules share is in one group, once."""
    sites = {site.name: site for site in adapter.sites}
    found: dict[tuple[str, float], list[nn.Parameter]] = {}
    for name, parameter in _once(trained):
        site = sites[lora.module_of(name)]
        label = site.part if site.is_text else "unet"
        found.setdefault((label, rate_of(site.part, config, facts)), []).append(parameter)
    return [Group(label, parameters, rate) for (label, rate), parameters in found.items()]


def rate_of(part: str, config: OptimConfig, facts: Facts) -> float:
    """The peak learning rate of a part of the pipeline."""
    if part not in facts.text_encoders:
        return config.learning_rate if config.unet_lr is None else config.unet_lr
    rates = config.text_encoder_lr or (config.learning_rate,)
    return rates[0] if len(rates) == 1 else rates[facts.text_encoders.index(part)]


def _once(trained: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    met = set()
    for name, parameter in lora.parameters(trained):
        if id(parameter) not in met:
            met.add(id(parameter))
            yield name, parameter
