"""Checks of the settings that depend on the model: its files, its options, attention and previews; no torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from ..config import ParsedConfig, RunConfig, validate_adapter, validate_objective
from ..config.help import format_default
from ..config.network_args import (
    PATTERN_ARGS,
    SHARED_TYPES,
    NetworkFacts,
    add_exclude_patterns,
    find_block_lr_weight_lengths,
    list_arg_names,
    parse_network_args,
)
from ..config.options import flatten_config, iter_options
from ..config.schema import AdapterConfig, ModelConfig
from ..config.schema_data import CacheConfig, DataConfig
from ..config.schema_distributed import ParallelConfig
from ..config.schema_objective import NoiseConfig
from ..config.types import is_prompt_text
from ..config.unused_options import (
    ModelTraits,
    find_unusable_sampler,
    find_unused_options,
    reset_options,
)
from ..config.validate_full import validate_block_rates
from ..dataloader.sample_prompts import Prompt, load_preview_prompts
from ..dataset.clip_windows import TextImages
from ..dataset.controls import CONTROLS_FROM_IMAGE, MASK_FROM_IMAGE
from ..dataset.dataset_config import can_load_datasets, load_dataset_config
from ..dataset.musubi_format import POSITION_KEYS, WINDOW_KEY
from ..dataset.one_frame import OneFrame, describe_window, parse_one_frame
from ..dataset.schema import DatasetConfig, SubsetConfig
from ..dataset.validate import find_clips_for_image_models, validate_resolution_multiple
from ..diffusion.expert_selection import HIGH_NOISE, LOW_NOISE, TYPICAL_TOKENS
from ..diffusion.noise_level_distributions import NUM_TRAIN_TIMESTEPS
from ..diffusion.timestep_shift import FixedShift
from ..errors import ConfigError, FileError
from ..problems import Place, Problem, locate_problems
from .detect import (
    DetectedModel,
    build_control_limits,
    detect_model,
    get_config_reader,
    lacks_text_images,
    list_video_models,
    report_text_images,
)
from .facts import TORCH_ATTENTION_MODES, FamilyFacts
from .families import FAMILY_FACTS, ONE_FRAME_FAMILIES
from .kohya_objective import resolve_objective_defaults, validate_objective_defaults
from .model_configs import SCHEDULER
from .own_families import get_family_facts
from .trained_components import select_trained_text_encoders

MIN_SHARE_IN_RANGE = 1e-6
"""The least share of a distribution of timesteps that ``preserve_distribution_shape`` may cut out of it."""
TYPICAL_SIDE = 1024
"""The side of the image for which the distribution is checked, where it depends on the size."""


def validate_model_options(config: RunConfig, locations: Mapping[str, Place]) -> Iterator[Problem]:
    """Check the model's files, the options for this model, and the prompts; ``locations`` is where options were set."""
    try:
        detected: DetectedModel | None = detect_model(config.model)
    except ConfigError as error:
        yield from error.problems
        detected = None if isinstance(error, FileError) else _detect_without_options(config.model)
    if detected is not None:
        facts = get_family_facts(detected.family)
        conflicts = [
            *validate_objective.validate_objective_for_model(
                config.noise, config.loss, facts.title, detected.prediction_type
            ),
            *validate_objective_defaults(config.noise, facts),
            *validate_adapter.validate_adapter_for_model(
                config.adapter,
                config.optim,
                facts.options.network,
                title=facts.title,
                text_encoders=tuple(facts.lora.text_encoders),
                t5=facts.text.t5_encoder,
            ),
            *validate_block_rates(config, facts.options.network, facts.title),
            *_validate_noise_range(config.noise, detected),
            *_validate_expert_range(config.noise, config.model, detected),
            *_validate_text_mask(config.model, config.distributed.attn_mode, config.parallel.cp_size, detected),
            *validate_adapter.validate_text_caching(
                config.adapter,
                config.cache,
                select_trained_text_encoders(config.adapter, config.optim, facts),
                facts.text.t5_encoder,
            ),
            *validate_attention_mode(config.distributed.attn_mode, detected),
            *validate_splits(config.parallel, facts),
            *_validate_step_recording(config, facts),
        ]
        yield from locate_problems(conflicts, locations)
        yield from _validate_datasets(config.data, config.cache, detected, config.model.latent_window_size)
    path = config.preview.sample_prompts
    try:
        is_missing = path is not None and not is_prompt_text(path) and not Path(path).is_file()  # found earlier
        prompts = [] if is_missing else load_preview_prompts(config.preview)
    except ConfigError as error:
        yield from error.problems
        prompts = []
    if detected is not None:
        yield from validate_prompts(prompts, detected)


def _validate_noise_range(noise: NoiseConfig, model: DetectedModel) -> Iterator[Problem]:
    """Reject a range in which the distribution of timesteps has next to no samples, of which it would be cut."""
    if model.prediction_type != "flow":
        return
    facts = get_family_facts(model.family).training_noise
    distribution = facts.build_distribution(noise, get_config_reader(model))
    tokens = facts.count_tokens(TYPICAL_SIDE, TYPICAL_SIDE, model.size_multiple)
    if distribution.is_cut and distribution.compute_share_in_range(tokens) < MIN_SHARE_IN_RANGE:
        option = "min_timestep" if noise.min_timestep else "max_timestep"
        text = f"next to no sample of timestep_sampling {distribution.sampling} is in this range"
        yield Problem(option, text, "widen it, or leave out preserve_distribution_shape")


def _validate_expert_range(noise: NoiseConfig, model: ModelConfig, detected: DetectedModel) -> Iterator[Problem]:
    """Check that there are noise levels to train each expert with."""
    facts = get_family_facts(detected.family)
    experts = facts.pipeline.experts
    if experts is None or (noise.min_timestep or 0) >= (noise.max_timestep or NUM_TRAIN_TIMESTEPS):
        return  # an empty range is reported by validate_objective
    distribution = facts.training_noise.build_distribution(noise, get_config_reader(detected))
    if distribution.is_cut and distribution.compute_share_in_range(TYPICAL_TOKENS) < MIN_SHARE_IN_RANGE:
        return  # reported by _validate_noise_range
    boundary = experts.boundary if model.noise_boundary is None else model.noise_boundary
    below = distribution.compute_share_below(boundary, TYPICAL_TOKENS)
    shares = {LOW_NOISE: below, HIGH_NOISE: 1 - below}
    empty = next((expert for expert in experts.list_trained() if shares[expert] < MIN_SHARE_IN_RANGE), None)
    if empty is None:
        return
    at, other = f"{boundary * NUM_TRAIN_TIMESTEPS:g}", next(expert for expert in shares if expert != empty)
    part, limit = f"below {at}", f"a min_timestep below {at}"
    if empty == HIGH_NOISE:
        part, limit = f"from {at} on", f"a max_timestep above {at}"
    ends = [name for name in ("min_timestep", "max_timestep") if getattr(noise, name) is not None]
    low, high = (round(NUM_TRAIN_TIMESTEPS * end) for end in distribution.range)
    source = f"the range {low} to {high}" if ends else f"timestep_sampling {distribution.sampling}"
    fix = f"set {limit}, or --noise_experts {other}" if ends else "use another one"
    if experts.trained == "both":
        fix = f"only {other} would be trained: use --noise_experts {other}, or another range"
    option, *others = ends or ["timestep_sampling"]
    text = f"{source} has no timestep for {empty}, which is {part}"
    yield Problem(option, text, fix, others=(*others, "noise_experts"))


def _validate_text_mask(model: ModelConfig, attn_mode: str, cp_size: int, detected: DetectedModel) -> Iterator[Problem]:
    """Some families mask padding tokens in the denoiser's attention, which not every kernel and layout can."""
    if not model.apply_t5_attn_mask or not get_family_facts(detected.family).text.is_masked_in_denoiser:
        return
    if attn_mode in ("flash", "flash3"):
        yield Problem("apply_t5_attn_mask", f"attn_mode {attn_mode} has no masks", "use sdpa", others=("attn_mode",))
    if cp_size > 1:
        yield Problem("apply_t5_attn_mask", "not supported with cp_size", "use tp_size or fsdp", others=("cp_size",))


def _validate_datasets(data: DataConfig, cache: CacheConfig, model: DetectedModel, window: int) -> Iterator[Problem]:
    """Check bucket steps, resolutions and control images, if the datasets themselves are valid."""
    facts = get_family_facts(model.family)
    parsed = load_dataset_config(data) if can_load_datasets(data) else None
    subsets = [] if parsed is None else [subset for dataset in parsed.datasets for subset in dataset.subsets]
    needs_images = facts.control.num_images[0] or facts.text_images == "first frame"
    has_images = any(subset.control_key or subset.control_from_image for subset in subsets)
    if facts.text_images != "none" and (needs_images or has_images) and lacks_text_images(cache):
        yield report_text_images(facts)
    if parsed is None or parsed.problems:
        return
    yield from validate_resolution_multiple(parsed.datasets, model.size_multiple, model.short_name)
    if facts.pipeline.frames is None and not model.is_built_in:
        yield from find_clips_for_image_models(parsed.datasets, facts.title, list_video_models())
    if facts.control.have_picture_size or facts.control.are_layers:
        yield from _find_other_control_sizes(parsed.datasets, facts)
    if model.one_frame is not None:
        yield from _find_other_positions(parsed.datasets, model.one_frame, window)
    limits = build_control_limits(model)
    for subset in subsets:
        key = subset.control_key or ("control_from_image" if subset.control_from_image else None)
        if subset.multiple_target and not facts.control.are_layers:
            titles = [each.title for each in FAMILY_FACTS.values() if each.control.are_layers]
            yield subset.report(
                "multiple_target", f"{facts.title} makes no layers; {', '.join(titles)} does", "remove it"
            )
        if key is not None and facts.control.are_layers:
            fix = "set multiple_target = true for its layers"
            yield subset.report(key, f"{facts.title} reads the picture itself, and no control image", fix)
        elif key is not None and not limits.most and model.family in ONE_FRAME_FAMILIES:
            text = f"{facts.title} is trained on clips without control clips"
            yield subset.report(key, text, "to train pictures from control images, add --one_frame")
        elif key is not None and not limits.most:
            fix = "if these are masks, set --masked_loss" if subset.conditioning_is_control else ""
            yield subset.report(key, limits.describe_problem(1) or "", fix)
        if limits.most and subset.control_from_image:
            reason = _describe_wrong_condition(subset.control_from_image, facts)
            yield from [subset.report("control_from_image", *reason)] if reason else []
        if facts.text_images != "none" and cache.caches_text_outputs:
            yield from _find_random_controls(subset, facts.text_images)


def _find_other_positions(datasets: Sequence[DatasetConfig], trained: OneFrame, window: int) -> Iterator[Problem]:
    """Find datasets of musubi-tuner with other positions of one-frame training than the run has.

    A position of the picture that is not set is the last one of a section.
    """
    for dataset in datasets:
        if dataset.window not in (None, window):
            yield dataset.report(WINDOW_KEY, *describe_window(dataset.window))
        if dataset.one_frame is None:
            continue
        # Frames that are compressed are an option of the run in musubi-tuner, too.
        given = replace(dataset.one_frame, has_2x=trained.has_2x, has_4x=trained.has_4x)
        if given.resolve_target(window) != trained.resolve_target(window):
            text = f"positions of one-frame training are an option of the run ({trained.format()}), for all datasets"
            key = next(name for name in POSITION_KEYS if name in dataset.locations)
            yield dataset.report(key, text, f"set --one_frame_settings '{given.format()}'")


def _find_other_control_sizes(datasets: Sequence[DatasetConfig], facts: FamilyFacts) -> Iterator[Problem]:
    """Find control images that are not as large as their pictures."""
    source = "layers, which have" if facts.control.are_layers else "a control image, which has"
    for dataset in datasets:
        if dataset.has_own_control_size:
            key = "no_resize_control" if dataset.no_resize_control else "control_resolution"
            text = f"{facts.title} reads {source} the size of the picture"
            yield dataset.report(key, text, "leave it out")


def _describe_wrong_condition(kind: str, facts: FamilyFacts) -> tuple[str, str] | None:
    """Say why the model does not take a control image that is made so, and what to do."""
    if facts.control.are_masks and kind != MASK_FROM_IMAGE:
        return f"{facts.title} gets a mask, and {kind} makes none", f"set {MASK_FROM_IMAGE!r}, or give masks as files"
    if kind == MASK_FROM_IMAGE and not facts.control.are_masks:
        return f"{facts.title} takes no masks; inpainting models do", "set another kind, or leave it out"
    return None


def _find_random_controls(subset: SubsetConfig, kind: TextImages) -> Iterator[Problem]:
    """Find what draws other images for the text encoder each time, which cached captions cannot contain."""
    made = subset.control_from_image
    is_random = {"random_crop": subset.random_crop, "control_from_image": bool(made and CONTROLS_FROM_IMAGE[made])}
    if kind == "first frame":
        is_random = {key: bool(getattr(subset, key)) for key in ("random_crop", "color_aug", "face_crop_aug_range")}
    seen = "control image" if kind == "controls" else "first frame"
    for key in (key for key, value in is_random.items() if value):
        text = (
            f"cannot be used with cache_text_encoder_outputs, because the text encoder sees the {seen}, and this"
            " changes it each time"
        )
        yield subset.report(key, text, "remove one of the two", others=("cache_text_encoder_outputs",))


def validate_attention_mode(mode: str, model: DetectedModel) -> Iterator[Problem]:
    """Check that the family's denoiser supports this ``attn_mode``."""
    facts = get_family_facts(model.family)
    if mode not in (*TORCH_ATTENTION_MODES, *facts.blocks.attention_modes):
        modes = ", ".join(("sdpa", *facts.blocks.attention_modes))
        text = f"{mode} is not supported for {facts.title}, only {modes}"
        yield Problem("attn_mode", text, "sdpa chooses the fastest kernel itself")


def validate_splits(parallel: ParallelConfig, facts: FamilyFacts) -> Iterator[Problem]:
    """Check that the denoiser is of a kind that ``--pp_size``, ``--tp_size`` and ``--cp_size`` can split."""
    for name, size in parallel.model_parallel_sizes.items():
        kind = name.removesuffix("_size")
        reason, fix = facts.blocks.unsupported_strategies.get(kind), "use --fsdp"
        if kind == "cp" and not reason and not facts.blocks.lists:
            reason = f"{facts.title} has convolutions, which cannot be split by tokens"
            fix = f"use --tp_size {size}, or --fsdp"
        if size > 1 and reason:
            yield Problem(name, reason, fix, value=str(size))


def _validate_step_recording(config: RunConfig, facts: FamilyFacts) -> Iterator[Problem]:
    """Check that the denoiser can be compiled and captured, as the options ask; the launcher may ask for it as well."""
    asked = {"torch_compile": ("compile", config.distributed.torch_compile)}
    asked["cuda_graphs"] = ("cuda_graphs", config.distributed.cuda_graphs)
    for option, (name, is_asked) in asked.items():
        if is_asked and (reason := facts.blocks.unsupported_strategies.get(name)):
            yield Problem(option, reason, "remove it")


def validate_prompts(prompts: Sequence[Prompt], model: DetectedModel) -> Iterator[Problem]:
    """Check that the model supports all settings of the previews."""
    for prompt in prompts:
        yield from _validate_prompt(prompt, model)


def _validate_prompt(prompt: Prompt, model: DetectedModel) -> Iterator[Problem]:
    facts = get_family_facts(model.family)
    title = facts.title
    limits, has_references = build_control_limits(model), facts.control.most_references > 0
    if prompt.one_frame is not None:
        if facts.sampling.reads_one_frame:
            count = len(parse_one_frame(prompt.one_frame).control_index)
            limits = replace(limits, fewest=count, most=count)
        else:
            yield prompt.report("one_frame", f"{title} is not run with --one_frame", "leave it out")
    references = prompt.control_images if has_references else ()
    num_controls = len(prompt.control_clips) + (0 if has_references else len(prompt.control_images))
    takes_clips = facts.pipeline.frames is not None and (has_references or not prompt.control_images)
    key = "control_video_path" if takes_clips else "control_image_path"
    if prompt.control_clips and facts.pipeline.frames is None:
        text = f"{title} takes no control clips; control images of editing models are set with --ci"
        yield prompt.report("control_video_path", text, "leave it out")
    elif problem := limits.describe_reference_problem(len(references)):
        yield prompt.report("control_image_path", problem)
    elif references and not num_controls:
        pass  # a grey clip is the control
    elif prompt.control_clips and prompt.control_images and not has_references:
        text = "control images and control clips are both set, so that their order is unknown"
        yield prompt.report("control_video_path", text, "give all as clips; a folder with one image is one")
    elif facts.control.are_layers and len(prompt.control_images) != 1:
        yield prompt.report(key, f"{title} makes the layers of one image, not {len(prompt.control_images)}", "use --ci")
    elif not facts.control.are_layers and (problem := limits.describe_problem(num_controls)):
        yield prompt.report(key, problem)
    elif prompt.control_from_image and (reason := _describe_wrong_condition(prompt.control_from_image, facts)):
        yield prompt.report("control_from_image", *reason)
    sides = ("width", prompt.width), ("height", prompt.height)
    for key, side in sides:
        if side is not None and model.max_side is not None and side > model.max_side:
            yield prompt.report(key, f"{title} has positions for at most {model.max_side} pixels, not {side}")
    if facts.control.sets_preview_size:
        text = f"previews of {title} have the shape of their control image"
        yield from (prompt.report(key, text, "leave it out") for key, side in sides if side is not None)
    elif model.prediction_type == "flow":
        step = model.size_multiple
        for key, side in sides:
            if side is not None and side % step:
                below = side - side % step
                sizes = f"{below + step}" + (f" or {below}" if below else "")
                yield prompt.report(key, f"{side} is not a multiple of {step} ({title})", f"use {sizes}")
    elif prompt.flow_shift is not None:
        yield prompt.report("flow_shift", f"for flow-matching models only, not for {title}", "leave it out")
    yield from _validate_noise_levels(prompt, model)
    yield from _validate_frames(prompt, model)
    guidances = {prompt.cfg_scale, prompt.embedded_guidance} - {None}
    if facts.sampling.is_guidance_embedded and len(guidances) > 1:
        text = f"guidance is one input of {title}, which --g ({prompt.embedded_guidance:g}) and --l"
        yield prompt.report("guidance_scale", f"{text} ({prompt.cfg_scale:g}) both set", "give one of them")
    if prompt.embedded_guidance is not None and not model.has_guidance_embeds:
        yield prompt.report("guidance_scale", f"{title} has no guidance embedding", "use --l")


def _validate_noise_levels(prompt: Prompt, model: DetectedModel) -> Iterator[Problem]:
    """Check that the noise levels of the scheduler can be shifted, and are enough, as the prompt wants."""
    scheduler, title = get_config_reader(model)(SCHEDULER) or {}, get_family_facts(model.family).title
    has_levels_of_its_own = model.prediction_type == "flow" and scheduler.get("use_karras_sigmas")
    if has_levels_of_its_own and prompt.flow_shift is not None:
        yield prompt.report("flow_shift", f"the noise levels of {title} have no shift", "leave it out")
    # The schedule is stretched by its last noise level, which with one step is the first: 0 / 0.
    if prompt.num_inference_steps == 1 and (scheduler.get("shift_terminal") or has_levels_of_its_own):
        text = f"the noise levels of {title} end above 0, which needs at least 2 steps"
        yield prompt.report("sample_steps", text, "use 2 or more")


def _validate_frames(prompt: Prompt, model: DetectedModel) -> Iterator[Problem]:
    """Check what a prompt says of the frames of its clip."""
    facts = get_family_facts(model.family)
    rule, frames = model.frame_rule, prompt.num_frames
    if facts.control.are_layers:
        if frames is not None and frames > facts.control.num_images[1]:
            text = f"{facts.title} makes at most {facts.control.num_images[1]} layers, not {frames}"
            yield prompt.report("frame_count", text)
    elif rule is None:
        if frames not in (None, 1):
            yield prompt.report("frame_count", f"{facts.title} makes images, not {frames} frames", "leave it out")
    if rule is None:
        if prompt.fps is not None:
            yield prompt.report("fps", f"{facts.title} makes images", "leave it out")
    elif frames is not None and (below := rule.round_down(frames)) != frames:
        text = f"{facts.title} makes {rule.describe_lengths()} frames, not {frames}"
        yield prompt.report("frame_count", text, f"use {below} or {rule.round_up(frames)}")
    elif (frames or 1) < rule.least:
        text = f"{facts.title} makes clips of at least {rule.least} frames"
        yield prompt.report("frame_count", text, f"set --f {rule.least} or more")
    for key, value in (("image_path", prompt.first_image), ("end_image_path", prompt.last_image)):
        if key in facts.sampling.frame_images and value is None:
            flag, word = ("--i", "begins") if key == "image_path" else ("--ei", "ends")
            text = (
                f"a clip of {facts.title} {word} with an image"
                if rule
                else f"a preview of {facts.title} is made after an image"
            )
            yield prompt.report(key, text, f"give one with {flag}")
    ends = {"image_path": prompt.first_image, "end_image_path": prompt.last_image}
    for key, word in (("image_path", "begin"), ("end_image_path", "end")):
        is_seen = facts.sampling.reads_one_frame and key == "image_path"
        if ends[key] is not None and key not in facts.sampling.frame_images and not is_seen:
            takes_images = build_control_limits(model).most and rule is None
            fix = "use --ci for a control image" if takes_images else "leave it out"
            if key == "image_path" and "image_to_video" in facts.options.extra:
                fix = "set image_to_video, or leave it out"
            yield prompt.report(key, f"what {facts.title} makes cannot {word} with an image", fix)


def _detect_without_options(model: ModelConfig) -> DetectedModel | None:
    """Detect the model by its path, whatever is wrong with other options; None if there is no such model."""
    try:
        return detect_model(ModelConfig(model.pretrained_model_name_or_path, model.family))
    except ConfigError:
        return None


def drop_unused_model_options(loaded: ParsedConfig) -> ParsedConfig:
    """Set options that mean nothing to the model back to their defaults; a model that is not found is left alone."""
    detected = _detect_without_options(loaded.config.model)
    if detected is None:
        return loaded  # reported by validate_model_options
    model = collect_model_traits(detected, loaded.config.adapter)
    loaded = resolve_objective_defaults(loaded, detected.family, model)
    loaded = loaded.without_unused(find_unused_options(loaded.config, loaded.explicit, model))
    loaded = loaded.without_unused(_find_unavailable_xformers(loaded, detected))
    facts, adapter = get_family_facts(detected.family), loaded.config.adapter
    if not facts.options.network.is_unet:
        names = [name for name in list_arg_names(adapter.network_args) if name in ("conv_dim", "conv_alpha")]
        loaded = loaded.without_args(dict.fromkeys(names, f"{facts.title} has no convolutions"))
    unusable = _find_unusable_prompt_settings(loaded.config, detected)
    loaded = _round_bucket_steps(replace(loaded, unused=(*loaded.unused, *unusable)), detected)
    loaded = _apply_max_timestep(loaded, facts)
    loaded = _take_musubi_args(loaded, facts.options.network)
    lengths = find_block_lr_weight_lengths(parse_network_args(adapter.network_args)[0], facts.options.network)
    where = loaded.locations.get("network_args")
    loaded = replace(loaded, notices=[*loaded.notices, *(f"{where}: {line}" for line in lengths)])
    without_effect = find_unused_options(loaded.config, frozenset(loaded.taken_defaults), model)
    taken = {name: value for name, value in loaded.taken_defaults.items() if name not in without_effect}
    loaded = replace(loaded, config=reset_options(loaded.config, without_effect))
    return replace(loaded, kohya_defaults=tuple(_find_other_defaults(loaded, detected)), taken_defaults=taken)


def _find_unusable_prompt_settings(config: RunConfig, model: DetectedModel) -> list[tuple[Place, str]]:
    """Find the settings of prompts that do not change the previews of this model, and why."""
    try:
        prompts = load_preview_prompts(config.preview)
    except ConfigError:  # reported by validate_model_options
        return []
    return [
        *_find_unusable_samplers(prompts, config.noise, model),
        *_find_unusable_rates(prompts, model),
        *_find_unusable_negative_prompts(prompts, model),
    ]


def _find_unusable_negative_prompts(prompts: Sequence[Prompt], model: DetectedModel) -> Iterator[tuple[Place, str]]:
    """Find the negative prompts of a model whose guidance is an input, so that it denoises without them."""
    facts = get_family_facts(model.family)
    places = (prompt.locate_key("negative_prompt") for prompt in prompts if prompt.negative_prompt)
    for place in dict.fromkeys(places) if facts.sampling.is_guidance_embedded else ():
        yield place, f"guidance is an input of {facts.title}, without negative prompts"


def _find_unusable_rates(prompts: Sequence[Prompt], model: DetectedModel) -> Iterator[tuple[Place, str]]:
    """Find the frames per second of prompts that make images, though the model makes clips as well."""
    if get_family_facts(model.family).pipeline.frames is None:
        return  # reported by validate_prompts
    rated = [(prompt.locate_key("fps"), prompt.num_frames or 1) for prompt in prompts if prompt.fps is not None]
    # Prompts of a file may share the key; prompts in the option itself have no places of their own.
    used = {place for place, frames in rated if frames > 1 and place.file}
    for place in dict.fromkeys(place for place, _ in rated):
        if place not in used:
            yield place, "an image has no rate; a prompt of more than 1 frame, set with --f or frame_count, has"


def _find_unusable_samplers(
    prompts: Sequence[Prompt], noise: NoiseConfig, model: DetectedModel
) -> Iterator[tuple[Place, str]]:
    """Find the samplers of prompts that previews of this model do not use: the first prompt of each, and why."""
    found = dict[str | None, Prompt]()
    for prompt in prompts:
        found.setdefault(prompt.sampler, prompt)
    for sampler, prompt in found.items():
        reason = find_unusable_sampler(sampler, noise)
        if model.prediction_type == "flow" and sampler not in (None, "euler", "k_euler"):
            reason = "flow matching samples with euler"
        if reason:
            yield prompt.locate_key("sample_sampler").narrow(str(sampler)), reason


def _round_bucket_steps(loaded: ParsedConfig, detected: DetectedModel) -> ParsedConfig:
    """Take the coarser bucket steps that the model needs, if they are multiples of those that were set."""
    data, step = loaded.config.data, detected.size_multiple
    location = loaded.locations.get("bucket_reso_steps")
    if location is None or not data.enable_bucket or data.bucket_reso_steps >= step or step % data.bucket_reso_steps:
        return loaded
    notice = f"{location}: {data.bucket_reso_steps} is finer than the model can train; buckets are multiples of {step}"
    config = replace(loaded.config, data=replace(data, bucket_reso_steps=step))
    adjustments = {**loaded.adjustments, "bucket_reso_steps": notice}
    return replace(loaded, config=config, notices=[*loaded.notices, notice], adjustments=adjustments)


def _apply_max_timestep(loaded: ParsedConfig, facts: FamilyFacts) -> ParsedConfig:
    """Train the noise levels that the model knows, unless ``max_timestep`` is set, or ``min_timestep`` above them."""
    most, noise = facts.training_noise.max_timestep, loaded.config.noise
    if most is None or noise.max_timestep is not None or (noise.min_timestep or 0) >= most:
        return loaded
    text = f"{facts.title} knows no higher noise levels; --max_timestep {NUM_TRAIN_TIMESTEPS} trains all"
    config = replace(loaded.config, noise=replace(noise, max_timestep=most))
    return replace(loaded, config=config, notices=[*loaded.notices, f"max_timestep {most}: {text}"])


def _find_other_defaults(loaded: ParsedConfig, detected: DetectedModel) -> Iterator[str]:
    """Name the options of sd-scripts that are not set and have another default there; only for its run files."""
    if loaded.program != "sd-scripts":
        yield from (f"{name} {value}" for name, value in _list_musubi_differences(loaded))
        return
    facts, predicts_v = get_family_facts(detected.family), detected.prediction_type == "v"
    options = [option for option in iter_options(RunConfig) if predicts_v or option.name != "v_parameterization"]
    theirs: dict[str, object] = {option.name: option.kohya_default for option in options if option.kohya_default}
    sampling = loaded.config.noise.get_timestep_sampling(facts.training_noise.timestep_sampling)
    values = flatten_config(loaded.config) | {"timestep_sampling": sampling}
    shift = facts.training_noise.read_shift(get_config_reader(detected)) if detected.prediction_type == "flow" else None
    if values["discrete_flow_shift"] is None and isinstance(shift, FixedShift):
        values["discrete_flow_shift"] = shift.factor
    objective = facts.options.kohya_objective
    if objective is not None:
        theirs.update({name: value for name, value in objective.defaults.items() if values[name] != value})
    model, names = collect_model_traits(detected, loaded.config.adapter), theirs.keys() - loaded.locations.keys()
    without_effect = find_unused_options(loaded.config, frozenset(names), model)
    texts = {"timestep_sampling": sampling}
    for option in options:
        if option.name in names - without_effect.keys():
            ours, value = (
                texts.get(option.name) or option.default_text or format_default(option.default),
                theirs[option.name],
            )
            yield f"{option.name} {ours} (there {format_default(value) or 'none'})"


def _take_musubi_args(loaded: ParsedConfig, network: NetworkFacts) -> ParsedConfig:
    """Take the ``network_args`` that musubi-tuner's module for this model implies, in its commands."""
    if loaded.program != "musubi-tuner":
        return loaded
    adapter = loaded.config.adapter
    given = list_arg_names(adapter.network_args)
    if adapter.network_module in SHARED_TYPES:  # there its patterns stay beside those that are given
        adapter = replace(adapter, network_args=add_exclude_patterns(adapter.network_args, network.musubi_args))
    implied = tuple(each for each in network.musubi_args if each.partition("=")[0] not in given)
    if {*PATTERN_ARGS} & {*given} and "pattern_names" not in given:
        implied = (*implied, "pattern_names=original")
    config = replace(loaded.config, adapter=replace(adapter, network_args=(*adapter.network_args, *implied)))
    taken = {**loaded.taken_defaults, "network_args": " ".join(implied)} if implied else loaded.taken_defaults
    return replace(loaded, config=config, taken_defaults=taken)


def _list_musubi_differences(loaded: ParsedConfig) -> Iterator[tuple[str, str]]:
    """Name the options that are not set and whose defaults in musubi-tuner are not taken, for its commands only."""
    for option in iter_options(RunConfig) if loaded.program == "musubi-tuner" else ():
        if option.musubi_default_text and option.name not in loaded.locations:
            yield option.name, f"{format_default(option.default)} (there {option.musubi_default_text})"


def collect_model_traits(detected: DetectedModel, adapter: AdapterConfig) -> ModelTraits:
    """Collect what the effect of options depends on in a model."""
    facts = get_family_facts(detected.family)
    return ModelTraits(
        facts.title,
        detected.prediction_type,
        detected.has_guidance_embeds,
        bool(facts.lora.text_encoders) or adapter.network_train_text_encoder_only,  # the latter is an error then
        {*facts.options.extra, *facts.options.components},
        timestep_sampling=facts.training_noise.timestep_sampling,
        is_stored_quantized=bool(detected.stored_formats),
    )


def _find_unavailable_xformers(loaded: ParsedConfig, detected: DetectedModel) -> dict[str, str]:
    """``xformers = true`` asks for speed; where it cannot run, PyTorch's attention computes the same."""
    place = loaded.locations.get("attn_mode")
    if place is None or "xformers" not in (place.key, place.flag.removeprefix("--")):
        return {}
    if "xformers" not in (*TORCH_ATTENTION_MODES, *get_family_facts(detected.family).blocks.attention_modes):
        return {"attn_mode": f"not supported for {detected.family}; PyTorch's attention is used"}
    return {} if find_spec("xformers") else {"attn_mode": "not installed; PyTorch's attention is used"}
