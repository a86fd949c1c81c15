"""Import a job file of ai-toolkit, written by hand or by its user interface."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...models.families import FAMILY_FACTS
from ...models.trainer_names import find_families
from ...problems import Problem
from .equivalents import (
    BLOCKS,
    EDIT_FAMILIES,
    FLOW_FAMILIES,
    GUIDED_FAMILIES,
    UNET_FAMILIES,
    VIDEO_FAMILIES,
    describe_unknown_model,
    drop_layers,
    find_bucket_steps,
    format_argument,
    has_text_encoder_option,
    keep_only_layers,
    match_containing,
    round_preview_side,
    set_control_folders,
    set_optimizer,
    set_quantization,
)
from .imported import (
    ImportedConfig,
    KeyReader,
    is_among,
    to_integer,
    to_number,
    to_positive_integer,
    to_positive_number,
    to_switch,
    to_text,
)
from .keys import ai_toolkit as keys

PROGRAM = "ai-toolkit"
FULL_RANK = 9_999_999_999
"""ai-toolkit's rank of a LoKr whose factors are not decomposed."""


def is_ai_toolkit(content: Any) -> bool:
    config = content.get("config") if isinstance(content, dict) else None
    return isinstance(config, dict) and isinstance(config.get("process"), list)


_NEUTRAL_SAMPLE_SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "sampler": ("flowmatch", "ddpm"),
    "guidance_rescale": (0, 0.0),
    "format": ("jpg", "png", "webp"),
    "adapter_conditioning_scale": (1, 1.0),
    "refiner_start_at": (0.5,),
    "extra_values": ([],),
    "do_cfg_norm": (False,),
}
"""Settings of samples that are not taken over, with the values that have no effect there either."""


def import_ai_toolkit(content: dict[str, Any], path: Path) -> ImportedConfig:
    """Turn the first process of a job into our options and datasets."""
    result = ImportedConfig(PROGRAM)
    job = KeyReader(content, result)
    job.read("job")
    if job.read("meta"):
        job.list_harmless("meta", "metadata is set with metadata_title and others")
    config = job.read_table("config")
    processes, name = config.read("process"), str(config.read("name", path.stem))
    for number, process in enumerate(processes[1:], 1):
        config.result.list_change(f"config.process[{number}]", process, "one process at a time; import it on its own")
    process = KeyReader(processes[0] if processes else {}, result, "")
    if text := _describe_other_training(process):
        result.problems.append(Problem("", text))
        return result
    _read_model(process)
    _read_network(process)
    accumulation = _read_training(process)
    _read_objective(process)
    _read_saving(process, name, accumulation)
    trigger = process.read("trigger_word", None, to_text)
    read_datasets(process, trigger)
    read_sample_prompts(process, trigger, accumulation)
    process.apply_rules(keys.PROCESS_RULES)
    for reader in (job, config, process):
        reader.list_unknown(PROGRAM)
    return result


def _describe_other_training(process: KeyReader) -> str:
    """Say what else a job is for; empty for LoRA training of a family that we have."""
    kind = process.read("type")
    if kind not in keys.PROCESS_TYPES:
        return f'process type = "{kind}": only LoRA training ({", ".join(keys.PROCESS_TYPES)}) can be imported'
    model = process.table.get("model") or {}
    switches = [name for name in (*keys.OTHER_SWITCHES, *keys.MODEL_SWITCHES) if model.get(name)]
    name = str(model.get("arch") or "").split(":")[0] or next(iter(switches), "sd1")
    families = find_families("ai_toolkit", name)
    if not families:
        return describe_unknown_model("ai_toolkit", f"model {name}")
    if not process.table.get("network"):
        return "no network: full fine-tuning; only LoRA is trained here"
    process.result.family = families[0]
    return ""


def _read_model(process: KeyReader) -> None:
    result, model = process.result, process.read_table("model")
    for name in ("arch", *keys.MODEL_SWITCHES, *keys.OTHER_SWITCHES):
        model.read(name)
    path = model.take("pretrained_model_name_or_path", "name_or_path", None, to_text)
    if model.read("extras_name_or_path", path) != path:
        model.list_change(
            "extras_name_or_path", "give the VAE and the text encoder by their options; see docs/models.md"
        )
    if text_encoder := model.read("te_name_or_path", None, to_text):
        if has_text_encoder_option(result.family):
            result.set_option("text_encoder", text_encoder)
        else:
            model.list_change("te_name_or_path", "use clip_l, clip_g or t5xxl; see docs/models.md")
    if model.read("is_v_pred", False, to_switch):
        result.options["v_parameterization"] = True
    qtype, is_quantized = model.read("qtype", "qfloat8", to_text), model.read("quantize", False, to_switch)
    if is_quantized:
        set_quantization(result, "model.qtype", qtype, keys.QUANTIZATIONS)
    if adapter := model.read("assistant_lora_path", None, to_text):
        if Path(adapter).is_file():
            result.options["training_adapter"] = adapter
        else:
            reason = "download the file and set training_adapter"
            model.list_change("assistant_lora_path", reason)
    if model.read("compile", False, to_switch) or model.read("block_compile", False, to_switch):
        result.options["torch_compile"] = True
        mode = model.read("compile_mode", "default", to_text)
        result.set_option("dynamo_mode", mode)
        result.set_option("dynamo_fullgraph", model.read("compile_fullgraph", False, to_switch))
        dynamic = model.read("compile_dynamic", True)
        result.set_option("compile_dynamic", "auto" if dynamic is None else str(bool(dynamic)).lower())
    for name in ("compile_mode", "compile_fullgraph", "compile_dynamic", "block_compile"):
        model.read(name)
    _read_experts(model)
    model.apply_rules(keys.MODEL_RULES)
    model.list_unknown(PROGRAM)


def _read_experts(model: KeyReader) -> None:
    """Read which of two transformers are trained; other models have arguments that are listed."""
    arguments, result = model.read_table("model_kwargs"), model.result
    if FAMILY_FACTS[result.family].pipeline.experts is not None:
        trained = [name for name in ("high_noise", "low_noise") if arguments.read(f"train_{name}", True, to_switch)]
        result.set_option("noise_experts", trained[0] if len(trained) == 1 else "both")
    arguments.list_unknown(PROGRAM)


def _read_network(process: KeyReader) -> None:
    result, network = process.result, process.read_table("network")
    kind = str(network.read("type", "lora")).lower()
    modules = {"lora": "networks.lora", "dora": "networks.lora", "locon": "networks.lora", "lokr": "networks.lokr"}
    if kind not in modules:
        network.list_change("type", f"not supported; LoRA is trained instead of {kind}")
    result.set_option("network_module", modules.get(kind, "networks.lora"))
    if kind == "dora":
        result.add_network_arg("use_dora", True)
    linear = network.read("linear", 4, to_integer)
    rank = network.read("rank", linear, to_integer)
    alpha = network.read("alpha", 1.0, to_number)
    alpha = network.read("linear_alpha", alpha, to_number)
    is_full = network.read("lokr_full_rank", True, to_switch)
    factor = network.read("lokr_factor", -1, to_integer)
    if kind == "lokr":
        result.add_network_arg("factor", factor)
        if is_full:
            rank = alpha = FULL_RANK
    if result.family in FLOW_FAMILIES and kind != "lokr" and alpha != rank:
        reason = f"ai-toolkit trains transformers with alpha equal to the rank; {rank} is set"
        result.list_harmless("network.linear_alpha", alpha, reason)
    if result.family in FLOW_FAMILIES:
        alpha = rank
    result.options |= {"network_dim": rank, "network_alpha": float(alpha)}
    _read_convolutions(network, kind)
    dropout = network.read("dropout", None, to_positive_number)
    if dropout and kind == "lora":
        result.set_option("network_dropout", dropout)
    elif dropout:
        network.list_change("dropout", f"only LoRA has it here, not {kind}; remove it")
    _read_layer_choice(network, kind)
    network.apply_rules(keys.NETWORK_RULES)
    network.list_unknown(PROGRAM)


def _read_convolutions(network: KeyReader, kind: str) -> None:
    conv = network.read("conv", None, to_positive_integer)
    alpha = network.read("conv_alpha", conv, to_number)
    if conv and network.result.family in UNET_FAMILIES:
        network.result.add_network_arg("conv_dim", FULL_RANK if kind == "lokr" else conv)
        network.result.add_network_arg("conv_alpha", FULL_RANK if kind == "lokr" else alpha)
    elif conv:
        network.result.list_harmless("network.conv", conv, "the model has no convolutions")


def _read_layer_choice(network: KeyReader, kind: str) -> None:
    result = network.result
    if not network.read("transformer_only", True, to_switch) and result.family in FLOW_FAMILIES:
        network.list_change("transformer_only", "layers outside of the blocks get no adapter; see in_dims, emb_dims")
    arguments = network.read_table("network_kwargs")
    only, ignored = (_read_names(arguments, name) for name in ("only_if_contains", "ignore_if_contains"))
    if (only or ignored) and result.family in keys.ORIGINAL_NAMES:
        reason = "the layers have other names here, those of diffusers; write include_patterns or exclude_patterns"
        arguments.list_change("only_if_contains" if only else "ignore_if_contains", reason)
        only, ignored = [], []
    if not only and not ignored and result.family in BLOCKS:
        only = list(BLOCKS[result.family])
    if not only and result.family in keys.MORE_LAYERS:
        reason = f"{keys.MORE_LAYERS[result.family]} are trained, too, there; they get no adapter here"
        result.list_change("network", kind, reason, is_default=True)
    if only and ignored:
        arguments.list_change(
            "ignore_if_contains", "cannot be combined with only_if_contains; add exclude_patterns by hand"
        )
    if only:
        keep_only_layers(result, [match_containing(_strip_prefix(name)) for name in only])
    elif ignored:
        drop_layers(result, [match_containing(_strip_prefix(name)) for name in ignored])
    for name in ("rank_dropout", "module_dropout"):
        rate = arguments.read(name, None, to_positive_number)
        if rate and kind == "lora":
            result.add_network_arg(name, rate)
        elif rate:
            arguments.list_change(name, f"only LoRA has it here, not {kind}; remove it")
    arguments.list_unknown(PROGRAM)


def _read_names(reader: KeyReader, key: str) -> list[str]:
    names = reader.read(key, [])
    return [str(name).replace("$$", ".") for name in ([names] if isinstance(names, str) else names)]


def _strip_prefix(name: str) -> str:
    return name.removeprefix("transformer.").removeprefix("unet.")


def _read_training(process: KeyReader) -> int:
    """Return the micro-batches that ai-toolkit counts as steps."""
    result, train = process.result, process.read_table("train")
    steps = train.read("steps", 1000, to_integer)
    legacy: int = train.read("gradient_accumulation_steps", 1, to_integer)
    accumulation = train.read("gradient_accumulation", 1, to_integer)
    if legacy > 1:
        accumulation = legacy
        steps = max(1, steps // legacy)
        reason = f"its steps are micro-batches, so {steps} optimizer steps are set"
        result.list_harmless("train.gradient_accumulation_steps", legacy, reason)
    result.options["max_train_steps"] = steps
    result.set_option("gradient_accumulation_steps", accumulation)
    result.general["batch_size"] = train.read("batch_size", 1, to_integer)
    _read_optimizer(train, steps)
    precision = keys.PRECISIONS.get(str(train.read("dtype", "fp32")))
    if precision is None:
        train.list_change("dtype", "not a precision here; set mixed_precision to no, fp16 or bf16")
    result.set_option("mixed_precision", precision)
    is_denoiser, is_text = (
        train.read(name, default, to_switch) for name, default in (("train_unet", True), ("train_text_encoder", False))
    )
    if not (is_denoiser or is_text):
        train.list_change("train_unet", "nothing would be trained; the model is trained here")
    if is_text:
        option = ("network_train_unet_only", False) if is_denoiser else ("network_train_text_encoder_only", True)
        result.options |= dict([option])
        text_lr = train.read("text_encoder_lr", None, to_number)
        if text_lr is not None:
            result.options["text_encoder_lr"] = [text_lr]
    train.read("text_encoder_lr")
    ema = train.read_table("ema_config")
    decay, is_on = ema.read("ema_decay", 0.999, to_number), ema.read("use_ema", False, to_switch)
    result.set_option("ema_decay", decay if is_on else None)
    for name, neutral in (("use_feedback", False), ("param_multiplier", 1)):
        if is_on and ema.read(name, neutral) != neutral:
            ema.list_change(name, "no equal here; remove it")
    if train.read("cache_text_embeddings", False, to_switch):
        result.options["cache_text_encoder_outputs_to_disk"] = True
    result.set_option("seed", process.read("training_seed", None, to_integer))
    return max(1, legacy)


def _read_optimizer(train: KeyReader, steps: int) -> None:
    result = train.result
    name = str(train.read("optimizer", "adamw"))
    lr = train.read("lr", 1e-6, to_number)
    if name.lower().startswith(keys.LR_FREE_OPTIMIZERS) and lr < 0.1:
        result.list_harmless("train.lr", lr, f"{name} uses 1 for rates below 0.1")
        lr = 1.0
    result.options["learning_rate"] = lr
    unet_lr = train.read("unet_lr", lr, to_number)
    result.set_option("unet_lr", unet_lr if unet_lr != lr else None)
    set_optimizer(result, "train.optimizer", name, keys.OPTIMIZERS, train.read("optimizer_params", {}) or {})
    scheduler = str(train.read("lr_scheduler", "constant"))
    given = dict(train.read("lr_scheduler_params", {}) or {})
    total = given.pop("total_iters", steps)
    torch_classes = {
        "linear": ("LinearLR", {"total_iters": total}),
        "step": ("StepLR", {}),
        "cosine_with_restarts": ("CosineAnnealingWarmRestarts", {"T_0": total}),
        "cosine": ("CosineAnnealingLR", {"T_max": total}),
    }
    if scheduler == "constant" and not given:
        result.set_option("lr_scheduler", "constant")
    elif scheduler == "cosine" and not given and total == steps:
        result.set_option("lr_scheduler", "cosine")
    elif scheduler == "constant_with_warmup":
        result.set_option("lr_scheduler", "constant_with_warmup")
        result.set_option("lr_warmup_steps", given.get("num_warmup_steps", 1000))
    elif scheduler in torch_classes:
        class_name, arguments = torch_classes[scheduler]
        words = [f"{key}={format_argument(value)}" for key, value in {**arguments, **given}.items()]
        result.options |= {"lr_scheduler_type": class_name, "lr_scheduler_args": words}
    else:
        train.list_change("lr_scheduler", "no such schedule here; constant is used, set lr_scheduler by hand")


def _read_objective(process: KeyReader) -> None:
    result, train = process.result, process.read_table("train")
    is_flow = result.family in FLOW_FAMILIES
    noise_scheduler = train.read("noise_scheduler", "ddpm")
    expected = "flowmatch" if is_flow else "ddpm"
    if noise_scheduler != expected:
        reason = f"{expected} is used, as the model was trained; other timesteps and noise levels there"
        train.list_change("noise_scheduler", reason, noise_scheduler)
    timesteps = train.read("timestep_type", "sigmoid")
    if is_flow:
        sampling, difference = keys.TIMESTEP_SAMPLINGS.get(
            timesteps, ("sigmoid", "no such timesteps here; sigmoid is used, set timestep_sampling by hand")
        )
        if train.table.get("linear_timesteps") or train.table.get("linear_timesteps2"):
            sampling = "uniform"
        result.options["timestep_sampling"] = sampling
        if sampling == "sigma":
            result.options |= keys.SCHEDULER_SHIFTS.get(result.family, {})
        if difference:
            train.list_change("timestep_type", difference)
    elif "timestep_type" in train:
        train.list_harmless("timestep_type", f"for flow matching; {result.family} has uniform timesteps")
    for name in ("min_snr_gamma", "noise_offset"):
        value = train.read(name, None, to_positive_number)
        if value and is_flow:
            train.list_change(name, "not for flow-matching models here; remove it")
        elif value and result.options.get("v_parameterization") and name == "min_snr_gamma":
            train.list_change(name, "its weights are those of noise prediction; the ones of v-prediction are used here")
            result.set_option(name, value)
        else:
            result.set_option(name, value)
    loss = train.read("loss_type", "mse")
    if loss == "pseudo_huber":
        result.options |= {"loss_type": "smooth_l1", "huber_schedule": "constant", "huber_c": 0.01}
        train.list_change("loss_type", "smooth_l1 is twice its loss; with Adam only gradient clipping differs")
    elif loss in ("mse", "mae"):
        result.set_option("loss_type", {"mse": "l2", "mae": "l1"}[loss])
    else:
        train.list_change("loss_type", "no such loss here; l2 is used, set loss_type by hand")
    if result.family in GUIDED_FAMILIES and train.read("bypass_guidance_embedding", False, to_switch):
        train.list_change("bypass_guidance_embedding", "the guidance embedding is used, with guidance_scale 1")
    done = (
        "steps gradient_accumulation_steps gradient_accumulation batch_size lr unet_lr text_encoder_lr optimizer"
        " optimizer_params lr_scheduler lr_scheduler_params dtype train_unet train_text_encoder ema_config"
        " cache_text_embeddings skip_first_sample disable_sampling bypass_guidance_embedding next_sample_timesteps"
    )
    train.read_keys.update(done.split())
    train.apply_rules(keys.TRAIN_RULES)
    train.list_unknown(PROGRAM)


def _read_saving(process: KeyReader, name: str, accumulation: int) -> None:
    result, save = process.result, process.read_table("save")
    folder = process.read("training_folder", "output", to_text) or "output"
    result.options |= {"output_dir": f"{folder.rstrip('/')}/{name}", "output_name": name}
    every = save.read("save_every", 1000, to_positive_integer)
    kept = save.read("max_step_saves_to_keep", 5, to_positive_integer)
    if every:
        every = max(1, every // accumulation)
        result.options["save_every_n_steps"] = every
        if kept:
            result.options["save_last_n_steps"] = max(1, (kept - 1) * every)
    result.set_option("save_precision", keys.SAVE_PRECISIONS.get(str(save.read("dtype", "float16"))))
    if save.read("push_to_hub", False, to_switch):
        result.set_option("huggingface_repo_id", save.read("hf_repo_id", None, to_text))
        is_private = save.read("hf_private", False, to_switch)
        result.set_option("huggingface_repo_visibility", "private" if is_private else "public")
    for key in ("hf_repo_id", "hf_private", "save_format"):
        save.read(key)  # without push_to_hub, and for files that are always safetensors
    save.list_unknown(PROGRAM)
    logging = process.read_table("logging")
    if logging.read("use_wandb", False, to_switch):
        result.set_option("log_with", "wandb")
        result.set_option("log_tracker_name", logging.read("project_name", "ai-toolkit", to_text))
        result.set_option("wandb_run_name", logging.read("run_name", None, to_text))
    result.set_option("logging_dir", process.read("log_dir", None, to_text))
    logging.read_keys.update(("log_every", "verbose", "use_ui_logger", "project_name", "run_name"))
    logging.list_unknown(PROGRAM)


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
    _read_frames(reader, subset)
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


def _read_frames(reader: KeyReader, subset: dict[str, Any]) -> None:
    """Turn a dataset with several frames into a folder of clips; there they are spread over each clip by default."""
    num_frames, is_spread = reader.read("num_frames", 1, to_integer), reader.read("shrink_video_to_frames", True)
    if num_frames <= 1:
        return
    result = reader.result
    if "image_to_video" in FAMILY_FACTS[result.family].options.extra:
        is_given = reader.read("do_i2v", True, to_switch)
        if result.options.setdefault("image_to_video", is_given) is not is_given:
            reader.list_change("do_i2v", "the first frame of all clips is given or of none: image_to_video", is_given)
    if "train_audio" in FAMILY_FACTS[result.family].options.extra:
        is_heard = reader.read("do_audio", False, to_switch)
        if result.options.setdefault("train_audio", is_heard) is not is_heard:
            reader.list_change("do_audio", "sound of all clips is trained or of none: train_audio", is_heard)
        if is_heard:
            result.options["cache_latents_to_disk"] = True  # which sound needs here
    if reader.result.family not in VIDEO_FAMILIES:
        reader.list_change("num_frames", "the model makes images; remove it, or choose a model of videos")
        return
    subset["video_dir"], subset["target_frames"] = subset.pop("image_dir"), [num_frames]
    if is_spread:
        reader.list_change("shrink_video_to_frames", "frames follow each other at the model's rate here", is_spread)


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
        "num_frames": sample.read("num_frames", 1, to_integer),
        "fps": sample.read("fps", 16, to_number),
        "network_multiplier": sample.read("network_multiplier", 1, to_number),
    }
    seed, walks = sample.read("seed", 0, to_integer), sample.read("walk_seed", False, to_switch)
    for name, neutral in _NEUTRAL_SAMPLE_SETTINGS.items():
        if not is_among(sample.read(name), (None, *neutral)):
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
    if float(values["network_multiplier"]) != 1:
        prompt["network_multiplier"] = float(values["network_multiplier"])
    rule = FAMILY_FACTS[family].pipeline.frames if family in VIDEO_FAMILIES else None
    if rule is not None and values["num_frames"] > 1:
        prompt |= {"frame_count": rule.round_down(int(values["num_frames"])), "fps": float(values["fps"])}
    names = ("ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3")
    controls = list(dict.fromkeys(str(values[name]) for name in names if values.get(name)))
    if controls and family in EDIT_FAMILIES:
        prompt["control_image_path"] = controls
    return prompt
