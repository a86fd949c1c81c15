"""Plan a run without loading a model: buckets, steps, epochs and caches, as text or JSON.

torch is needed only where LoRA files are read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..config import RunConfig
from ..dataloader.batch_plan import PlannedStage, get_planned_stages
from ..dataloader.caption_templates import apply_templates
from ..dataloader.prepare import PreparedData, prepare_data
from ..dataloader.run_plan import RunPlan
from ..dataset.clip_windows import DEFAULT_FRAME_RULE
from ..dataset.validate import find_sizes_for_some_models
from ..models.detect import DetectedModel, build_control_limits, detect_model, get_config_reader, list_size_multiples
from ..models.families import FAMILIES
from ..models.model_configs import read_encoded_sizes
from ..models.own_families import get_family_facts
from ..models.trained_components import describe_expert_steps, describe_trained_components, list_cached_text_components
from .cache_size import CacheEstimate, estimate_caption_cache, estimate_latent_cache
from .noise_summary import NoiseSummary, summarize_noise_levels

EPOCH_KEYS = (
    "images_per_epoch",
    "samples_per_epoch",
    "micro_batches_per_epoch",
    "padding_per_epoch",
    "steps_per_epoch",
)


@dataclass(frozen=True)
class DryRun:
    """Dataset and plan of a run for a number of data-parallel processes."""

    detected: DetectedModel
    prepared: PreparedData
    plan: RunPlan
    cache_estimates: Sequence[CacheEstimate] = ()
    notes: Sequence[str] = ()
    """Sizes that some models would not accept, if no model is set."""
    trained_components: str = ""
    noise_levels: NoiseSummary | None = None

    def format_summary(self) -> str:
        lines = [
            f"model family {self.detected.family_name}: {self.detected.reason}",
            *([self.trained_components] if self.trained_components else []),
            *([self.noise_levels.format_text()] if self.noise_levels else []),
            *self.notes,
            self.prepared.format_summary(self.plan.batch_plan, self.plan.steps),
        ]
        return "\n".join([*lines, *(estimate.format_text() for estimate in self.cache_estimates)])

    def export_json(self) -> dict[str, Any]:
        """Export as plain data; ``epochs`` counts those that are started, ``epochs_done`` those that are completed.

        Epoch lengths are in each stage, and on the top level if there is only one.
        """
        batch_plan = self.plan.batch_plan
        stages = [_summarize_stage(stage, self.plan.steps) for stage in get_planned_stages(batch_plan)]
        epoch = {key: stages[0][key] for key in EPOCH_KEYS} if len(stages) == 1 else {}
        return {
            "model_family": self.detected.family,
            "ranks": batch_plan.dp_size,
            "gradient_accumulation_steps": batch_plan.accumulation_steps,
            **epoch,
            "stages": stages,
            "steps": self.plan.steps,
            "epochs": self.plan.num_epochs,
            "epochs_done": self.plan.count_completed_epochs(self.plan.steps),
            "notes": [*self.notes, *self.prepared.manifest.notes],
            "noise_levels": self.noise_levels and self.noise_levels.to_json(),
            "caches": {estimate.name: estimate.to_json() for estimate in self.cache_estimates},
            "datasets": self.prepared.to_json(batch_plan),
        }


def _summarize_stage(stage: PlannedStage, steps: int) -> dict[str, Any]:
    plan = stage.batch_plan
    return {
        "from_step": stage.first_step,
        "to_step": steps if stage.end_step is None else min(stage.end_step, steps),
        "images_per_epoch": sum(len(bucket.sample_indices) for bucket in plan.buckets),
        "samples_per_epoch": plan.samples_per_epoch,
        "micro_batches_per_epoch": plan.micro_batches_per_epoch,
        "padding_per_epoch": sum(map(plan.count_padding, range(len(plan.buckets)))),
        "steps_per_epoch": plan.steps_per_epoch,
    }


def build_dry_run(config: RunConfig, data_parallel_size: int) -> DryRun:
    """Scan the images and plan the run for a number of data-parallel processes."""
    detected = detect_model(config.model)
    if config.adapter.network_weights or config.adapter.base_weights or config.adapter.training_adapter:
        from ..training.network_weights import read_initial_weights  # imports torch

        family = FAMILIES.get(detected.family)(config.model)
        text_components = list_cached_text_components(config.adapter, config.optim, family.facts)
        cached = text_components if config.cache.caches_text_outputs else ()
        read_initial_weights(config.adapter, family, detected, cached_components=cached)
    limits, facts = build_control_limits(detected), get_family_facts(detected.family)
    # without a model, a plan shows the windows of most models of videos
    frame_rule = DEFAULT_FRAME_RULE if detected.is_built_in else detected.frame_rule
    prepared = prepare_data(
        config.data,
        detected.size_multiple,
        config.cache.cache_dir,
        model=detected.short_name,
        control_limits=limits,
        max_side=detected.max_side,
        frame_rule=frame_rule,
    )
    prepared = apply_templates(prepared, config.adapter)
    notes = (
        list(find_sizes_for_some_models(prepared.manifest.datasets, list_size_multiples()))
        if detected.is_built_in
        else []
    )
    if config.preservation.active_option is not None:
        notes.append("memory estimates do not count the second forward pass of output preservation")
    plan = RunPlan.from_config(prepared.build_batch_plan(data_parallel_size, config.train), config.train, config.optim)
    arguments = config.cache, prepared, config.train.seed, plan, read_encoded_sizes(get_config_reader(detected))
    has_latents = config.cache.caches_latents and not prepared.slider_prompts
    estimates = [estimate_latent_cache(*arguments, frame_rule)] if has_latents else []
    if config.cache.caches_text_outputs:
        settings = config.preview, config.distributed.mixed_precision, config.preservation
        images = facts.text_images, facts.control.text_tokens_per_image
        estimates.append(estimate_caption_cache(*arguments, *settings, *images))
    trained = describe_trained_components(config.adapter, config.optim, facts)
    steps, experts = range(plan.first_step, plan.steps), FAMILIES.get(detected.family)(config.model).experts
    if line := describe_expert_steps(config.noise, config.train.seed, steps, detected, experts):
        notes.append(line)
    return DryRun(
        detected=detected,
        prepared=prepared,
        plan=plan,
        cache_estimates=estimates,
        notes=notes,
        trained_components=trained,
        noise_levels=None if prepared.slider_prompts else summarize_noise_levels(config.noise, detected, plan),
    )
