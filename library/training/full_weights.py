"""The weights that full fine-tuning (``--train full``) trains: which, their precision, and how far they moved.

They are parameters of the model itself, so optimizer, gradient clipping, EMA and checkpoints need nothing else.  They
are float32 (``--full_bf16``: bf16) whatever the precision of the forward pass, which runs in autocast.
"""

import logging
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..adapters.component_key_names import clean_parameter_name
from ..config.network_args import get_weight_block_index
from ..config.schema import AdapterConfig, RunConfig
from ..config.schema_full import FullConfig
from ..config.schema_optim import OptimConfig
from ..config.types import BlockRates
from ..distributed.devices import HOST
from ..errors import ConfigError, UserError
from ..models.base import Family
from ..models.facts import FamilyFacts
from ..models.trained_components import get_component_lr, select_trained_text_encoders
from ..optim.optimizers import ParamGroup, use_eval_weights
from ..parallel.sharded_weights import get_local_shard
from ..problems import Problem
from .callbacks import UpdateNorms, combine_norms, group_norms_by_layer_type
from .state import TrainingRun
from .trainable_modules import TrainableModules, get_trainable_parameters, prepare_for_training

logger = logging.getLogger(__name__)
MAX_SAMPLED_ELEMENTS = 4096
"""Elements of each weight by which its update norm is estimated, so that no second copy of the model is kept."""


def get_trained_dtypes(config: RunConfig, family: Family) -> dict[str, torch.dtype]:
    """Return the dtype of each component whose weights the optimizer updates; none of a run that trains adapters."""
    if not config.adapter.is_full:
        return {}
    encoders = select_trained_text_encoders(config.adapter, config.optim, family.facts)
    dtype = torch.bfloat16 if config.distributed.full_bf16 else torch.float32
    return dict.fromkeys((*family.facts.pipeline.denoisers, *encoders), dtype)


def list_trained_names(config: AdapterConfig, family: Family, component: str, model: nn.Module) -> list[str]:
    """List the weights of a component that are trained: not those whose results are unused, nor other modules."""
    if component == family.facts.denoiser_name:
        unused, patterns = family.get_unused_layers(model), config.train_modules
    else:
        unused, patterns = family.get_unused_text_layers(model, component), ()
    starts, idle = tuple(f"{layer}." for layer in unused), {*unused}
    names = [name for name, _ in model.named_parameters() if name not in idle and not name.startswith(starts)]
    return [name for name in names if not patterns or any(re.search(pattern, name) for pattern in patterns)]


def build_full_modules(config: RunConfig, family: Family, pipe: Any) -> TrainableModules:
    """Make the selected weights of denoiser and text encoders trainable, freeze the rest, switch to training mode."""
    denoiser_name = family.facts.denoiser_name
    encoders = select_trained_text_encoders(config.adapter, config.optim, family.facts)
    models = {name: getattr(pipe, name) for name in (denoiser_name, *encoders)}
    for name, model in models.items():
        model.requires_grad_(False)
        if name == denoiser_name and not config.adapter.trains_denoiser:
            continue
        trained = set(list_trained_names(config.adapter, family, name, model))
        if name == denoiser_name and config.full.block_lr is not None:
            trained = {each for each in trained if get_block_lr(each, config.full.block_lr, family.facts)}
        for parameter_name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter_name in trained)
    modules = TrainableModules(denoiser_name, models)
    if not get_trainable_parameters(modules):
        raise ConfigError([Problem("train_modules", "no weight is trained", "remove it")])
    prepare_for_training(modules, encoders, config.train)
    return modules


def get_block_lr(weight: str, block_lr: BlockRates, facts: FamilyFacts) -> float:
    """Return the learning rate that ``block_lr`` gives a weight of the UNet."""
    return block_lr.rates[get_weight_block_index(weight, facts.options.network)]


def _build_block_groups(unet: nn.Module, block_lr: BlockRates, facts: FamilyFacts) -> list[ParamGroup]:
    """Group the trained weights of a UNet by block."""
    blocks: dict[int, list[nn.Parameter]] = {}
    for name, weight in unet.named_parameters():
        if weight.requires_grad:
            index = get_weight_block_index(clean_parameter_name(name), facts.options.network)
            blocks.setdefault(index, []).append(weight)
    return [ParamGroup(f"unet_block{index}", blocks[index], block_lr.rates[index]) for index in sorted(blocks)]


def build_full_param_groups(
    modules: TrainableModules, optim: OptimConfig, full: FullConfig, facts: FamilyFacts
) -> list[ParamGroup]:
    """Group the trained weights by component, or by block, each with its learning rate."""
    groups = list[ParamGroup]()
    for name, model in modules.named_children():
        label = "unet" if name == facts.denoiser_name else name
        if label == "unet" and full.block_lr is not None:
            groups += _build_block_groups(model, full.block_lr, facts)
        elif parameters := get_trainable_parameters(model):
            groups.append(ParamGroup(label, parameters, get_component_lr(name, optim, facts)))
    return groups


def format_full_summary(modules: TrainableModules) -> list[str]:
    """Describe what is trained: the number of weights of each component, and their precision."""
    lines = []
    for name, model in modules.named_children():
        trained = get_trainable_parameters(model)
        if not trained:
            continue
        count, total = sum(each.numel() for each in trained), sum(each.numel() for each in model.parameters())
        dtype = str(trained[0].dtype).removeprefix("torch.")
        lines.append(
            f"training {name} ({type(model).__name__}) in full: {count:,} of {total:,} weights"
            f" ({100 * count / total:.2f} %), in {dtype}"
        )
    return lines


def sample_elements(weight: Tensor) -> Tensor:
    """Copy some elements of a weight, or of the part on this rank, spread evenly over it, to host memory."""
    flat = get_local_shard(weight.detach()).reshape(-1)
    stride = max(1, -(-flat.numel() // MAX_SAMPLED_ELEMENTS))
    return flat[::stride].to(HOST, torch.float32, copy=True)


class WeightChanges(UpdateNorms):
    """Log how far the weights moved since the run began or was resumed, estimated by some elements of each."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[str, Tensor] = {}
        self._is_whole_run = False

    def on_train_begin(self, run: TrainingRun) -> None:
        self._is_whole_run = not run.state.samples
        with use_eval_weights(run.optimizer):
            self._before = {name: sample_elements(weight) for name, weight in self._iter_weights(run)}

    def __call__(self, run: TrainingRun) -> None:
        with use_eval_weights(run.optimizer):
            weights = self._iter_weights(run)
            count_copies = run.strategy.count_copies
            squares = [self._estimate_squares(name, weight, count_copies(weight)) for name, weight in weights]
        totals = run.strategy.sum_over_shards(torch.tensor(squares, dtype=torch.float64)).sqrt().tolist()
        self.norms = {name: total for (name, _), total in zip(weights, totals, strict=True)}
        by_type = group_norms_by_layer_type(self.norms)
        logger.info("update norm of the weights, estimated: %.4g", combine_norms(self.norms.values()))
        still = [name for name, value in self.norms.items() if not value]
        if still and len(still) < len(self.norms):
            logger.info("%d of %d weights were not changed, such as %s", len(still), len(self.norms), still[0])
        values = {"update/dead_layers": len(still), "update/layers": len(self.norms)}
        run.metric_logger.log_values(run, values | {f"update/kind/{name}": value for name, value in by_type.items()})

    def _estimate_squares(self, name: str, weight: Tensor, copies: int) -> float:
        """Estimate the sum of the squared changes of the weight, or of its part on this rank, of which all have one."""
        before, now = self._before[name], sample_elements(weight)
        share = get_local_shard(weight.detach()).numel() / max(1, before.numel())
        return float((now - before).double().square().sum()) * share / copies

    def fail_if_zero(self, run: TrainingRun) -> None:
        if not self._is_whole_run or any(self.norms.values()):
            return
        cause = "the gradient was zero in every step" if run.state.has_trained else "every step was skipped"
        error = UserError(f"the model is unchanged after {run.state.step} steps ({cause}, or the learning rate is 0)")
        error.is_reported = not run.strategy.comm.is_main
        raise error

    @staticmethod
    def _iter_weights(run: TrainingRun) -> Sequence[tuple[str, nn.Parameter]]:
        return [(clean_parameter_name(name), each) for name, each in run.strategy.iter_trained_weights(run.model)]
