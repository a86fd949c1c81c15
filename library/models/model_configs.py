"""Read the JSON configs of models: from folders, the hub, and the bundled ``configs/NAME.json``; no torch.

A bundled config maps the path of each JSON file of a diffusers folder to its content.  NAME is the family, or the
family and a variant: ``sdxl``, ``sdxl_tiny``.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .model_download import PART_END

_CONFIG_DIR = Path(__file__).parent / "configs"
JsonDict = dict[str, Any]
BundledConfig = Mapping[str, JsonDict]
ConfigReader = Callable[[str], JsonDict | None]
"""A function that returns the content of a JSON file of the model, or None if there is no file of that path."""

MAX_TEXT_TOKENS = 512
"""Tokens of text encoders whose config sets no limit."""
CONNECTOR_TOKENS = 1024
"""Tokens to which the text connectors of LTX-2 fill up every caption."""

HUB_TIMEOUT_SECONDS = 5.0
GUIDERS = ("guider", "ocr_guider")
"""Components of a pipeline that guide its previews, and have a config only."""
MODULAR_INDEX, SCHEDULER = "modular_model_index.json", "scheduler/scheduler_config.json"


def list_bundled_configs() -> list[str]:
    """All names, each family's main config before its variants."""
    return [*_read_bundled_names()]


@functools.cache
def _read_bundled_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in _CONFIG_DIR.glob("*.json")))


def has_config_value(config: Mapping[str, Any], key: str, expected: object) -> bool:
    """Whether a config has this value; a key that is missing is false."""
    return bool(config.get(key)) is expected if isinstance(expected, bool) else config.get(key) == expected


def list_family_configs(family: str) -> list[str]:
    """The names of one family, the main config first; those of flux_kontext are none of flux."""
    names = [name for name in list_bundled_configs() if name == family or name.startswith(f"{family}_")]
    return [name for name in names if _read_pipeline_class(name) == _read_pipeline_class(names[0])]


@functools.cache
def _read_pipeline_class(name: str) -> object:
    return load_bundled_config(name)["model_index.json"].get("_class_name")


def load_bundled_config(name: str) -> BundledConfig:
    """Load a bundled config, or one of a user's own family, whose name is its path without ``.json``."""
    data: BundledConfig = json.loads((_CONFIG_DIR / f"{name}.json").read_text(encoding="utf-8"))
    return data


class ModelError(Exception):
    """The error of a model that cannot be used; its text says why."""


def build_folder_reader(directory: Path) -> ConfigReader:
    return _read_either_index(lambda name: _read_json(directory / name))


def build_hub_reader(repo_id: str) -> ConfigReader:
    """Reader of a hub repository; files are downloaded on demand."""
    cache_only = not is_hub_reachable()
    return _read_either_index(lambda name: _read_hub_json(repo_id, name, cache_only))


def _read_either_index(read: ConfigReader) -> ConfigReader:
    """Give the index of a modular pipeline, which has a loading spec for each component, the form of the others.

    It may have no scheduler, which the pipeline makes itself: then it is that of the bundled config.
    """

    def read_index(name: str) -> JsonDict | None:
        data = read(name)
        if data is not None or name not in ("model_index.json", SCHEDULER) or (index := read(MODULAR_INDEX)) is None:
            return data
        same = (each for each in list_bundled_configs() if _read_pipeline_class(each) == index.get("_class_name"))
        bundled: BundledConfig = next(map(load_bundled_config, same), {})
        if name == SCHEDULER:
            return bundled.get(SCHEDULER)
        scheduler = {key: value for key, value in bundled.get(name, {}).items() if key == "scheduler"}
        return scheduler | {key: _drop_loading_spec(value) for key, value in index.items()}

    return read_index


def _drop_loading_spec(value: Any) -> Any:
    if not (isinstance(value, list) and len(value) == 3 and isinstance(value[2], dict)):
        return value
    return value[:2] if value[1] is not None else value[2].get("type_hint")


def build_bundled_reader(config: Mapping[str, JsonDict]) -> ConfigReader:
    return config.get


def is_tokenizer(component: str) -> bool:
    """Whether a component has no weights: a tokenizer, or a processor of texts and images with one."""
    return component.startswith(("tokenizer", "t5_tokenizer", "processor", "text_processor", "siglip_processor"))


def get_config_name(component: str) -> str:
    """Return the JSON file that each folder of a component has."""
    if component == "siglip_processor":  # of images alone
        return "preprocessor_config.json"
    return "tokenizer_config.json" if is_tokenizer(component) else "config.json"


def read_required(read: ConfigReader, name: str) -> JsonDict:
    """Read a JSON file, or raise ``ModelError`` if it is missing."""
    data = read(name)
    if data is None:
        raise ModelError(f"{name} is missing; the model is not complete")
    return data


QUANTIZATION = "quantization_config"
"""What the config of a component that is stored quantized has."""


def list_config_formats(config: JsonDict) -> tuple[str, ...]:
    """The formats in which a component of a folder is stored quantized, by its config."""
    settings = config.get(QUANTIZATION)
    if not isinstance(settings, dict):
        return ()
    if settings.get("load_in_8bit") or (
        settings.get("quant_method") == "torchao" and "int8" in _find_torchao_format(settings)
    ):
        return ("int8",)
    return (str(settings.get("bnb_4bit_quant_type", "fp4")),) if settings.get("load_in_4bit") else ("fp8",)


def _find_torchao_format(settings: JsonDict) -> str:
    """Return the format of torchao's weights, ``int8`` or ``float8``, by the name of its configuration; else empty."""
    name = json.dumps(settings.get("quant_type")).lower().replace("_", "")
    return next((kind for kind in ("int8", "float8") if f"{kind}weight" in name), "")


def reject_unread_quantization(config: JsonDict, component: str) -> None:
    """Raise if a component of a folder is stored quantized in a way that is not read."""
    settings = config.get(QUANTIZATION)
    method = settings.get("quant_method", "bitsandbytes") if isinstance(settings, dict) else None
    if method in (None, "bitsandbytes", "fp8"):
        return
    if method == "torchao" and isinstance(settings, dict):
        if _find_torchao_format(settings):
            return
        raise ModelError(
            f"its {component} is stored by torchao in a format other than int8 and float8, which is not read; use the "
            "repository in bf16, and --quantize_base int8, fp8 or nf4"
        )
    raise ModelError(
        f"its {component} is stored quantized by {method}, which is not read; use the repository in bf16, fp16, or by "
        "bitsandbytes (nf4, int8)"
    )


def read_scheduler_config(read: ConfigReader, num_timesteps: int = 1000) -> JsonDict:
    """Read the scheduler's config, whose schedule has to have this length."""
    config = read_required(read, SCHEDULER)
    if (steps := config.get("num_train_timesteps", 1000)) != num_timesteps:
        raise ModelError(f"its scheduler has num_train_timesteps {steps}; only {num_timesteps} is supported")
    return config


def is_component(value: Any) -> bool:
    """Whether a value of model_index.json is a component, [library, class], and no setting of the pipeline."""
    return isinstance(value, list) and all(item is None or isinstance(item, str) for item in value)


def get_downscale_factor(config: JsonDict) -> int:
    """Downscale factor of a VAE or UNet: what it says, or every block but the last halves the resolution."""
    ratio = config.get("spatial_compression_ratio", config.get("scale_factor_spatial"))
    if isinstance(ratio, int):
        return ratio
    if isinstance(scalings := config.get("spatio_temporal_scaling"), list):  # of LTX-Video's VAE, with patches
        return int(config.get("patch_size", 4) * 2 ** sum(scalings))
    if isinstance(factors := config.get("spatial_downsample_factors"), list):  # of MiniMax H3's VAE
        return math.prod(factors)
    downsamples = config.get("temperal_downsample")  # spelled so in video VAEs
    if isinstance(downsamples, list):
        return int(2 ** len(downsamples))
    blocks = config.get("encoder_block_out_channels", config.get("block_out_channels"))
    if not isinstance(blocks, list) or not blocks:
        raise ModelError("the config.json of its UNet or VAE has no block_out_channels; the file is damaged")
    return int(2 ** (len(blocks) - 1))


def _read_json(path: Path) -> JsonDict | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path.name} is not a JSON object")
    return data


def _read_hub_json(repo_id: str, name: str, cache_only: bool) -> JsonDict | None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, LocalEntryNotFoundError

    try:
        return _read_json(Path(hf_hub_download(repo_id, name, local_files_only=cache_only)))
    except LocalEntryNotFoundError:
        raise ModelError("no such folder, and the hub cannot be reached; check the path or the network") from None
    except EntryNotFoundError:
        return None
    except GatedRepoError:
        raise ModelError(
            f"this model is gated: accept its terms at https://huggingface.co/{repo_id}, then run 'hf auth login'"
        ) from None
    except (OSError, ValueError) as error:  # includes the errors of huggingface_hub
        raise ModelError(f"no such folder, and the hub says: {str(error).strip().splitlines()[0]}") from None


def is_hub_reachable() -> bool:
    """Ask once; hf_hub_download retries each file for half a minute before it looks into its cache."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_SECONDS)
    except Exception:  # of whichever HTTP client huggingface_hub uses
        return False
    return True


def list_cached_models() -> list[tuple[str, int]]:
    """List the diffusers models in the cache of the hub, by id, with the bytes that each has there.

    One whose download was stopped in the middle of a file is not there yet.
    """
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return []
    found = []
    for repo in repos:
        names = {file.file_name for revision in repo.revisions for file in revision.files}
        is_cut = any((repo.repo_path / "blobs").glob(f"*{PART_END}"))
        if repo.repo_type == "model" and {"model_index.json", MODULAR_INDEX} & names and not is_cut:
            found.append((repo.repo_id, repo.size_on_disk))
    return sorted(found)


@dataclass(frozen=True)
class EncodedSizes:
    """Number of elements of cached latents and text embeddings."""

    latent_channels: int
    vae_scale_factor: int
    text_elements: int  # the most elements that one caption's tensors have
    text_width: int  # elements of one token

    def count_moment_elements(self, size: tuple[int, int], num_latent_frames: int = 1) -> int:
        """Elements of the mean and standard deviation of an image of this size in pixels, or of a clip."""
        width, height = (side // self.vae_scale_factor for side in size)
        return 2 * self.latent_channels * width * height * num_latent_frames


def read_encoded_sizes(read: Callable[[str], JsonDict | None]) -> EncodedSizes | None:
    """Compute the sizes from the model's JSON files; None if they lack the values."""
    vae = read("vae/config.json") or {}
    channels = vae.get("latent_channels", vae.get("z_dim"))
    names = ("block_out_channels", "dim_mult", "encoder_block_out_channels")
    blocks = next((vae[name] for name in names if name in vae), None)
    if not isinstance(channels, int) or not isinstance(blocks, list):
        return None
    configs = (read(f"{name}/config.json") for name in ("text_encoder", "text_encoder_2", "text_encoder_3"))
    encoders = [config for config in configs if config is not None]
    layers = (read("transformer/config.json") or {}).get("num_text_layers", 1)
    text = layers * sum(map(_count_token_elements, encoders))
    if len(encoders) > 1:  # only models with several text encoders use pooled embeddings
        text += sum(int(config.get("projection_dim", 0)) for config in encoders)
    if (connectors := read("connectors/config.json")) is not None:  # whose outputs are cached instead
        text = _count_connector_elements(connectors)
    return EncodedSizes(channels, get_downscale_factor(vae), text, max(map(_read_text_width, encoders), default=0))


def _count_connector_elements(config: JsonDict) -> int:
    """Count what the text connectors of LTX-2 make of a caption for pictures and for sound."""
    parts = ("video_connector", "audio_connector")
    widths = (config[f"{part}_num_attention_heads"] * config[f"{part}_attention_head_dim"] for part in parts)
    return CONNECTOR_TOKENS * int(sum(widths))


def _read_text_width(config: JsonDict) -> int:
    text_config = config.get("text_config", config)
    return int(text_config.get("hidden_size", text_config.get("d_model", 0)))


def _count_token_elements(config: JsonDict) -> int:
    tokens = config.get("text_config", config).get("max_position_embeddings")
    return _read_text_width(config) * min(int(tokens or MAX_TEXT_TOKENS), MAX_TEXT_TOKENS)
