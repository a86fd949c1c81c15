"""The dataloader configuration and the previews of SimpleTuner."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...models.detect import get_size_multiple
from .equivalents import GUIDED_FAMILIES, find_bucket_steps, round_preview_side, set_control_folders
from .imported import KeyReader, to_integer, to_number, to_positive_integer, to_switch, to_text
from .keys import simpletuner as keys

PROGRAM = "SimpleTuner"
_SHARED_KEYS = (
    "resolution resolution_type minimum_image_size maximum_image_size target_downsample_size caption_strategy"
    " instance_prompt prepend_instance_prompt only_instance_prompt disable_multiline_split"
).split()
"""Options of the run that are defaults of its datasets."""
NO_CAPTION_FILES = ".none"


def is_backend_list(content: Any) -> bool:
    return (
        isinstance(content, list) and bool(content) and all(isinstance(item, dict) and "id" in item for item in content)
    )


def read_backends(config: KeyReader, backends: Sequence[Any] | None) -> None:
    """Each image dataset becomes a dataset with one subset; caches are listed."""
    result = config.result
    shared = {key: config.read(key) for key in _SHARED_KEYS if key in config}
    dropout = config.read("caption_dropout_probability", 0.1, to_number)
    if dropout:
        result.general["caption_dropout_rate"] = dropout
    if backends is None:
        batch_size = int(config.table.get("train_batch_size", 4))
        reader = KeyReader(shared, result, "")
        result.general |= {"batch_size": batch_size, **_read_sizes(reader)[0], "caption_extension": ".txt"}
        return
    folders = {
        table["id"]: str(table.get("instance_data_dir") or "")
        for table in backends
        if table.get("dataset_type") == "conditioning"
    }
    used = {name for table in backends for name in _list_names(table.get("conditioning_data"))}
    for number, table in enumerate(backends):
        reader = KeyReader({**shared, **table}, result, f"[{number}].")
        kind = reader.read("dataset_type", "image")
        if reader.read("disabled", False, to_switch) or reader.read("disable", False, to_switch):
            continue
        if kind in ("text_embeds", "image_embeds", "conditioning_image_embeds"):
            result.list_harmless(f"[{number}].dataset_type", kind, "caches are next to the images, or in cache_dir")
        elif kind == "image":
            result.datasets.append(_read_backend(reader, folders))
        elif kind == "conditioning" and table["id"] in used:
            continue  # the folder of control images of another dataset
        else:
            result.list_change(f"[{number}].dataset_type", kind, "only images with captions are trained here")


def _list_names(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or ())


def _read_backend(reader: KeyReader, control_folders: Mapping[str, str]) -> dict[str, Any]:
    dataset, cropped = _read_sizes(reader)
    subset: dict[str, Any] = {"image_dir": _read_folder(reader)}
    subset |= _read_captions(reader)
    names = _list_names(reader.read("conditioning_data"))
    controls = [control_folders.get(name, name) for name in names]
    set_control_folders(reader.result, subset, f"{reader.prefix}conditioning_data", controls)
    repeats = reader.read("repeats", 0, to_integer)
    if repeats:
        subset["num_repeats"] = repeats + 1  # 0 is once
    style = reader.read("crop_style", "random")
    if cropped and style != "center":
        reader.list_change("crop_style", "cached latents are of the center here; random_crop needs no cache", style)
    reader.apply_rules(keys.BACKEND_RULES, dataset)
    if "caption_dropout_rate" in dataset:
        subset["caption_dropout_rate"] = dataset.pop("caption_dropout_rate")
    reader.read_keys.update(
        key for key in reader.table if key.startswith(("aws_", "csv_", "huggingface_", "webshart_"))
    )
    reader.list_unknown(PROGRAM)
    return {**dataset, "subsets": [subset]}


def _read_folder(reader: KeyReader) -> str:
    kind = reader.read("type", "local")
    folder = reader.read("instance_data_dir", None, to_text)
    if kind == "local":
        return folder or ""
    if kind == "huggingface":
        name = str(reader.read("dataset_name", (reader.table.get("huggingface") or {}).get("dataset_name", "")))
        reader.list_change(
            "dataset_name", "download it (hf download --repo-type dataset) and set image_dir or parquet", name
        )
        return name
    source = reader.read("aws_bucket_name", reader.read("csv_file", ""))
    reader.list_change("type", "images are read from local folders; download them and set image_dir", kind)
    return str(source or kind)


def _read_sizes(reader: KeyReader) -> tuple[dict[str, Any], bool]:
    """Return resolution and buckets, and whether images are cropped to one shape."""
    family = reader.result.family
    size, unit = reader.read("resolution", 1024, to_number), reader.read("resolution_type", "pixel_area")
    if unit not in ("pixel", "area", "pixel_area"):
        reader.list_change("resolution_type", "not known; read as pixel_area")
    is_cropped = reader.read("crop", False, to_switch)
    aspect = reader.read("crop_aspect", "square") if is_cropped else ""
    side = round(math.sqrt(size * 1e6)) if unit == "area" else int(size)
    step = get_size_multiple(family)
    side = max(64, round(side / step) * step)
    if unit == "pixel" and aspect != "square":
        reader.list_change(
            "resolution_type", "the shorter side there; here the area is that of a square of this side", unit
        )
    limits = {name: reader.read(name, None, to_number) for name in ("maximum_image_size", "target_downsample_size")}
    if is_cropped and None in limits.values():
        result_text = "images are resized before they are cropped here, not there without maximum_image_size"
        reader.list_change("crop", result_text, True)
    if smallest := reader.read("minimum_image_size", None, to_number):
        reader.list_change("minimum_image_size", "smaller images are trained here, enlarged; remove them", smallest)
    buckets = reader.read("crop_aspect_buckets")
    if aspect in ("closest", "random") and buckets:
        reader.list_change(
            "crop_aspect_buckets", "buckets are computed here; python -m library plan lists them", buckets
        )
    if aspect == "random":
        reader.list_change("crop_aspect", "each image has the bucket nearest to its shape here", aspect)
    if aspect == "square":
        return {"resolution": side}, True
    step = find_bucket_steps(family, int(reader.table.get("aspect_bucket_alignment") or 64))
    shape = {"bucket_mode": "symmetric", "bucket_reso_steps": step, "max_bucket_reso": max(1024, 2 * side)}
    return {"resolution": side, "enable_bucket": True, **shape, "min_bucket_reso": min(256, side)}, is_cropped


def _read_captions(reader: KeyReader) -> dict[str, Any]:
    strategy = reader.read("caption_strategy", "filename")
    text = reader.read("instance_prompt", None)
    prompt = text[0] if isinstance(text, list) and text else text
    is_single_line = reader.read("disable_multiline_split", False, to_switch)
    is_prepended = reader.read("prepend_instance_prompt", False, to_switch)
    if isinstance(text, list) and len(text) > 1:
        reader.list_change("instance_prompt", "the first of several is used")
    if strategy == "instanceprompt" or reader.read("only_instance_prompt", False, to_switch):
        return {"class_tokens": str(prompt or ""), "caption_extension": NO_CAPTION_FILES}
    captions: dict[str, Any] = {"caption_extension": ".txt"}
    if strategy == "textfile" and not is_single_line:
        captions["enable_wildcard"] = True  # a random line of each caption file
    elif strategy == "textfile":
        reader.list_change("disable_multiline_split", "the first line of a caption file is the caption here")
    else:
        reason = "captions are read from .txt files; write one for each image, or use metadata_file or parquet"
        reader.list_change("caption_strategy", reason, strategy)
    if is_prepended and prompt:
        captions["caption_prefix"] = str(prompt)
    if shuffle := reader.read("caption_shuffle"):
        if isinstance(shuffle, dict) and shuffle.get("enable"):
            captions["shuffle_caption"] = True
            if shuffle.get("position_start"):
                captions["keep_tokens"] = int(shuffle["position_start"])
            reader.list_change("caption_shuffle", "tags are shuffled anew every time, not among a few orders")
    return captions


def read_previews(config: KeyReader) -> None:
    """One prompt; libraries of prompts are listed."""
    result = config.result
    prompt = config.read("validation_prompt", None, to_text)
    every = config.read("validation_step_interval", 100, to_positive_integer)
    epochs = config.read("validation_epoch_interval", None, to_positive_integer)
    negative = config.read("validation_negative_prompt", "blurry, cropped, ugly")
    scale = config.read("validation_guidance", 7.5, to_number)
    steps = config.read("validation_num_inference_steps", 30, to_integer)
    sides = config.read("validation_resolution", [256.0, 256.0], _to_sides)
    seed = config.read("validation_seed", None, to_integer)
    is_on_startup = config.read("validation_on_startup", False, to_switch)
    if config.read("validation_prompt_library", False, to_switch) or "user_prompt_library" in config:
        config.list_harmless("validation_prompt_library", "write the prompts to a file and set sample_prompts")
    if not prompt or config.read("validation_disable", False, to_switch) or not (every or epochs):
        return
    is_flux = result.family in GUIDED_FAMILIES
    item: dict[str, Any] = {"prompt": prompt}
    if negative and not is_flux:
        item["negative_prompt"] = str(negative)
    item |= {"width": round_preview_side(sides[0]), "height": round_preview_side(sides[1]), "sample_steps": steps}
    if seed is not None:
        item["seed"] = max(0, seed)
    has_guidance = "schnell" not in str(result.options.get("pretrained_model_name_or_path", ""))
    if not is_flux or has_guidance:
        item["guidance_scale" if is_flux else "scale"] = scale
    result.prompts.append(item)
    result.set_option("sample_every_n_steps", None if epochs else every)
    result.set_option("sample_every_n_epochs", epochs)
    if is_on_startup:
        result.options["sample_at_first"] = True


def _to_sides(value: Any) -> list[float]:
    """Read the first of the sizes of previews, in pixels or megapixels: 1024, 1024x768, 0.5."""
    width, _, height = str(value).split(",")[0].lower().partition("x")
    sides = [to_number(width), to_number(height or width)]
    return [side * 1024 if side < 16 else side for side in sides]
