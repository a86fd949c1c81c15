"""Import a configuration of OneTrainer, with its concepts and samples."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...models.families import FAMILY_FACTS
from ...models.trainer_names import choose_family, find_families
from ...problems import Problem
from .equivalents import (
    FULL_LOKR_DIM,
    GUIDED_FAMILIES,
    UNET_FAMILIES,
    describe_unknown_model,
    find_bucket_steps,
    keep_only_layers,
    match_containing,
    round_preview_side,
    set_quantization,
)
from .imported import (
    ImportedConfig,
    KeyReader,
    to_integer,
    to_number,
    to_positive_integer,
    to_positive_number,
    to_switch,
    to_text,
)
from .keys import onetrainer as keys
from .onetrainer_objective import read_objective
from .onetrainer_optimizer import find_lr_factor, read_optimizer
from .source_file import SourceFile, find_companion

PROGRAM = "OneTrainer"


def is_onetrainer(content: Any) -> bool:
    if not isinstance(content, dict) or "LoRA_type" in content:
        return False
    kind = content.get("model_type")
    return "training_method" in content or (isinstance(kind, str) and kind.isupper())


def import_onetrainer(content: dict[str, Any], path: Path, others: Sequence[SourceFile]) -> ImportedConfig:
    """Turn a configuration and its concepts into our options and datasets."""
    result = ImportedConfig(PROGRAM)
    config = KeyReader(upgrade_keys(content), result)
    if text := _describe_other_training(config):
        result.problems.append(Problem("", text))
        return result
    families = find_families("onetrainer", config.read("model_type", "STABLE_DIFFUSION_15"))
    result.family = choose_family(families, str(config.table.get("base_model_name", "")))
    parts = {name: config.read_table(name) for name in keys.PARTS}
    _read_denoiser(config, parts["unet" if result.family in UNET_FAMILIES else "transformer"])
    _read_text_encoders(config, parts)
    read_adapter(config)
    read_optimizer(config)
    read_objective(config)
    _read_precision_and_files(config)
    _read_intervals(config)
    concepts = config.read("concepts")
    if concepts is None:
        found = find_companion(
            config,
            key="concept_file_name",
            main_path=path,
            others=others,
            matches=is_concept_list,
            title="concepts",
            default="training_concepts/concepts.json",
        )
        concepts = None if found is None else found.content
    read_concepts(config, concepts)
    samples = config.read("samples")
    if samples is None:
        found = find_companion(
            config,
            key="sample_definition_file_name",
            main_path=path,
            others=others,
            matches=is_sample_list,
            title="samples",
            default="",
        )
        samples = None if found is None else found.content
    read_samples(config, samples or [])
    config.apply_rules(keys.RUN_RULES)
    config.read_keys.update(keys.OTHER_PARTS)
    for name, part in parts.items():
        _list_part(part, name)
    for reader in (config, *parts.values()):
        reader.list_unknown(PROGRAM)
    return result


def upgrade_keys(content: dict[str, Any]) -> dict[str, Any]:
    """Give the keys of older versions their current names; OneTrainer does the same when it opens a file."""
    renamed = {
        **{
            "save_after": "save_every",
            "save_after_unit": "save_every_unit",
            "enable_async_offloading": "async_offloading",
        },
        **{"lora_layers": "layer_filter", "lora_layer_preset": "layer_filter_preset"},
        "lora_layers_regex": "layer_filter_regex",
    }
    table = {renamed.get(key, key): value for key, value in content.items()}
    for name in ("unet", "transformer"):
        part = dict(table.get(name) or {})
        if "gradient_checkpointing" in table:
            part.setdefault("gradient_checkpointing", table["gradient_checkpointing"] not in ("OFF", False))
        if part:
            table[name] = part
    for key in ("gradient_checkpointing", "enable_activation_offloading", "layer_offload_fraction", "weight_dtype"):
        table.pop(key, None)  # of all components; memory only
    return table


def _describe_other_training(config: KeyReader) -> str:
    """Say what else a configuration is for; empty for LoRA training of a family that we have."""
    kind = config.read("model_type", "STABLE_DIFFUSION_15")
    if not find_families("onetrainer", kind):
        return describe_unknown_model("onetrainer", f'model_type = "{kind}"')
    method = config.read("training_method", "FINE_TUNE")
    if method != "LORA":
        return f'training_method = "{method}": only LORA can be imported'
    adapter = config.table.get("peft_type", "LORA")
    if adapter not in ("LORA", "LOHA", "LOKR"):
        return f'peft_type = "{adapter}": its blocks have one size, here one number; choose LORA, LOHA or LOKR'
    return ""


def _read_denoiser(config: KeyReader, part: KeyReader) -> None:
    result = config.result
    if not part.read("train", True, to_switch):
        result.options["network_train_text_encoder_only"] = True
    rate = part.read("learning_rate", None, to_number)
    if rate is not None:
        result.options["unet_lr"] = rate * find_lr_factor(config)
    dtype = str(part.read("weight_dtype", "FLOAT_32"))
    if dtype not in keys.PLAIN_DTYPES:
        set_quantization(result, f"{part.prefix}weight_dtype", dtype, keys.QUANTIZATIONS)
    if model := part.read("model_name", None, to_text):
        part.list_change(
            "model_name", "give this file as pretrained_model_name_or_path, with its text encoders and VAE", model
        )
    result.set_option("gradient_checkpointing", part.read("gradient_checkpointing", True, to_switch))
    if result.family in GUIDED_FAMILIES:
        result.set_option("guidance_scale", part.read("guidance_scale", 1.0, to_number))
    if part.read("attention_mask", False, to_switch):
        part.list_change("attention_mask", "padding tokens are attended to for this model, as in diffusers' pipeline")
    if part.read("offload_fraction", 0, to_number):
        part.list_harmless("offload_fraction", "memory only; blocks_to_swap keeps blocks in host memory")
    if part.read("activation_offloading", False, to_switch):
        result.options["cpu_offload_checkpointing"] = True
    _read_stop(part, config)
    vae = config.read_table("vae")
    vae.take("vae", "model_name", None, to_text)
    if vae.read("weight_dtype", "FLOAT_32") != "FLOAT_32":
        vae.list_change("weight_dtype", "the VAE runs in float32 here, which is more exact")
    vae.read_keys.update(vae.table)  # it is neither trained nor offloaded


def _read_stop(part: KeyReader, config: KeyReader, default: int = 0) -> None:
    """Training of a part may stop before the end; that of text encoders does, after 30 epochs."""
    after = part.read("stop_training_after", default)
    unit = part.read("stop_training_after_unit", "EPOCH" if default else "NEVER")
    epochs = config.table.get("epochs") or 100
    if unit not in ("NEVER", None) and after and not (unit == "EPOCH" and after >= epochs):
        reason = f"everything is trained to the end, not {after} {unit.lower()}s; train twice with network_weights"
        part.list_change("stop_training_after", reason, after)


def _read_text_encoders(config: KeyReader, parts: dict[str, KeyReader]) -> None:
    result, count = config.result, len(FAMILY_FACTS[config.result.family].lora.text_encoders)
    names = ["text_encoder", "text_encoder_2", "text_encoder_3"]
    trained, rates, dropouts = [], [], []
    for number, name in enumerate(names[: max(count, 1)]):
        part = parts[name]
        is_trained = part.read("train", True, to_switch)
        if number < count:
            trained.append(is_trained)
            rates.append(part.read("learning_rate", None, to_number))
        elif is_trained:
            part.list_change("train", "the text encoder of this model cannot be trained here", is_trained)
        if is_trained:
            _read_stop(part, config, default=30)
        dropouts.append(part.read("dropout_probability", 0.0, to_number))
        if skip := config.read(f"{name}_layer_skip", 0, to_integer):
            if result.family in ("sd1", "sd2"):
                result.options["clip_skip"] = skip + 1
            else:
                config.list_change(f"{name}_layer_skip", "the last layer but one is used, as the model was trained")
    if dropouts and any(dropouts):
        if len(dropouts) > 1:
            reason = "each text encoder drops its caption by itself there; here all of them at once"
            result.list_change("text_encoder.dropout_probability", dropouts, reason)
        result.general["caption_dropout_rate"] = max(dropouts)
    if any(trained):
        _set_trained_encoders(config, trained, rates)
    elif config.table.get("latent_caching", True):
        result.options["cache_text_encoder_outputs_to_disk"] = True
    if result.family == "flux":
        result.set_option("t5xxl_max_token_length", config.read("text_encoder_2_sequence_length", 77, to_integer))
    for name in ("text_encoder_sequence_length", "text_encoder_2_sequence_length"):
        value = config.read(name)
        if value not in (None, 77, 512) and result.family != "flux":
            config.list_change(name, "the length of captions is fixed for this model")


def _set_trained_encoders(config: KeyReader, trained: list[bool], rates: list[float | None]) -> None:
    result, factor = config.result, find_lr_factor(config)
    if not result.options.get("network_train_text_encoder_only"):
        result.options["network_train_unet_only"] = False
    base = config.read("learning_rate", 3e-6, to_number)
    if FAMILY_FACTS[result.family].text.t5_encoder:  # the last one
        if trained[-1]:
            result.add_network_arg("train_t5xxl", True)
        else:
            trained, rates = trained[:-1], rates[:-1]
    if not any(trained):
        return
    values = [
        (base if rate is None else rate) * factor if is_on else 0.0 for is_on, rate in zip(trained, rates, strict=True)
    ]
    if values != [base * factor] * len(values):
        result.options["text_encoder_lr"] = values


def _read_precision_and_files(config: KeyReader) -> None:
    result = config.result
    dtype = config.read("train_dtype", "FLOAT_16")
    result.set_option("mixed_precision", keys.DTYPES.get(str(dtype)))
    if dtype not in keys.DTYPES:
        config.list_change("train_dtype", "not a precision here; set mixed_precision to no, fp16 or bf16")
    if config.read("lora_weight_dtype", "FLOAT_32") == "BFLOAT_16":
        result.options["full_bf16"] = True
    elif config.read("lora_weight_dtype", "FLOAT_32") != "FLOAT_32":
        config.list_change("lora_weight_dtype", "the LoRA is trained in float32 here, or in bf16 with full_bf16")
    result.set_option("save_precision", keys.SAVE_DTYPES.get(str(config.read("output_dtype", "FLOAT_32"))))
    file_format = keys.FILE_FORMATS.get(str(config.read("output_model_format", "SAFETENSORS")))
    if file_format and config.table.get("peft_type", "LORA") == "LORA":
        result.options["save_format"] = file_format
    path = Path(config.read("output_model_destination", "models/model.safetensors", to_text) or "model")
    result.options |= {"output_dir": path.parent.as_posix(), "output_name": path.name.removesuffix(".safetensors")}
    workspace = config.read("workspace_dir", "workspace/run", to_text)
    if config.read("tensorboard", True, to_switch) and workspace:
        result.options["logging_dir"] = f"{workspace}/tensorboard"
    if config.read("latent_caching", True, to_switch):
        result.options["cache_latents_to_disk"] = True
    if config.read("ema", "OFF") not in ("OFF", "GPU", "CPU"):
        config.list_change("ema", "not a device for averages; none are kept")
    elif config.read("ema", "OFF") != "OFF":
        result.options["ema_decay"] = config.read("ema_decay", 0.999, to_number)
        interval = config.read("ema_update_step_interval", 5, to_integer)
        if interval != 1:
            config.list_change("ema_update_step_interval", "the average is updated in every step here", interval)
    config.read_keys.update(("ema_decay", "ema_update_step_interval"))


def _read_intervals(config: KeyReader) -> None:
    """Read the intervals of saving and previews; the steps of OneTrainer are micro-batches."""
    result, accumulation = config.result, config.table.get("gradient_accumulation_steps") or 1
    for key, default, option in (("save_every", 0, "save"), ("sample_after", 10, "sample")):
        number = config.read(key, default, to_positive_integer)
        unit = config.read(f"{key}_unit", "NEVER" if key == "save_every" else "MINUTE")
        prefix = f"{option}_every_n"
        if unit == "EPOCH" and number:
            result.options[f"{prefix}_epochs"] = number
        elif unit == "STEP" and number:
            result.options[f"{prefix}_steps"] = max(1, number // accumulation)
        elif unit not in ("NEVER", "EPOCH", "STEP") and key in config:
            config.list_harmless(key, f"intervals are epochs or steps here; set {prefix}_epochs")


def _list_part(part: KeyReader, name: str) -> None:
    """Settings of components that say nothing about training, or of components that the model does not have."""
    if name in ("unet", "prior", "transformer", "unconditional_transformer"):
        part.read_keys.update(part.table)  # of the other one, unless read above
        return
    model = part.read("model_name", None, to_text)
    if model:
        part.list_change("model_name", "give it as clip_l, clip_g, t5xxl or text_encoder; see docs/models.md", model)
    dtype = part.read("weight_dtype")
    if dtype not in (None, *keys.PLAIN_DTYPES):
        part.list_change("weight_dtype", "text encoders are not quantized here: more exact, more memory")
    part.read_keys.update(part.table)


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
            reason = "cached latents are of the center here, of one random crop there; random_crop needs no cache"
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


FULL_MATRIX_DIM = 9_999_999


def read_adapter(config: KeyReader) -> None:
    """Adapter type, rank, alpha and layers."""
    result, kind = config.result, config.read("peft_type", "LORA")
    modules = {"LORA": "networks.lora", "LOHA": "networks.loha", "LOKR": "networks.lokr"}
    result.set_option("network_module", modules[kind])
    rank, alpha = config.read("lora_rank", 16, to_integer), config.read("lora_alpha", 1.0, to_number)
    if kind == "LOKR":
        rank, alpha = _read_lokr(config, alpha)
    result.options |= {"network_dim": rank, "network_alpha": alpha}
    is_decomposed = config.read("lora_decompose", False, to_switch)
    by_output = config.read("lora_decompose_output_axis", False, to_switch)
    config.read("lora_decompose_norm_epsilon")
    if is_decomposed and kind == "LORA":
        result.add_network_arg("use_dora", True)
        if not by_output:
            config.list_change(
                "lora_decompose_output_axis", "a magnitude for each output feature here, as in peft", by_output
            )
    dropout = config.read("dropout_probability", None, to_positive_number)
    if dropout and kind == "LORA" and not is_decomposed:
        result.set_option("network_dropout", dropout)
    elif dropout:
        config.list_change("dropout_probability", "only plain LoRA has it here; remove it")
    config.read_keys.update(key for key in config.table if key.startswith(("lokr_", "oft_")))
    _read_layers(config, rank, alpha)


def _read_lokr(config: KeyReader, alpha: float) -> tuple[int, float]:
    result, rank = config.result, config.read("lokr_dim", 16, to_integer)
    result.add_network_arg("factor", config.read("lokr_decompose_factor", -1, to_integer))
    if config.read("lokr_decompose_both", False, to_switch):
        result.add_network_arg("decompose_both", True)
    for name in ("lokr_use_tucker", "lokr_weight_decompose"):
        if config.read(name, False, to_switch):
            config.list_change(name, "not supported for LoKr here; remove it")
    if config.read("lokr_full_matrix", False, to_switch):
        rank = FULL_MATRIX_DIM
    return rank, float(rank) if rank >= FULL_LOKR_DIM else alpha


def _read_layers(config: KeyReader, rank: int, alpha: float) -> None:
    """Read which layers of the denoiser are trained: a preset, or texts that their names contain."""
    result, family = config.result, config.result.family
    name = config.read("layer_filter_preset", "full", to_text) or "full"
    text = config.read("layer_filter", "", to_text) or ""
    is_regex = config.read("layer_filter_regex", False, to_switch)
    presets = keys.LAYER_PRESETS["unet" if family in UNET_FAMILIES else family]
    if name in presets:
        contained, difference = presets[name]
        if contained:
            keep_only_layers(result, [match_containing(part) for part in contained])
        if difference:
            config.list_change("layer_filter_preset", difference, name)
    elif text:
        parts = [part.strip() for part in text.split(",") if part.strip()]
        patterns = [rf"(unet|transformer)\..*({part}).*" for part in parts]
        keep_only_layers(result, patterns if is_regex else [match_containing(part) for part in parts])
    elif family in UNET_FAMILIES:
        result.add_network_arg("conv_dim", rank)
        result.add_network_arg("conv_alpha", alpha)
        reason = "conv_in, conv_out and the layers of time and size embeddings get no adapter here"
        config.list_change("layer_filter_preset", reason, name)
