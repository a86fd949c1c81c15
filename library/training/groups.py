"""Which learning rate every trained weight has."""

from collections.abc import Iterator

from torch import nn

from ..adapters import lora
from ..adapters.sizing import matches_pattern
from ..config.block_args import get_unet_block_index, compute_block_lr_weights
from ..config.network_args import UNET_FAMILIES, NetworkArgs, get_network_args
from ..config.schema import OptimConfig, RunConfig
from ..families.facts import FamilyFacts
from ..optim.optimizers import ParamGroup


def build_param_groups(model: nn.Module, adapter: lora.Adapter, config: RunConfig, facts: FamilyFacts) -> list[ParamGroup]:
    """The trained weights by learning rate; a weight that modules share is in one group, once."""
    arguments = get_network_args(config.adapter)
    sites = {site.name: site for site in adapter.target_layers}
    found: dict[tuple[str, float], list[nn.Parameter]] = {}
    for name, parameter in _iter_unique_parameters(model):
        site = sites[lora.parse_module_name(name)]
        label, rate = _get_layer_lr(site, config.optim, arguments, facts)
        plus = _get_loraplus_ratio(site, arguments)
        if plus is not None and ".lora_B." in name:
            label, rate = f"{label}_plus", rate * plus
        found.setdefault((label, rate), []).append(parameter)
    return [ParamGroup(label, parameters, rate) for (label, rate), parameters in found.items()]


def _get_layer_lr(target_layer: lora.TargetLayer, config: OptimConfig, network_args: NetworkArgs, facts: FamilyFacts) -> tuple[str, float]:
    """What figures call the group of a site, and its rate."""
    label, rate = target_layer.component if target_layer.is_text_encoder else "unet", get_component_lr(target_layer.component, config, facts)
    for number, (pattern, own) in enumerate(network_args.network_reg_lrs):
        if matches_pattern(pattern, target_layer):
            return f"{label}_reg{number}", own
    if facts.name in UNET_FAMILIES and not target_layer.is_text_encoder and (weights := compute_block_lr_weights(network_args, facts.name)) is not None:
        block = get_unet_block_index(target_layer.kohya_name, facts.name)
        if block is not None:
            return f"{label}_block{block}", rate * weights[block]
    return label, rate


def _get_loraplus_ratio(target_layer: lora.TargetLayer, network_args: NetworkArgs) -> float | None:
    """LoRA+: how much faster than the down matrices the up matrices learn."""
    own = network_args.loraplus_text_encoder_lr_ratio if target_layer.is_text_encoder else network_args.loraplus_unet_lr_ratio
    return network_args.loraplus_lr_ratio if own is None else own


def get_component_lr(component: str, config: OptimConfig, facts: FamilyFacts) -> float:
    """The peak learning rate of a part of the pipeline."""
    if component not in facts.text_encoders:
        return config.learning_rate if config.unet_lr is None else config.unet_lr
    rates = config.text_encoder_lr or (config.learning_rate,)
    return rates[0] if len(rates) == 1 else rates[facts.text_encoders.index(component)]


def _iter_unique_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    met = set()
    for name, parameter in lora.iter_adapter_parameters(model):
        if id(parameter) not in met:
            met.add(id(parameter))
            yield name, parameter
