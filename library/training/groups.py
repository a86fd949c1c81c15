"""Which learning rate every trained weight has."""

from collections.abc import Iterator

from torch import nn

from ..adapters import lora
from ..adapters.sizing import matches
from ..config.block_args import block_of, block_weights
from ..config.network_args import UNETS, NetworkArguments, arguments_of
from ..config.schema import OptimConfig, RunConfig
from ..families.facts import Facts
from ..optim.optimizers import Group


def groups_of(trained: nn.Module, adapter: lora.Adapter, config: RunConfig, facts: Facts) -> list[Group]:
    """The trained weights by learning rate; a weight that modules share is in one group, once."""
    arguments = arguments_of(config.adapter)
    sites = {site.name: site for site in adapter.sites}
    found: dict[tuple[str, float], list[nn.Parameter]] = {}
    for name, parameter in _once(trained):
        site = sites[lora.module_of(name)]
        label, rate = _of_site(site, config.optim, arguments, facts)
        plus = _plus(site, arguments)
        if plus is not None and ".lora_B." in name:
            label, rate = f"{label}_plus", rate * plus
        found.setdefault((label, rate), []).append(parameter)
    return [Group(label, parameters, rate) for (label, rate), parameters in found.items()]


def _of_site(site: lora.Site, config: OptimConfig, arguments: NetworkArguments, facts: Facts) -> tuple[str, float]:
    """What figures call the group of a site, and its rate."""
    label, rate = site.part if site.is_text else "unet", rate_of(site.part, config, facts)
    for number, (pattern, own) in enumerate(arguments.network_reg_lrs):
        if matches(pattern, site):
            return f"{label}_reg{number}", own
    if facts.name in UNETS and not site.is_text and (weights := block_weights(arguments, facts.name)) is not None:
        block = block_of(site.original, facts.name)
        if block is not None:
            return f"{label}_block{block}", rate * weights[block]
    return label, rate


def _plus(site: lora.Site, arguments: NetworkArguments) -> float | None:
    """LoRA+: how much faster than the down matrices the up matrices learn."""
    own = arguments.loraplus_text_encoder_lr_ratio if site.is_text else arguments.loraplus_unet_lr_ratio
    return arguments.loraplus_lr_ratio if own is None else own


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
