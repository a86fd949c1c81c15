"""Import a training file of diffusion-pipe and the dataset file that it names."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...models.detect import get_size_multiple
from ...models.families import FAMILY_FACTS
from ...models.trainer_names import choose_family, find_families
from ...problems import Problem
from .equivalents import (
    BLOCKS,
    GUIDED_FAMILIES,
    VIDEO_FAMILIES,
    describe_unknown_model,
    drop_layers,
    keep_only_layers,
    match_containing,
    set_control_folders,
    set_optimizer,
    set_quantization,
)
from .imported import (
    ImportedConfig,
    KeyReader,
    to_integer,
    to_number,
    to_positive_integer,
    to_switch,
    to_text,
)
from .keys import diffusion_pipe as keys
from .source_file import SourceFile, find_companion

PROGRAM = "diffusion-pipe"


def is_diffusion_pipe(content: Any) -> bool:
    return isinstance(content, dict) and isinstance(content.get("model"), dict) and "type" in content["model"]


def is_directory_list(content: Any) -> bool:
    """Whether this is a dataset file."""
    return isinstance(content, dict) and isinstance(content.get("directory"), list)


def import_diffusion_pipe(content: dict[str, Any], path: Path, others: Sequence[SourceFile]) -> ImportedConfig:
    """Turn the training file, and its dataset file where it can be found, into our options and datasets."""
    result = ImportedConfig(PROGRAM)
    run = KeyReader(content, result)
    kind = content["model"].get("type")
    families = find_families("diffusion_pipe", kind)
    if not families:
        result.problems.append(Problem("", describe_unknown_model("diffusion_pipe", f'model.type = "{kind}"')))
        return result
    if "adapter" not in run:
        result.problems.append(Problem("", "no [adapter]: full fine-tuning", "only LoRA is trained here"))
        return result
    dataset = find_companion(
        run, key="dataset", main_path=path, others=others, matches=is_directory_list, title="dataset"
    )
    has_controls = dataset is not None and any("control_path" in table for table in dataset.content["directory"])
    result.family = choose_family(families, _list_file_names(content["model"]), has_controls)
    _read_model(run)
    _read_adapter(run)
    batch_sizes = _read_batch_sizes(run)
    _read_optimizer(run, next(iter(batch_sizes.values()), 1))
    _read_length_and_schedule(run)
    _read_loss(run)
    _read_other(run)
    result.set_option("output_name", path.stem)
    if dataset is not None:
        read_directories(dataset.content, result, batch_sizes)
    run.apply_rules(keys.RUN_RULES)
    run.list_unknown(PROGRAM)
    return result


def _list_file_names(model: Mapping[str, Any]) -> str:
    """List the names of the model's files, which alone tell models of one type apart."""
    paths = "diffusers_path", "checkpoint_path", "ckpt_path", "transformer_path", "diffusion_model"
    return " ".join(str(model.get(key, "")) for key in paths)


def _read_model(run: KeyReader) -> None:
    result, model = run.result, run.read_table("model")
    model.read("type")
    _read_paths(model)
    dtype = model.read("dtype", None, to_text)
    result.set_option("mixed_precision", keys.DTYPES.get(str(dtype)))
    for name in ("transformer_dtype", "diffusion_model_dtype"):
        stored = model.read(name, dtype)
        if stored != dtype:
            set_quantization(result, f"model.{name}", stored, keys.QUANTIZATIONS)
    if result.family in GUIDED_FAMILIES:
        model.take("guidance_scale", "guidance", 1.0, to_number)
    if result.family == "sdxl":
        _read_sdxl(model)
    else:
        _read_timesteps(model)
        result.options["cache_text_encoder_outputs_to_disk"] = True
    result.options["cache_latents_to_disk"] = True
    adapters = [str(item) for item in model.read("merge_adapters", [])]
    if adapters:
        result.options["base_weights"] = adapters
    if result.family == "anima" and model.read("llm_adapter_lr", None, to_number) != 0:
        model.list_change("llm_adapter_lr", "the layers between text encoder and transformer get no adapter here")
    model.apply_rules(keys.MODEL_RULES)
    model.list_unknown(PROGRAM)


def _read_paths(model: KeyReader) -> None:
    """The model: a diffusers folder, one file, or a file for each component."""
    options, family = model.result.options, model.result.family
    folder = model.read("diffusers_path", None, to_text)
    folder = model.read("checkpoint_path", folder, to_text)
    if original := model.read("ckpt_path", None, to_text):
        folder = original
        model.list_change("ckpt_path", "a folder of the model's authors there; give the folder or hub id of diffusers")
    denoiser = model.read("transformer_path", None, to_text)
    denoiser = model.read("diffusion_model", denoiser, to_text)
    options["pretrained_model_name_or_path"] = denoiser or folder or ""
    if denoiser and folder:
        flux = {"ae": "vae", "clip_l": "text_encoder", "t5xxl": "text_encoder_2"}
        # The folder beside a file of Chroma is that of FLUX.1.
        chroma = {"ae": "vae", "t5xxl": "text_encoder_2"}
        components = {"flux": flux, "flux_kontext": flux, "chroma": chroma}
        fallback = {"vae": "vae", "text_encoder": "text_encoder"}
        options |= {option: f"{folder.rstrip('/')}/{name}" for option, name in components.get(family, fallback).items()}
    for name, option in (
        ("vae_path", "vae"),
        ("vae", "vae"),
        ("text_encoder_path", "text_encoder"),
        ("llm_path", "text_encoder"),
        ("byt5_path", "byt5"),
        *((("clip_path", "clip_l"),) if family == "hunyuan_video" else ()),
    ):
        model.take(option, name, None, to_text)
    encoders = model.read("text_encoders", [])
    if encoders:
        paths = encoders[0].get("paths") or [encoders[0].get("path", "")]
        options |= dict(zip(("text_encoder", "byt5"), map(str, paths), strict=False))
    if FAMILY_FACTS[family].pipeline.experts is not None:
        _read_expert(model, str(denoiser or ""))


def _read_expert(model: KeyReader, denoiser: str) -> None:
    """Read which of two transformers is trained: there always one, with the noise levels of its range."""
    expert = next((name for name in ("high_noise", "low_noise") if name in denoiser.lower()), None)
    if expert is None:
        model.list_change("transformer_path", "one of two transformers is trained there; set noise_experts", denoiser)
        return
    model.result.set_option("noise_experts", expert)
    for name in ("min_t", "max_t"):
        if (level := model.read(name)) is not None:
            model.result.list_harmless(f"model.{name}", level, "noise_experts sets the noise levels of its transformer")


def _read_sdxl(model: KeyReader) -> None:
    """Read the options of SDXL, whose text encoders diffusion-pipe always trains."""
    result, options = model.result, model.result.options
    if model.read("v_pred", False, to_switch):
        options["v_parameterization"] = True
    model.take("min_snr_gamma", "min_snr_gamma", None, to_number)
    if model.read("debiased_estimation_loss") is not None:
        model.read("debiased_estimation_loss", None, to_switch)
        options["debiased_estimation_loss"] = True  # any value switches it on
    options["network_train_unet_only"] = False
    model.take("unet_lr", "unet_lr", None, to_number)
    rates = [model.read(f"text_encoder_{number}_lr", None, to_number) for number in (1, 2)]
    if rates == [0.0, 0.0]:
        del options["network_train_unet_only"]
    elif rates != [None, None]:
        options["text_encoder_lr"] = rates  # None: that of the optimizer, which is read later
    result.set_option("network_train_unet_only", options.get("network_train_unet_only"))


def _read_timesteps(model: KeyReader) -> None:
    options = model.result.options
    method = model.read("timestep_sample_method", "logit_normal", to_text)
    scale = model.read("sigmoid_scale", 1.0, to_number)
    shift = model.read("shift", None, to_number)
    is_flux_shift = model.read("flux_shift", False, to_switch) or model.read("lumina_shift", False, to_switch)
    if method == "uniform":
        options["timestep_sampling"] = "sigma" if shift else "nextdit_shift" if is_flux_shift else "uniform"
    elif method == "logit_normal":
        options["timestep_sampling"] = "shift" if shift else "flux_shift" if is_flux_shift else "sigmoid"
        model.result.set_option("sigmoid_scale", scale)
    else:
        model.list_change("timestep_sample_method", "no such timesteps here; set timestep_sampling by hand")
    if shift:
        options["discrete_flow_shift"] = shift


def _read_adapter(run: KeyReader) -> None:
    result, adapter = run.result, run.read_table("adapter")
    kind = adapter.read("type")
    if kind not in ("lora", "lokr"):
        adapter.list_change("type", f"not supported; LoRA is trained instead of {kind}")
    result.set_option("network_module", "networks.lokr" if kind == "lokr" else "networks.lora")
    rank = adapter.read("rank", 32, to_integer)
    if "alpha" in adapter:
        adapter.list_change("alpha", "diffusion-pipe refuses it: alpha is always the rank")
    result.options |= {"network_dim": rank, "network_alpha": float(rank)}
    if kind == "lokr":
        result.add_network_arg("factor", adapter.read("decompose_factor", -1, to_integer))
    excluded = adapter.read("exclude_modules")
    if excluded:
        patterns = [excluded] if isinstance(excluded, str) else [rf".*\.?{name}" for name in excluded]
        drop_layers(result, [rf"(unet|transformer)\.(.*\.)?({pattern})" for pattern in patterns])
    elif result.family in BLOCKS:
        keep_only_layers(result, [match_containing(name) for name in BLOCKS[result.family]])
    model = run.table.get("model") or {}
    dtype = adapter.read("dtype", model.get("dtype"))
    if dtype != "float32":
        reason = "the LoRA is trained in float32 here, which is more exact; full_bf16 = true trains it in bf16"
        adapter.list_change("dtype", reason, dtype)
    if weights := adapter.read("init_from_existing", None, to_text):
        files = sorted(Path(weights).glob("*.safetensors")) if Path(weights).is_dir() else []
        result.options["network_weights"] = str(files[0]) if files else weights
    fused = adapter.read("fuse_adapters", [])
    if fused:
        result.options["base_weights"] = [str(item.get("path", "")) for item in fused]
        result.options["base_weights_multiplier"] = [float(item.get("weight", 1.0)) for item in fused]
    adapter.apply_rules(keys.ADAPTER_RULES)
    adapter.list_unknown(PROGRAM)


def _read_batch_sizes(run: KeyReader) -> dict[Any, int]:
    """Batch size by resolution; the key None stands for the others."""
    sizes = run.read("image_micro_batch_size_per_gpu", run.read("micro_batch_size_per_gpu", 1))
    run.read("micro_batch_size_per_gpu")
    if isinstance(sizes, list):
        return {resolution: int(size) for resolution, size in sizes}
    return {None: int(sizes)}


def _read_optimizer(run: KeyReader, batch_size: int) -> None:
    result, optimizer = run.result, run.read_table("optimizer")
    name = str(optimizer.read("type", "adamw"))
    result.options["learning_rate"] = optimizer.read("lr", 1e-3, to_number)
    given = {key: value for key, value in optimizer.table.items() if key not in keys.OWN_ARGUMENTS}
    if half_life := optimizer.read("beta2_half_life", None, to_number):
        global_batch = batch_size * int(run.table.get("gradient_accumulation_steps", 1))
        beta2 = 0.5 ** (global_batch / half_life)
        given["betas"] = [*list(given.get("betas", (0.9,)))[:1], beta2]
        optimizer.list_change("beta2_half_life", f"beta2 = {beta2:g} is set, for one GPU; adapt it for more")
    if optimizer.read("gradient_release", False, to_switch):
        optimizer.list_change("gradient_release", "the optimizer steps after each micro-batch there; here after all")
    known = dict(keys.OPTIMIZERS)
    if name.lower() not in known:
        known[name.lower()] = type(known["adamw"])(name if name in ("Prodigy", "Lion") else f"pytorch_optimizer.{name}")
    set_optimizer(result, "optimizer.type", name, known, given)
    optimizer.read_keys.update(optimizer.table)
    rates = result.options.get("text_encoder_lr")
    if rates:
        result.options["text_encoder_lr"] = [
            result.options["learning_rate"] if rate is None else rate for rate in rates
        ]


def _read_length_and_schedule(run: KeyReader) -> None:
    result = run.result
    epochs, steps = run.read("epochs", None, to_integer), run.read("max_steps", None, to_positive_integer)
    if steps:
        result.options["max_train_steps"] = steps
        run.list_change(
            "epochs", "training ends after max_steps or after these, whichever is first; max_train_steps is set"
        )
    else:
        result.options["max_train_epochs"] = max(1, epochs or 1)
    warmup = run.read("warmup_steps", 0, to_integer)
    scheduler = run.read("lr_scheduler", "constant", to_text)
    constant = run.read("force_constant_lr", None, to_number)
    if constant is not None:
        result.options |= {"learning_rate": constant, "lr_scheduler": "constant"}
        return
    if scheduler == "constant":
        result.options["lr_scheduler"] = "constant_with_warmup" if warmup else "constant"
    elif scheduler == "linear":
        result.options["lr_scheduler"] = "linear"
        if warmup or steps:
            run.list_change("lr_scheduler", "reaches 0 at the end of the run here, there after epochs and warmup_steps")
    elif scheduler == "cosine":
        rate = result.options["learning_rate"]
        result.options["lr_scheduler"] = "cosine_with_min_lr"
        result.options["lr_scheduler_min_lr_ratio"] = min(1.0, 1e-6 / rate) if rate else 0.0
        if warmup or steps:
            run.list_change(
                "lr_scheduler", "reaches 1e-6 at the end of the run here, there after epochs and warmup_steps"
            )
    else:
        run.list_change("lr_scheduler", "no such schedule; constant is used")
    result.set_option("lr_warmup_steps", warmup or None)


def _read_loss(run: KeyReader) -> None:
    result = run.result
    for name, loss in (("smooth_l1_beta", "smooth_l1"), ("huber_delta", "huber")):
        threshold = run.read(name, None, to_number)
        if threshold and result.family != "sdxl":
            result.options |= {"loss_type": loss, "huber_schedule": "constant", "huber_c": threshold}
            run.list_change(name, f"torch's {loss}; here the smooth one of sd-scripts, about twice as large")
        elif threshold:
            run.list_harmless(name, "diffusion-pipe does not use it for SDXL, either")


def _read_other(run: KeyReader) -> None:
    result = run.result
    result.set_option("max_grad_norm", run.read("gradient_clipping", 1.0, to_number))
    checkpointing = run.read("activation_checkpointing", False)
    if checkpointing:
        result.options["gradient_checkpointing"] = True
    if checkpointing == "unsloth":
        result.options["cpu_offload_checkpointing"] = True
    save_dtype = run.read("save_dtype", (run.table.get("adapter") or {}).get("dtype"))
    result.set_option("save_precision", keys.SAVE_DTYPES.get(str(save_dtype)))
    monitoring = run.read_table("monitoring")
    if monitoring.read("enable_wandb", False, to_switch):
        result.set_option("log_with", "wandb")
        result.set_option("log_tracker_name", monitoring.read("wandb_tracker_name", None, to_text))
        result.set_option("wandb_run_name", monitoring.read("wandb_run_name", None, to_text))
    if monitoring.read("wandb_api_key"):
        result.list_harmless("monitoring.wandb_api_key", "***", "keys are not stored in files; run wandb login")
    monitoring.read_keys.update(("wandb_tracker_name", "wandb_run_name"))
    monitoring.list_unknown(PROGRAM)


def read_directories(content: dict[str, Any], result: ImportedConfig, batch_sizes: Mapping[Any, int]) -> None:
    """Each directory becomes a subset of a dataset for each of its resolutions."""
    top = KeyReader(content, result, "dataset.")
    shared = {key: top.read(key) for key in keys.DIRECTORY_KEYS if key in top}
    datasets: dict[tuple[tuple[str, Any], ...], list[dict[str, Any]]] = {}
    for number, table in enumerate(top.read("directory", [])):
        reader = KeyReader({**shared, **table}, result, f"directory[{number}].")
        resolutions, buckets = _read_sizes(reader)
        subset, has_masks = _read_subset(reader)
        for resolution in resolutions:
            size = resolution if isinstance(resolution, int) else round(math.sqrt(resolution[0] * resolution[1]))
            batch_size = batch_sizes.get(resolution if isinstance(resolution, int) else size)
            if batch_size is None:
                batch_size = next(iter(batch_sizes.values()), 1)
            dataset = {
                "resolution": round_size(size, result.family),
                "batch_size": batch_size,
                **_describe_buckets(buckets, size, result.family),
            }
            datasets.setdefault((*dataset.items(), ("has_masks", has_masks)), []).append(dict(subset))
        reader.list_unknown(PROGRAM)
    result.datasets = [
        {**{key: value for key, value in table if key != "has_masks"}, "subsets": subsets}
        for table, subsets in datasets.items()
    ]
    top.apply_rules(keys.DATASET_RULES)
    top.list_unknown(PROGRAM)


def round_size(size: int, family: str) -> int:
    step = get_size_multiple(family)
    return max(step, round(size / step) * step)


def _read_sizes(reader: KeyReader) -> tuple[list[Any], tuple[float, float] | None]:
    """Resolutions, and the range of aspect ratios with buckets."""
    resolutions = reader.read("resolutions", [])
    if "size_buckets" in reader:
        sizes = reader.read("size_buckets")
        reader.list_change("size_buckets", "buckets are computed from a resolution here; use crops of these sizes")
        resolutions = resolutions or [[size[0], size[1]] for size in sizes[:1]]
    is_bucketed = reader.read("enable_ar_bucket", False, to_switch)
    ratios = (reader.read("min_ar", 0.5, to_number), reader.read("max_ar", 2.0, to_number))
    count = reader.read("num_ar_buckets", 7, to_integer)
    given = reader.read("ar_buckets")
    if is_bucketed and given:
        values = [item if isinstance(item, (int, float)) else item[0] / item[1] for item in given]
        ratios = (min(values), max(values))
        reader.list_change("ar_buckets", "buckets are computed here, with sides between those of these aspect ratios")
    elif is_bucketed:
        reason = "buckets are every few pixels here, nearest by log aspect ratio; python -m library plan lists them"
        reader.list_change("num_ar_buckets", reason, count)
    return resolutions, ratios if is_bucketed else None


def _describe_buckets(ratios: tuple[float, float] | None, size: int, family: str) -> dict[str, Any]:
    """Symmetric buckets whose sides have aspect ratios in the range; none train squares."""
    if ratios is None:
        return {}
    step = get_size_multiple(family)
    widest = max(ratios[1], 1 / ratios[0])
    longest = math.ceil(size * math.sqrt(widest) / step) * step
    shortest = math.floor(size / math.sqrt(widest) / step) * step
    return {
        "enable_bucket": True,
        "bucket_mode": "symmetric",
        "bucket_reso_steps": step,
        "min_bucket_reso": max(step, shortest),
        "max_bucket_reso": longest,
    }


def _read_subset(reader: KeyReader) -> tuple[dict[str, Any], bool]:
    subset: dict[str, Any] = {"image_dir": reader.read("path", "", to_text) or "", "caption_extension": ".txt"}
    if prefix := reader.read("caption_prefix", None, to_text):
        subset["caption_prefix"] = prefix
    count = reader.read("cache_shuffle_num", 0, to_integer)
    delimiter = reader.read("cache_shuffle_delimiter", ", ")
    if count or reader.read("shuffle_tags", False, to_switch):
        subset["shuffle_caption"] = True
        if (delimiter.strip() or delimiter) != ",":
            subset["caption_separator"] = delimiter.strip() or delimiter
        if count:
            reader.list_change("cache_shuffle_num", "tags are shuffled anew every time, not among a few orders")
    reader.read("shuffle_tags")
    masks = reader.read("mask_path", None, to_text)
    if masks:
        subset["conditioning_data_dir"] = masks
        reader.result.options["masked_loss"] = True
    controls = reader.read("control_path", None, to_text)
    set_control_folders(reader.result, subset, f"{reader.prefix}control_path", [controls] if controls else [])
    _read_frames(reader, subset)
    reader.apply_rules(keys.DIRECTORY_RULES, subset)
    return subset, masks is not None


def _read_frames(reader: KeyReader, subset: dict[str, Any]) -> None:
    """Turn a directory of a model of videos with frame buckets above 1 into a folder of clips."""
    frames = reader.read("frame_buckets", [1])
    lengths = sorted(length for length in frames if length > 1)
    if reader.result.family not in VIDEO_FAMILIES:
        if lengths:
            reader.list_harmless("frame_buckets", "the model makes images, which are a bucket of their own there")
        return
    if not lengths:
        return
    subset["video_dir"], subset["target_frames"] = subset.pop("image_dir"), lengths
    if len(lengths) < len(frames):
        reader.list_change("frame_buckets", "clips only; for images in the folder add a subset with image_dir")
    elif len(lengths) > 1:
        reader.list_change("frame_buckets", "a clip gives a window of each length here, there one of the longest")
