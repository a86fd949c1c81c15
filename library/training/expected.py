"""How many entries a cache will have for a run and how much room they will take, before any model is loaded."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..config import RunConfig
from ..data.cache.captions_shown import captions_of_run
from ..data.cache.places import homes, size_of
from ..data.cache.wanted import wanted_pictures
from ..data.prepare import Prepared
from ..data.prompts import read_prompts
from ..data.showing import Showing
from ..families.sizes import Sizes
from .plan import RunPlan

BYTES = {"float": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Expected:
    """What is kept of one kind."""

    what: str
    entries: int
    size: int | None  # in bytes; not known for every model
    is_most: bool  # whether it may be less
    folders: Sequence[Path]  # none: for the run only

    def text(self) -> str:
        """In one line."""
        room = "of a size that the model's files do not tell" if self.size is None else (
            f"{'at most ' if self.is_most else ''}{size_of(self.size)}")  # fmt: skip
        first = f"in {self.folders[0]}" if self.folders else "for this run only"
        more = f" and {len(self.folders) - 1} more" if len(self.folders) > 1 else ""
        return f"kept {self.what}: {self.entries}, {room}, {first}{more}"

    def record(self) -> dict[str, Any]:
        """As plain data."""
        return {"entries": self.entries, "bytes": self.size, "folders": list(map(str, self.folders))}


def expected(config: RunConfig, prepared: Prepared, plan: RunPlan, sizes: Sizes | None) -> list[Expected]:
    """Of latents and of captions, as far as they are kept."""
    cache, prepared = config.cache, prepared.whole()
    showing = Showing(prepared.manifest, prepared.placements, config.train.seed, plan.steps)
    folders = list(dict.fromkeys(homes(prepared.manifest, cache)))
    found = []
    if cache.latents:
        wanted = wanted_pictures(showing, "")
        once = np.unique(wanted.keys, return_index=True)[1]
        size = None if sizes is None else BYTES[cache.cache_precision] * sum(
            sizes.moments(prepared.placements[sample].bucket) for sample in wanted.samples[once])  # fmt: skip
        found.append(Expected("latents", len(once), size, False, folders if cache.cache_latents_to_disk else ()))
    if cache.texts:
        path = config.preview.sample_prompts
        prompts = read_prompts(Path(path)) if path else []
        also = [text for prompt in prompts for text in (prompt.text, prompt.negative)]
        count = len(captions_of_run(showing, plan.batches, plan.steps, also))
        precision = config.distributed.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        size = None if sizes is None else count * sizes.text * (4 if precision == "no" else 2)
        to_disk = cache.cache_text_encoder_outputs_to_disk
        found.append(Expected("captions", count, size, True, folders if to_disk else ()))
    return found
