"""Steps that were run on the meta device, each once: layouts that partition the model alike share one."""

import logging
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.schema import AdapterConfig, RunConfig
from ..config.schema_data import CacheConfig
from ..config.schema_distributed import DeepSpeedConfig, ParallelConfig, ShardingConfig
from ..models.detect import DetectedModel
from ..models.families import FAMILIES
from .meta_run import LargestBatch, MetaRun, disable_logging
from .optimizer_memory import OptimizerMemory, measure_optimizer
from .parallel_layouts import ParallelLayout

logger = logging.getLogger(__name__)
Partition = tuple[int, int, bool]
WHOLE_MODEL: Partition = (1, 1, False)
_NO_LAYOUT: dict[str, Any] = {
    "parallel": ParallelConfig(),
    "sharding": ShardingConfig(),
    "deepspeed": DeepSpeedConfig(),
}
"""Settings of which a step depends only through the partition."""


@dataclass
class MetaRuns:
    """The steps of one model and batch, by the settings that change a step and by the partition."""

    model: DetectedModel
    batch: LargestBatch
    _runs: dict[tuple[str, Partition], MetaRun] = field(default_factory=dict)
    is_on_gpu: bool = True
    """Whether the run is on a GPU, where an optimizer's step allocates more than on a CPU."""
    _optimizers: dict[Any, OptimizerMemory] = field(default_factory=dict)

    def get(self, layout: ParallelLayout, note: str = "") -> MetaRun:
        """Return the run of a layout; ``note`` is added to the line of the log where it has to be run."""
        key = self._get_key(layout)
        settings, partition = key
        if key not in self._runs:
            logger.info("estimating memory: a step on the meta device (%s)", note or layout.name)
            known = (run for (other, _), run in self._runs.items() if other == settings)
            if layout.config.adapter.is_full:
                known = (run for run in self._runs.values() if encodes_alike(run.config, layout.config))
            with disable_logging():
                self._runs[key] = MetaRun(layout.config, self.model, self.batch, *partition, next(known, None))
        run = self._runs[key].replace_cache_settings(layout.config)
        return run.replace_swaps(layout.config) if layout.config.adapter.is_full else run

    def measure_optimizer(self, layout: ParallelLayout, run: MetaRun) -> OptimizerMemory:
        """Return what the optimizer needs for all trainable parameters, which is measured once.

        Layouts that partition trained weights take their share of it.
        """
        config = layout.config
        optim = config.optim.optimizer_type, config.optim.optimizer_args
        is_rounded = config.adapter.is_full and config.distributed.full_bf16 and config.full.stochastic_rounding
        key = *optim, config.distributed.full_bf16, is_rounded, run.trainable_elements
        if key not in self._optimizers:
            with disable_logging():
                groups = run.build_param_groups()
                self._optimizers[key] = measure_optimizer(
                    config.optim, groups, is_on_gpu=self.is_on_gpu, is_rounded=is_rounded
                )
        return self._optimizers[key]

    def remove(self, layout: ParallelLayout) -> None:
        """Forget the run of a layout, whose modules are about to be changed."""
        self._runs.pop(self._get_key(layout), None)

    def _get_key(self, layout: ParallelLayout) -> tuple[str, Partition]:
        config = layout.config
        step_config = replace(config, cache=_get_step_cache(config.cache, config.adapter), **_NO_LAYOUT)
        if config.adapter.is_full:  # neither what updates the weights nor where they are changes the step
            optim = replace(config.optim, optimizer_type="", optimizer_args=())
            step_config = replace(
                step_config,
                optim=optim,
                train=replace(config.train, blocks_to_swap=0, block_swap_ring_size=0),
                full=replace(config.full, fused_backward_pass=False, stochastic_rounding=True),
            )
        return repr(step_config), get_partition(layout, self.model)


def encodes_alike(config: RunConfig, other: RunConfig) -> bool:
    """Whether two runs of full training have the same frozen encoders, in the same precision, and encode alike."""
    one, two = (
        (
            each.adapter,
            each.model,
            _get_step_cache(each.cache, each.adapter),
            each.cache.vae_batch_size,
            each.cache.text_encoder_batch_size,
            each.distributed.mixed_precision,
            each.optim.text_encoder_lr,
        )
        for each in (config, other)
    )
    return one == two


def _get_step_cache(cache: CacheConfig, adapter: AdapterConfig) -> CacheConfig:
    """The cache settings that change a step: where CLIP is trained, the step runs T5 as well, unless it is cached."""
    return CacheConfig(cache_text_encoder_outputs=cache.caches_text_outputs and adapter.trains_text_encoders)


def get_partition(layout: ParallelLayout, model: DetectedModel) -> Partition:
    """Return the partition arguments of ``MetaRun``: TP size, CP size, and whether a pipeline needs a run of its own.

    The stages of a pipeline can be cut out of any run, unless it pads texts or splits tokens elsewhere.
    """
    dims = layout.dims
    varies = dims.cp > 1 or FAMILIES.get(model.family).facts.text.has_variable_length
    return dims.tp, dims.cp, dims.pp > 1 and varies
