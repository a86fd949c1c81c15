"""The concepts and samples of OneTrainer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .equivalents import GUIDED_FAMILIES, find_bucket_steps, round_preview_side
from .imported import KeyReader, to_integer, to_number, to_switch, to_text
from .keys import onetrainer as keys

PROGRAM = "OneTrainer"
MASK_FILES = ("-masklabel.png", "-condlabel.png")
_SAMPLE_DEFAULTS = {"sd1": (512, 30, 7.5), "sd2": (768, 30, 7.5), "sdxl": (1024, 30, 7.5), "sd3": (1024, 28, 7.0)}
"""Side, steps and scale of a sample; 1024, 25 and 3.5 for the others."""
_SAMPLE_KEYS = set("enabled prompt negative_prompt width height seed diffusion_steps cfg_scale".split())


def is_concept_list(content: Any) -> bool:
    return _is_list_of(content, "path") and any({"image", "text", "balancing"} & set(item) for item in content)


def is_sample_list(content: Any) -> bool:
    return _is_list_of(content, "prompt")


def _is_list_of(content: Any, key: str) -> bool:
    return (
        isinstance(content, list) and bool(content) and all(isinstance(item, dict) and key in item for item in content)
    )


def read_concepts(config: KeyReader, concepts: Sequence[Any] | None) -> None:
    """Each concept becomes a subset; those of one resolution are a dataset."""
    result = config.result
    is_bucketed = config.read("aspect_ratio_bucketing", True, to_switch)
    batch_size = config.read("batch_size", 1, to_integer)
    sizes = _read_resolutions(config)
    datasets: dict[tuple[tuple[str, Any], ...], list[dict[str, Any]]] = {}
    is_caching = bool(config.table.get("latent_caching", True))
    for number, table in enumerate(concepts or []):
        concept = KeyReader(table, result, f"concepts[{number}].")
        if not concept.read("enabled", True, to_switch):
            continue
        subset, override, is_validation = _read_concept(concept, is_caching)
        for size in [override] if override else sizes:
            dataset = _describe_buckets(result.family, size, is_bucketed) | {"batch_size": batch_size}
            if is_validation:
                dataset["validation_split"] = 1.0
            datasets.setdefault(tuple(dataset.items()), []).append(dict(subset))
    result.datasets = [{**dict(table), "subsets": subsets} for table, subsets in datasets.items()]
    if not datasets:
        result.general |= _describe_buckets(result.family, sizes[0], is_bucketed) | {"batch_size": batch_size}
        result.general["caption_extension"] = ".txt"


def _to_sizes(value: Any) -> list[tuple[int, ...]]:
    """Read sizes such as 512 or 512x768, separated by commas."""
    try:
        return [tuple(map(int, part.lower().split("x"))) for part in str(value).split(",") if part.strip()]
    except ValueError:
        raise ValueError("expected sizes such as 512 or 512x768") from None


def _read_resolutions(config: KeyReader) -> list[tuple[int, ...]]:
    """Read the resolutions, of which OneTrainer takes a random one for each image."""
    sizes = config.read("resolution", [], _to_sizes) or [(512,)]
    if len(sizes) > 1:
        reason = "each image at every size here, at a random one there; max_train_epochs is divided by their number"
        config.list_change("resolution", reason)
        epochs = config.read("epochs", 100, to_integer)
        config.result.options["max_train_epochs"] = max(1, round(epochs / len(sizes)))
    return sizes


def _describe_buckets(family: str, size: tuple[int, ...], is_bucketed: bool) -> dict[str, Any]:
    """The keys of a dataset for a size; a size with width and height has no buckets."""
    if len(size) > 1:
        return {"resolution": list(size[:2])}
    side, step = size[0], find_bucket_steps(family, 64)
    if not is_bucketed:
        return {"resolution": side}
    limits = {"min_bucket_reso": max(step, side // 2 // step * step), "max_bucket_reso": 2 * side}
    return {"resolution": side, "enable_bucket": True, "bucket_mode": "symmetric", "bucket_reso_steps": step, **limits}


def _read_concept(concept: KeyReader, is_caching: bool) -> tuple[dict[str, Any], tuple[int, ...], bool]:
    """Return the subset, the concept's own resolution, and whether it is for validation."""
    path = concept.read("path", "", to_text) or ""
    subset: dict[str, Any] = {"image_dir": path, "caption_extension": ".txt"}
    if concept.read("include_subdirectories", False, to_switch):
        subset["recursive"] = True
    if Path(path).is_dir():
        subset |= _exclude_masks(Path(path), subset.get("recursive", False))
    kind = concept.read("type", "STANDARD")
    if kind == "PRIOR_PREDICTION":
        concept.list_change("type", "trained as normal images; is_reg weights them by prior_loss_weight")
    _read_repeats(concept, subset)
    _read_text(concept.read_table("text"), subset)
    override = _read_image(concept.read_table("image"), subset, is_caching)
    for name in ("image_variations", "text_variations"):
        if concept.read(name, 1, to_integer) != 1:
            concept.list_harmless(name, "augmentations and captions are drawn anew in every epoch here")
    concept.apply_rules(keys.CONCEPT_RULES, subset)
    concept.list_unknown(PROGRAM)
    return subset, override, kind == "VALIDATION"


def _exclude_masks(folder: Path, is_recursive: bool) -> dict[str, Any]:
    """Masks lie next to the images there; a pattern that matches nothing would be an error."""
    prefix = "**/*" if is_recursive else "*"
    found = [f"*{suffix}" for suffix in MASK_FILES if next(folder.glob(prefix + suffix), None) is not None]
    return {"exclude": found} if found else {}


def _read_repeats(concept: KeyReader, subset: dict[str, Any]) -> None:
    number = concept.read("balancing", concept.read("repeats", 1.0, to_number), to_number)
    concept.read("repeats")
    strategy = concept.read("balancing_strategy", "REPEATS")
    if strategy == "REPEATS":
        subset["num_repeats"] = max(1, round(number))
        if number != round(number) or number < 1:
            concept.list_change(
                "balancing", f"repeats are whole numbers; {subset['num_repeats']} is set, see weight", number
            )
    else:
        concept.list_change("balancing", "so many samples in an epoch there; set num_repeats or weight", number)


def _read_text(text: KeyReader, subset: dict[str, Any]) -> None:
    source, path = text.read("prompt_source", "sample"), text.read("prompt_path", "", to_text)
    if source == "sample":
        subset["enable_wildcard"] = True  # a random line of each caption file
    elif source == "concept":
        lines = Path(path).read_text("utf-8").split("\n") if path and Path(path).is_file() else []
        lines = [line.strip() for line in lines if line.strip()]
        if len(lines) == 1:
            subset |= {"class_tokens": lines[0], "caption_extension": ".none"}
        else:
            text.list_change("prompt_source", f"captions from one file ({path}); write a caption file for each image")
    else:
        text.list_change("prompt_source", "captions from file names; write a caption file for each image")
    delimiter = (text.read("tag_delimiter", ",") or ",").strip() or ","
    kept = text.read("keep_tags_count", 1, to_integer)
    is_shuffled = text.read("enable_tag_shuffling", False, to_switch)
    is_dropped = text.read("tag_dropout_enable", False, to_switch)
    mode, rate = text.read("tag_dropout_mode", "FULL"), text.read("tag_dropout_probability", 0.0, to_number)
    if is_shuffled:
        subset["shuffle_caption"] = True
    if is_dropped and rate:
        if mode == "RANDOM":
            subset["caption_tag_dropout_rate"] = rate
        elif mode == "FULL" and not kept:
            subset["caption_dropout_rate"] = rate
        else:
            text.list_change("tag_dropout_mode", "only single tags or whole captions are dropped here", mode)
    if (is_shuffled or "caption_tag_dropout_rate" in subset) and kept:
        subset["keep_tokens"] = kept
    if delimiter != "," and (is_shuffled or is_dropped):
        subset["caption_separator"] = delimiter
    text.apply_rules(keys.TEXT_RULES, subset)
    text.list_unknown(PROGRAM)


def _read_image(image: KeyReader, subset: dict[str, Any], is_caching: bool) -> tuple[int, ...]:
    if image.read("enable_crop_jitter", True, to_switch):
        if is_caching:
            reason = "cached latents are of the centre here, of one random crop there; random_crop needs no cache"
            image.list_change("enable_crop_jitter", reason, True)
        else:
            subset["random_crop"] = True
    is_overridden = image.read("enable_resolution_override", False, to_switch)
    override = image.read("resolution_override", [], _to_sizes) or [(512,)]
    image.apply_rules(keys.IMAGE_RULES, subset)
    image.list_unknown(PROGRAM)
    return override[0] if is_overridden else ()


def read_samples(config: KeyReader, samples: Sequence[Any]) -> None:
    """The prompts of previews; they have no effect on training."""
    result = config.result
    side, steps, scale = _SAMPLE_DEFAULTS.get(result.family, (1024, 25, 3.5))
    has_interval = any(name in result.options for name in ("sample_every_n_steps", "sample_every_n_epochs"))
    for number, table in enumerate(samples):
        for key in sorted(set(table) - _SAMPLE_KEYS):
            if table[key] not in (None, False, "", 0):
                result.list_harmless(f"samples[{number}].{key}", table[key], "no equal for previews here")
        if not (table.get("enabled", True) and has_interval):
            continue
        prompt = {
            "prompt": str(table.get("prompt") or ""),
            "width": round_preview_side(table.get("width") or side),
            "height": round_preview_side(table.get("height") or side),
            "seed": max(0, int(table.get("seed") or 42)),
            "sample_steps": int(table.get("diffusion_steps") or steps),
            "guidance_scale" if result.family in GUIDED_FAMILIES else "scale": float(table.get("cfg_scale") or scale),
        }
        if table.get("negative_prompt") and result.family not in GUIDED_FAMILIES:
            prompt["negative_prompt"] = str(table["negative_prompt"])
        result.prompts.append(prompt)
    if not result.prompts:
        for name in ("sample_every_n_steps", "sample_every_n_epochs"):
            if name in result.options:
                result.list_harmless("sample_after", result.options.pop(name), "no samples; write sample_prompts")
