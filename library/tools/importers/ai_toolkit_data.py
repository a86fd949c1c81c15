"""The datasets and previews of an ai-toolkit file."""

import re
from typing import Any

from .equivalents import EDIT_FAMILIES, GUIDED_FAMILIES, find_bucket_steps, round_preview_side, set_control_folders
from .imported import KeyReader, to_integer, to_number, to_positive_integer, to_switch, to_text
from .keys import ai_toolkit as keys

PROGRAM = "ai-toolkit"
TRIGGER = re.compile(r"\[(trigger|name)\]")


def read_datasets(process: KeyReader, trigger: str | None) -> None:
    """Each folder becomes a subset of a dataset for each of its resolutions."""
    result = process.result
    default_batch_size = result.general.pop("batch_size", 1)
    datasets: dict[tuple[tuple[str, Any], ...], list[dict[str, Any]]] = {}
    tables = process.read("datasets", [])
    for number, table in enumerate(tables if isinstance(tables, list) else [tables]):
        reader = KeyReader(table, result, f"datasets[{number}].")
        resolutions = reader.read("resolution", 512)
        batch_size = reader.read("batch_size", default_batch_size, to_integer)
        is_bucketed = reader.read("buckets", True, to_switch)
        if reader.read("square_crop", False, to_switch):
            is_bucketed = False
        subset = _read_subset(reader, trigger)
        for resolution in resolutions if isinstance(resolutions, list) else [resolutions]:
            dataset = _describe_buckets(result.family, resolution, batch_size, is_bucketed)
            datasets.setdefault(tuple(dataset.items()), []).append(dict(subset))
        reader.list_unknown(PROGRAM)
    # regularization images alone make no dataset: they go with the images of the same size
    result.datasets = [{**dict(table), "subsets": subsets} for table, subsets in datasets.items()]


def _describe_buckets(family: str, resolution: int, batch_size: int, is_bucketed: bool) -> dict[str, Any]:
    dataset: dict[str, Any] = {"resolution": resolution, "batch_size": batch_size}
    if not is_bucketed:
        return dataset
    steps = find_bucket_steps(family, keys.BUCKET_STEPS.get(family, 32))
    limits = {"min_bucket_reso": min(256, resolution), "max_bucket_reso": max(1024, 2 * resolution)}
    return {**dataset, "enable_bucket": True, "bucket_no_upscale": True, "bucket_reso_steps": steps, **limits}


def _read_subset(reader: KeyReader, trigger: str | None) -> dict[str, Any]:
    result = reader.result
    folder = reader.read("folder_path", reader.read("dataset_path", None, to_text), to_text)
    reader.read("dataset_path")
    subset: dict[str, Any] = {"image_dir": folder or ""}
    extension = reader.read("caption_ext", ".txt", to_text) or ".txt"
    extension = reader.read("caption_type", extension, to_text) or extension
    subset["caption_extension"] = extension if extension.startswith(".") else f".{extension}"
    if default := reader.read("default_caption", None, to_text):
        subset["class_tokens"] = default
    word = reader.read("trigger_word", trigger, to_text)
    is_reg = reader.read("is_reg", False, to_switch)
    if is_reg:
        subset["is_reg"] = True
    elif word:
        subset["caption_prefix"] = word
        reason = "added to every caption, not only where it is missing; [trigger] in captions is not replaced"
        reader.list_change("trigger_word", reason, word)
    if mask := reader.read("mask_path", None, to_text):
        subset["conditioning_data_dir"] = mask
        result.options |= {"masked_loss": True, "masked_loss_normalize": True}
    controls = reader.read("control_path", [])
    controls = [controls] if isinstance(controls, str) else list(controls)
    numbered = [reader.read(f"control_path_{number}", None, to_text) for number in (1, 2, 3)]
    controls = [folder for folder in numbered if folder] or [folder for folder in controls if folder]
    set_control_folders(result, subset, f"{reader.prefix}control_path", controls)
    reader.apply_rules(keys.DATASET_RULES, subset)
    if subset.get("alpha_mask"):
        result.options["masked_loss_normalize"] = True
    if subset.get("shuffle_caption") and subset.get("keep_tokens"):
        reader.list_change("keep_tokens", "the first tags are shuffled, too, there; here they stay")
    for name, option in (
        ("cache_latents", "cache_latents"),
        ("cache_latents_to_disk", "cache_latents_to_disk"),
        ("cache_text_embeddings", "cache_text_encoder_outputs_to_disk"),
    ):
        if reader.read(name, False, to_switch):
            result.options[option] = True
    return subset


def read_sample_prompts(process: KeyReader, trigger: str | None, accumulation: int) -> None:
    """The prompts of previews; they have no effect on training."""
    result, sample, train = process.result, process.read_table("sample"), process.table.get("train") or {}
    texts = sample.read("prompts", [])
    items = sample.read("samples", [{"prompt": text} for text in texts])
    every = sample.read("sample_every", 100, to_positive_integer)
    sample.read("sample_start_step", 0, to_integer)
    defaults = {
        "neg": sample.read("neg", ""),
        "width": sample.read("width", 512, to_integer),
        "height": sample.read("height", 512, to_integer),
        "guidance_scale": sample.read("guidance_scale", 7, to_number),
        "sample_steps": sample.read("sample_steps", 20, to_integer),
    }
    seed, walks = sample.read("seed", 0, to_integer), sample.read("walk_seed", False, to_switch)
    ignored = "sampler network_multiplier guidance_rescale format adapter_conditioning_scale refiner_start_at"
    for name in f"{ignored} extra_values num_frames fps do_cfg_norm".split():
        if sample.read(name) not in (None, 1, 1.0, 0.0, 0.5, [], False, "jpg", 16):
            sample.list_harmless(name, "previews are sampled by the model's own scheduler")
    if defaults["neg"] and result.family in GUIDED_FAMILIES:
        sample.list_harmless("neg", "FLUX has no negative prompts")
    sample.list_unknown(PROGRAM)
    if train.get("disable_sampling") or not every:
        return
    for number, item in enumerate(items):
        values = {**defaults, **{key: value for key, value in item.items() if value is not None}}
        result.prompts.append(_describe_prompt(process, values, item.get("seed", seed + number * walks), trigger))
    if result.prompts:
        result.options["sample_every_n_steps"] = max(1, every // accumulation)
        if not train.get("skip_first_sample"):
            result.options["sample_at_first"] = True


def _describe_prompt(process: KeyReader, values: dict[str, Any], seed: int, trigger: str | None) -> dict[str, Any]:
    family = process.result.family
    name = str((process.table.get("model") or {}).get("name_or_path", "")).lower()
    prompt: dict[str, Any] = {"prompt": TRIGGER.sub(trigger or "", str(values.get("prompt") or "")).strip()}
    if values.get("neg") and family not in GUIDED_FAMILIES:
        prompt["negative_prompt"] = str(values["neg"])
    prompt |= {"width": round_preview_side(values["width"]), "height": round_preview_side(values["height"])}
    prompt |= {"seed": max(0, int(seed)), "sample_steps": int(values["sample_steps"])}
    if family not in GUIDED_FAMILIES:
        prompt["scale"] = float(values["guidance_scale"])
    elif "schnell" not in name:
        prompt["guidance_scale"] = float(values["guidance_scale"])
    names = ("ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3")
    controls = list(dict.fromkeys(str(values[name]) for name in names if values.get(name)))
    if controls and family in EDIT_FAMILIES:
        prompt["control_image_path"] = controls
    return prompt
