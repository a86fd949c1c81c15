"""Steps that were run on the meta device, each once: layouts that partition the model alike share one."""

import logging
from dataclasses import dataclass, field, replace
from typing import Any

from ..config.schema import AdapterConfig
from ..config.schema_data import CacheConfig
from ..config.schema_distributed import DeepSpeedConfig, ParallelConfig, ShardingConfig
from ..models.detect import DetectedModel
from ..models.families import FAMILIES
from .memory_estimate import estimate_optimizer_state
from .meta_run import LargestBatch, MetaRun, disable_logging
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
    _optimizer_state: int = 0

    def get(self, layout: ParallelLayout, note: str = "") -> MetaRun:
        """Return the run of a layout; ``note`` is added to the line of the log where it has to be run."""
        key = self._get_key(layout)
        settings, partition = key
        if key not in self._runs:
            logger.info("estimating memory: a step on the meta device (%s)", note or layout.name)
            same_settings = next((run for (other, _), run in self._runs.items() if other == settings), None)
            with disable_logging():
                self._runs[key] = MetaRun(layout.config, self.model, self.batch, *partition, same_settings)
        return self._runs[key].replace_cache_settings(layout.config)

    def measure_optimizer_state(self, layout: ParallelLayout, run: MetaRun) -> int:
        """Return the bytes of optimizer state of all trainable parameters, which are measured once."""
        if not self._optimizer_state:
            with disable_logging():
                self._optimizer_state = estimate_optimizer_state(layout.config.optim, run.build_param_groups())
        return self._optimizer_state

    def remove(self, layout: ParallelLayout) -> None:
        """Forget the run of a layout, whose modules are about to be changed."""
        self._runs.pop(self._get_key(layout), None)

    def _get_key(self, layout: ParallelLayout) -> tuple[str, Partition]:
        config = layout.config
        step_config = replace(config, cache=_get_step_cache(config.cache, config.adapter), **_NO_LAYOUT)
        return repr(step_config), get_partition(layout, self.model)


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
