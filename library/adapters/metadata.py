"""What a LoRA file says of itself: sd-scripts' ``ss_*`` keys, ModelSpec 1.0.1, and the hashes that web UIs look for.

Only what is known to be true is written, and never a path: of every path only the last part.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from safetensors.torch import save
from torch import Tensor

from ..config.schema import RunConfig
from ..config.validate import THUMBNAIL_TYPES


@dataclass(frozen=True)
class BaseModelMetadata:
    """What the family knows of the model that was trained on."""

    base_model_version: str  # sd_v1
    architecture: str  # stable-diffusion-v1
    prediction_type: str  # epsilon or v
    implementation: str = "diffusers"


@dataclass(frozen=True)
class RunMetadata:
    """What the run knows of itself when a file is written."""

    step: int
    epoch: int
    max_train_steps: int  # of the whole run
    num_epochs: int
    started_at: float  # seconds since 1970
    saved_at: float
    session_id: int
    num_train_images: int  # with repeats, without regularisation
    num_reg_images: int
    num_batches_per_epoch: int
    resolution: tuple[int, int]  # width, height
    dataset_metadata: Mapping[str, str]  # what is told of the pictures
    model_metadata: Mapping[str, str]  # what is told of the model's files
    rank: int | str  # a word where modules differ because a file says so
    alpha: float | str
    optimizer: str  # module.Class(name=value,...)
    mixed_precision: str  # as it came out of flags, launcher and accelerate's own file


def build_metadata(config: RunConfig, model: BaseModelMetadata, run: RunMetadata, software: str) -> dict[str, str]:
    """The metadata of one file, without hashes; ``software`` is a name and a version, ``name/1.0``."""
    least = _build_minimum_metadata(config, model, run)
    if config.save.no_metadata:
        return _convert_values_to_str(least)
    spec = build_modelspec_metadata(
        config, model.architecture, model.implementation, model.prediction_type, software, run.saved_at, run.resolution
    )
    return _convert_values_to_str(
        {
            **least,
            **run.model_metadata,
            **run.dataset_metadata,
            **_build_training_metadata(config, run),
            **_build_objective_metadata(config, model),
            **spec,
        }
    )


def add_model_hashes(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, str]:
    """``metadata`` with sd-scripts' two hashes of the tensors as they are going to be saved."""
    # Only ss_ keys count: they never change, while titles and the like may be edited.
    payload = save(dict(tensors), {key: value for key, value in metadata.items() if key.startswith("ss_")})
    start = 8 + int.from_bytes(payload[:8], "little")
    return {
        **metadata,
        "sshs_model_hash": hashlib.sha256(memoryview(payload)[start:]).hexdigest(),
        "sshs_legacy_hash": hashlib.sha256(payload[0x100000:0x110000]).hexdigest()[:8],
    }


def _build_minimum_metadata(config: RunConfig, model: BaseModelMetadata, run: RunMetadata) -> dict[str, Any]:
    """What loaders and UIs read."""
    return {
        "ss_v2": model.base_model_version.startswith("sd_v2"),
        "ss_base_model_version": model.base_model_version,
        "ss_network_module": config.adapter.network_module,
        "ss_network_dim": run.rank,
        "ss_network_alpha": run.alpha,
        "ss_network_args": json.dumps(dict(_split_network_arg(word) for word in config.adapter.network_args)),
    }


def _build_training_metadata(config: RunConfig, run: RunMetadata) -> dict[str, Any]:
    optim, train, data = config.optim, config.train, config.data
    return {
        "ss_session_id": run.session_id,
        "ss_training_started_at": run.started_at,
        "ss_training_finished_at": run.saved_at,
        "ss_output_name": config.save.output_name,
        "ss_learning_rate": optim.learning_rate,
        "ss_unet_lr": optim.unet_lr,
        "ss_text_encoder_lr": _format_learning_rates(optim.text_encoder_lr),
        "ss_network_dropout": config.adapter.network_dropout or None,
        "ss_scale_weight_norms": config.adapter.scale_weight_norms,
        "ss_cache_latents": config.cache.caches_latents,
        "ss_optimizer": run.optimizer,
        "ss_max_grad_norm": optim.max_grad_norm,
        "ss_lr_scheduler": optim.lr_scheduler,
        "ss_lr_warmup_steps": optim.lr_warmup_steps,
        "ss_steps": run.step,
        "ss_max_train_steps": run.max_train_steps,
        "ss_epoch": run.epoch,
        "ss_num_epochs": run.num_epochs,
        "ss_num_train_images": run.num_train_images,
        "ss_num_reg_images": run.num_reg_images,
        "ss_num_batches_per_epoch": run.num_batches_per_epoch,
        "ss_gradient_accumulation_steps": train.gradient_accumulation_steps,
        "ss_gradient_checkpointing": train.gradient_checkpointing,
        "ss_seed": train.seed,
        "ss_mixed_precision": run.mixed_precision,
        "ss_prior_loss_weight": data.prior_loss_weight,
        "ss_caption_dropout_rate": data.caption_dropout_rate,
        "ss_caption_dropout_every_n_epochs": data.caption_dropout_every_n_epochs,
        "ss_caption_tag_dropout_rate": data.caption_tag_dropout_rate,
        "ss_resize_interpolation": data.resize_interpolation,
        "ss_clip_skip": config.model.clip_skip,
        "ss_max_token_length": config.model.max_token_length if config.model.max_token_length > 75 else None,
        "ss_training_comment": config.save.training_comment,
    }


def _split_network_arg(arg: str) -> tuple[str, str]:
    name, _, value = arg.partition("=")
    return name.strip(), value.strip()


def _format_learning_rates(rates: Sequence[float]) -> Any:
    """As sd-scripts writes it: nothing, a number, or a list."""
    return list(rates) if len(rates) > 1 else rates[0] if rates else None


def _build_objective_metadata(config: RunConfig, model: BaseModelMetadata) -> dict[str, Any]:
    """Noise, times and loss; like sd-scripts, those of flow matching only for models that are trained by it."""
    noise, loss = config.noise, config.loss
    always = {
        "ss_noise_offset": noise.noise_offset or None,
        "ss_noise_offset_random_strength": noise.noise_offset_random_strength,
        "ss_adaptive_noise_scale": noise.adaptive_noise_scale,
        "ss_multires_noise_iterations": noise.multires_noise_iterations or None,
        "ss_multires_noise_discount": noise.multires_noise_discount,
        "ss_ip_noise_gamma": noise.ip_noise_gamma or None,
        "ss_ip_noise_gamma_random_strength": noise.ip_noise_gamma_random_strength,
        "ss_zero_terminal_snr": noise.zero_terminal_snr,
        "ss_min_snr_gamma": loss.min_snr_gamma,
        "ss_debiased_estimation": loss.debiased_estimation_loss,
        "ss_loss_type": loss.loss_type,
        "ss_huber_schedule": loss.huber_schedule,
        "ss_huber_c": loss.huber_c,
        "ss_huber_scale": loss.huber_scale,
    }
    if model.prediction_type != "flow":
        return always
    return {
        **always,
        "ss_timestep_sampling": noise.flow_timestep_sampling,
        "ss_sigmoid_scale": noise.sigmoid_scale,
        "ss_discrete_flow_shift": noise.discrete_flow_shift,
        "ss_weighting_scheme": noise.weighting_scheme or "none",
        "ss_logit_mean": noise.logit_mean,
        "ss_logit_std": noise.logit_std,
        "ss_mode_scale": noise.mode_scale,
        "ss_model_prediction_type": "raw",
        "ss_guidance_scale": config.model.guidance_scale,
    }


def _convert_values_to_str(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: value if isinstance(value, str) else str(value) for key, value in values.items()}


MODELSPEC_USER_KEYS = (
    "author",
    "description",
    "license",
    "tags",
    "usage_hint",
    "merged_from",
    "trigger_phrase",
    "preprocessor",
)
"""What a user may say; each ``metadata_...`` option has the name of its key."""


def build_modelspec_metadata(
    config: RunConfig,
    architecture: str,
    implementation: str,
    prediction_type: str,
    software: str,
    saved_at: float,
    resolution: tuple[int, int],
) -> dict[str, Any]:
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
