"""The parts of a trained adapter that have a LoRA file each: of a model of two experts, the adapter of either."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from torch import nn

from ..adapters.injection import Adapter
from ..diffusion.expert_selection import HIGH_NOISE
from ..models.base import Family
from .state import TrainingRun
from .trainable_modules import TrainableModules


@dataclass(frozen=True)
class AdapterPart:
    """What is in one LoRA file: everything, or the adapter of one expert under the names of the model alone."""

    suffix: str = ""
    """The end of the file's name, before its extension."""
    expert: str = ""
    """The expert, where the model has both."""
    is_shared: bool = False
    """Whether the other expert has the same adapter."""

    def select_model(self, model: nn.Module) -> nn.Module:
        """The modules of this part, by the names in its file."""
        if not self.expert or not isinstance(model, TrainableModules):
            return model
        return TrainableModules(model.denoiser_name, {model.denoiser_name: model.denoiser.get_submodule(self.expert)})

    def select_pipe(self, pipe: Any, denoiser_name: str) -> Any:
        """The pipeline with the modules of this part."""
        if not self.expert:
            return pipe
        return SimpleNamespace(**{denoiser_name: getattr(pipe, denoiser_name).get_submodule(self.expert)})

    def select_adapter(self, adapter: Adapter, denoiser_name: str) -> Adapter:
        """The adapters of this part, by the names in its file."""
        if not self.expert:
            return adapter
        return replace(adapter, rank_alphas=self.rename(adapter.rank_alphas, denoiser_name))

    def rename(self, values: Mapping[str, Any], denoiser_name: str) -> dict[str, Any]:
        """The values of this part, by the names in its file."""
        start = f"{denoiser_name}.{self.expert}."
        return {
            f"{denoiser_name}.{name.removeprefix(start)}": value
            for name, value in values.items()
            if name.startswith(start)
        }

    def has_trained(self, run: TrainingRun) -> bool:
        """Whether this part must differ from its start: an update so far was for it, with a learning rate above 0."""
        experts, distribution = run.task.family.experts, run.task.objective.distribution
        if not self.expert or self.is_shared or experts is None or distribution is None or not run.state.has_trained:
            return run.state.has_trained
        if run.strategy.accelerator.scaler is not None:  # float16 skips steps that overflow, which nothing counts
            return False
        skipped = {each.step for each in run.nan_guard.skipped_steps}
        steps = [
            step
            for step in range(run.plan.first_step, run.state.step)
            if step not in skipped and run.lr_schedule(step) > 0
        ]
        return experts.count_steps(run.config.train.seed, steps, distribution)[self.expert] > 0


def list_adapter_parts(family: Family) -> Iterator[AdapterPart]:
    """List the parts of the adapter of a family."""
    experts = family.experts
    if experts is None:
        yield AdapterPart()
        return
    if family.shares_adapters:
        yield AdapterPart(expert=HIGH_NOISE, is_shared=True)
        return
    is_joined = experts.trained == "both"
    for name in experts.list_trained():
        yield AdapterPart(f"_{name}", name if is_joined else "")
