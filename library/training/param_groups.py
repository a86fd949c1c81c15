"""Parameter groups of the optimizer: the learning rate of each layer (component, block, regex), and LoRA+."""

from collections.abc import Iterator

from torch import nn

from ..adapters import injection
from ..adapters.targets_rank_alpha import TargetLayer, matches_pattern
from ..config.network_args import (
    NetworkArgs,
    compute_block_lr_weights,
    get_network_args,
    get_unet_block_index,
)
from ..config.schema import AdapterConfig
from ..config.schema_optim import OptimConfig
from ..models.facts import FamilyFacts
from ..models.trained_components import get_component_lr
from ..optim.optimizers import ParamGroup


def build_param_groups(
    model: nn.Module, adapter: injection.Adapter, config: AdapterConfig, optim: OptimConfig, facts: FamilyFacts
) -> list[ParamGroup]:
    """Group the trainable parameters by learning rate; a parameter shared by modules is in one group, once."""
    network_args = get_network_args(config)
    layers = {layer.name: layer for layer in adapter.target_layers}
    groups: dict[tuple[str, float], list[nn.Parameter]] = {}
    for name, parameter in _iter_unique_parameters(model):
        layer = layers[injection.parse_module_name(name)]
        label, lr = _get_layer_lr(layer, optim, network_args, facts)
        ratio = _get_loraplus_ratio(layer, network_args)
        if ratio is not None and ".lora_B." in name:
            label, lr = f"{label}_plus", lr * ratio
        groups.setdefault((label, lr), []).append(parameter)
    return [ParamGroup(label, parameters, lr) for (label, lr), parameters in groups.items()]


def _get_layer_lr(
    layer: TargetLayer, config: OptimConfig, network_args: NetworkArgs, facts: FamilyFacts
) -> tuple[str, float]:
    """Return the group label of a layer, under which its learning rate is logged, and its peak learning rate."""
    label = layer.component if layer.is_text_encoder else "unet"
    lr = get_component_lr(layer.component, config, facts)
    for number, (pattern, pattern_lr) in enumerate(network_args.network_reg_lrs):
        if matches_pattern(pattern, layer, network_args):
            return f"{label}_reg{number}", pattern_lr
    if facts.options.network.is_unet and not layer.is_text_encoder:
        weights = compute_block_lr_weights(network_args, facts.options.network)
        block = None if weights is None else get_unet_block_index(layer.kohya_name, facts.options.network)
        if weights is not None and block is not None:
            return f"{label}_block{block}", lr * weights[block]
    return label, lr


def _get_loraplus_ratio(layer: TargetLayer, network_args: NetworkArgs) -> float | None:
    """Return the LoRA+ ratio of the learning rates of B and A."""
    ratio = network_args.loraplus_unet_lr_ratio
    if layer.is_text_encoder:
        ratio = network_args.loraplus_text_encoder_lr_ratio
    return network_args.loraplus_lr_ratio if ratio is None else ratio


def _iter_unique_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    seen = set()
    for name, parameter in injection.iter_adapter_parameters(model):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter
