"""How many entries a cache will have for a run and how much room they will take, before any model is loaded."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config import RunConfig
from ..data.cache.captions_shown import collect_run_captions
from ..data.cache.places import resolve_cache_dirs, format_bytes
from ..data.cache.wanted import build_latent_keys
from ..data.prepare import PreparedData
from ..data.prompts import load_prompts
from ..data.showing import Augmenter
from ..families.sizes import EncodedSizes
from .plan import RunPlan

BYTES_PER_ELEMENT = {"float": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class CacheEstimate:
    """What is kept of one kind."""

    name: str
    num_entries: int
    num_bytes: int | None  # in bytes; not known for every model
    is_upper_bound: bool  # whether it may be less
    directories: Sequence[Path]  # none: for the run only

    def format_text(self) -> str:
        """In one line."""
        room = "of a size that the model's files do not tell" if self.num_bytes is None else (
            f"{'at most ' if self.is_upper_bound else ''}{format_bytes(self.num_bytes)}")  # fmt: skip
        first = f"in {self.directories[0]}" if self.directories else "for this run only"
        more = f" and {len(self.directories) - 1} more" if len(self.directories) > 1 else ""
        return f"kept {self.name}: {self.num_entries}, {room}, {first}{more}"

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {"entries": self.num_entries, "bytes": self.num_bytes, "folders": list(map(str, self.directories))}


def estimate_caches(config: RunConfig, prepared: PreparedData, run_plan: RunPlan, model_sizes: EncodedSizes | None) -> list[CacheEstimate]:
    """Of latents and of captions, as far as they are kept."""
    cache, prepared = config.cache, prepared.merge_validation()
    showing = Augmenter(prepared.manifest, prepared.assignments, config.train.seed, run_plan.steps)
    folders = list(dict.fromkeys(resolve_cache_dirs(prepared.manifest, cache)))
    found = []
    if cache.caches_latents:
        wanted = build_latent_keys(showing, "")
        once = np.unique(wanted.keys, return_index=True)[1]
        size = None if model_sizes is None else BYTES_PER_ELEMENT[cache.cache_precision] * sum(
            model_sizes.count_moment_elements(prepared.assignments[sample].bucket) for sample in wanted.sample_indices[once])  # fmt: skip
        found.append(CacheEstimate("latents", len(once), size, False, folders if cache.cache_latents_to_disk else ()))
    if cache.caches_text_outputs:
        path = config.preview.sample_prompts
        prompts = load_prompts(Path(path)) if path else []
        also = [text for prompt in prompts for text in (prompt.text, prompt.negative_prompt)]
        count = len(collect_run_captions(showing, run_plan.batch_plan, run_plan.steps, also))
        precision = config.distributed.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        size = None if model_sizes is None else count * model_sizes.text_elements * (4 if precision == "no" else 2)
        to_disk = cache.cache_text_encoder_outputs_to_disk
        found.append(CacheEstimate("captions", count, size, True, folders if to_disk else ()))
    return found
