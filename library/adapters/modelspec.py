"""ModelSpec 1.0.1: what a LoRA file says of itself to those who collect models."""

import base64
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..config.save_rules import THUMBNAIL_TYPES
from ..config.schema import RunConfig

MODELSPEC_USER_KEYS = ("author", "description", "license", "tags", "usage_hint", "merged_from", "trigger_phrase", "preprocessor")
"""What a user may say; each ``metadata_...`` option has the name of its key."""


def build_modelspec_metadata(
    config: RunConfig, architecture: str, implementation: str, prediction_type: str, software: str, saved_at: float,
    resolution: tuple[int, int],
) -> dict[str, Any]:  # fmt: skip
    """The keys of one file."""
    save, noise, (width, height) = config.save, config.noise, resolution
    told = {
        "sai_model_spec": "1.0.1",
        "architecture": f"{architecture}/lora",
        "implementation": implementation,
        "implementation_version": software,
        "title": save.metadata_title or save.output_name,
        "date": datetime.fromtimestamp(int(saved_at), tz=timezone.utc).isoformat(),
        "resolution": f"{width}x{height}",
        "prediction_type": prediction_type,
        "encoder_layer": str(config.model.clip_skip or 1),
    }
    told |= {name: value for name in MODELSPEC_USER_KEYS if (value := getattr(save, f"metadata_{name}")) is not None}
    if save.metadata_thumbnail is not None:
        told["thumbnail"] = _encode_data_url(Path(save.metadata_thumbnail).expanduser())
    if noise.min_timestep is not None or noise.max_timestep is not None:
        least, most = noise.min_timestep or 0, 1000 if noise.max_timestep is None else noise.max_timestep
        told["timestep_range"] = f"{least},{most}"
    return {f"modelspec.{key}": value for key, value in told.items()}


def _encode_data_url(path: Path) -> str:
    """A picture as text."""
    return f"data:{THUMBNAIL_TYPES[path.suffix.lower()]};base64,{base64.b64encode(path.read_bytes()).decode()}"
