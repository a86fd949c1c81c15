"""The checks of a family with a tiny pipeline: texts, latents and predictions are those of diffusers.

Each check gets a pipeline that it may change, and raises ``CheckFailedError`` with the reason.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from ...models.base import Family
from ...models.loading import load_pipeline_on_meta, prepare_denoiser
from ...models.own_families import find_contradictions
from ...models.text_encoding import encode_text_on_meta
from ...parallel.fsdp import find_fsdp_blocks
from .cases import (
    EXACT,
    CheckFailedError,
    CheckSkippedError,
    ForwardOnlyWrapper,
    Recorder,
    TinyCase,
    copy_tensor,
    ensure,
    ensure_close,
    find_call_differences,
    flatten_tensors,
    make_generators,
    resize_frame_cond,
    slice_rows,
    take_rows,
)

TEXTS = TinyCase.captions
TIMESTEPS = (700.0, 250.0)
NUM_DRAWS = 400


def check_facts(family: Family, case: TinyCase) -> None:
    """Compare the facts with each other, with the methods of the class and with the pipeline."""
    ensure(vars(family).keys() == {"model_config"}, "the family has state of its own; the pipeline is the only state")
    for text in find_contradictions(type(family)):
        raise CheckFailedError(f"the family {text}")
    names = family.facts.pipeline.class_name, type(case.pipe).__name__
    ensure(names[0] == names[1], f"pipeline.class_name is {names[0]}, and the pipeline is a {names[1]}")
    denoiser = getattr(case.pipe, family.facts.denoiser_name)
    prepare_denoiser(family, denoiser)
    find_fsdp_blocks(denoiser)


def call_pipeline(case: TinyCase, **arguments: Any) -> Any:
    """Call the diffusers pipeline, where it can be called in the way of all pipelines."""
    # Some pipelines write into the list of prompts or the latents that they are given.
    arguments = {
        name: list(value) if isinstance(value, list) else copy_tensor(value) for name, value in arguments.items()
    }
    try:
        return case.pipe(**{**case.size_arguments, "num_inference_steps": 2, **arguments})
    except (TypeError, ValueError, AttributeError, RuntimeError, NotImplementedError) as error:
        if case.compares_arguments:  # the case has the pipeline's own arguments
            raise
        text = str(error).strip().partition("\n")[0]
        raise CheckSkippedError(f"the pipeline cannot be run by itself: {type(error).__name__}: {text}") from None


@torch.no_grad()
def check_denoiser_call(family: Family, case: TinyCase) -> None:
    """Compare the call of the denoiser in ``predict`` with that of one step of the diffusers pipeline."""
    pipe, batch = case.pipe, take_rows(case.batch, case.max_rows)
    denoiser = getattr(pipe, family.facts.denoiser_name)
    record, steps = Recorder(denoiser), list[tuple[Any, Any]]()

    def record_step(scheduler: Any, output: Any, timestep: Any, *args: Any, **kwargs: Any) -> Any:
        # A pipeline that gives the scheduler a timestep for each token counts time backward.
        steps.append((output if kwargs.get("per_token_timesteps") is None else -output, timestep))
        return type(scheduler).step(scheduler, output, timestep, *args, **kwargs)

    # A method, which belongs to the copy of a scheduler that is copied.
    pipe.scheduler.step = MethodType(record_step, pipe.scheduler)
    latents = case.pack_latents(batch.latents)
    call_pipeline(case, **case.call, **case.no_guidance, latents=latents, output_type="latent")
    reference, t = steps[0]
    wrapped = ForwardOnlyWrapper(denoiser)
    noisy = batch.latents * getattr(pipe.scheduler, "init_noise_sigma", 1.0)
    timesteps = case.convert_timesteps(torch.full((len(batch),), float(t)))
    ours = family.predict(pipe, wrapped, noisy, timesteps, batch)
    ensure(wrapped.calls == 1, f"predict calls the given denoiser {wrapped.calls} times instead of once")
    ensure(ours.shape == batch.latents.shape, f"predict returns {list(ours.shape)} for {list(batch.latents.shape)}")
    prediction = (case.pack_prediction or case.pack_latents)(ours)
    differences = list(find_argument_differences(case, record))
    _ensure_equal_results(case, prediction, case.select_prediction(reference), differences)


def find_argument_differences(case: TinyCase, record: Recorder) -> Iterator[str]:
    """Find differences between the last recorded call and the first, which is the pipeline's; fail if they count."""
    ours, theirs = (case.simplify_call(call) for call in (record.calls[-1], record.calls[0]))
    for text in find_call_differences(ours, theirs):
        if case.compares_arguments:
            raise CheckFailedError(f"the denoiser is called in another way than by the pipeline: {text}")
        yield text


def _ensure_equal_results(case: TinyCase, ours: Tensor, theirs: Tensor, differences: Sequence[str]) -> None:
    """Compare a prediction with the pipeline's; differences between the arguments are named if they change it."""
    tolerance = EXACT if case.compares_arguments else 1e-4  # padding is rounded in another way
    calls = f" (the calls of the denoiser differ: {'; '.join(differences)})" if differences else ""
    reason = f"predict returns something else than the pipeline{calls}"
    tolerances = case.tolerances or {"rtol": tolerance, "atol": tolerance}
    ensure_close(ours, theirs, reason, **tolerances)


@torch.no_grad()
def check_target(family: Family, case: TinyCase) -> None:
    """Let the model's scheduler, which is given the target as the model's output, find the clean latents."""
    clean, noise = case.batch.latents, torch.randn(case.batch.latents.shape, generator=make_generators()[0])
    process = family.build_noise_process(case.pipe)
    t, scheduler = 601.0, case.pipe.scheduler
    noisy, target = process.add_noise(clean, noise, torch.full((len(clean),), t))
    if case.model is not None:  # the pipeline is as it was loaded
        types = case.model.prediction_type, process.prediction_type
        ensure(types[0] == types[1], f"match_configs says {types[0]}, and build_noise_process {types[1]}")
    if "flow_shift" in scheduler.config and process.prediction_type == "flow":  # a solver of several steps
        scheduler = type(scheduler).from_config(scheduler.config, flow_shift=1.0, final_sigmas_type="zero")
        scheduler.set_timesteps(1)
        scheduler.sigmas[0] = t / 1000
        recovered = scheduler.step(target, scheduler.timesteps[0], noisy).prev_sample
    elif process.prediction_type != "flow":
        recovered = _recover_by_noise_schedule(scheduler, noisy, target, int(t))
    elif getattr(process, "velocity_sign", 1) == -1 and "use_dynamic_shifting" not in scheduler.config:
        # of MiniMax H3, which counts time from the noise on, and whose noise levels end with 0
        scheduler.set_timesteps(sigmas=[t / 1000, 0.0])
        recovered = scheduler.step(-target, scheduler.timesteps[0], noisy).prev_sample
    else:  # of flow matching: one step from here to the end
        settings = dict.fromkeys(("use_dynamic_shifting", "invert_sigmas", "use_karras_sigmas"), False)
        scheduler = type(scheduler).from_config(scheduler.config, shift=1.0, shift_terminal=None, **settings)
        scheduler.set_timesteps(sigmas=[t / 1000])
        recovered = scheduler.step(target, scheduler.timesteps[0], noisy).prev_sample
    reason = "the scheduler of the model does not find the clean latents with the target of build_noise_process"
    ensure_close(recovered, clean, reason, rtol=1e-4, atol=1e-4)


def _recover_by_noise_schedule(scheduler: Any, noisy: Tensor, output: Tensor, timestep: int) -> Tensor:
    """Compute the clean latents from a model's output as its scheduler does, or by its noise schedule."""
    scheduler.set_timesteps(len(scheduler.alphas_cumprod))
    step = scheduler.step(output, timestep, noisy)
    if getattr(step, "pred_original_sample", None) is not None:
        return Tensor(step.pred_original_sample)
    a = scheduler.alphas_cumprod[timestep]
    if scheduler.config.prediction_type == "v_prediction":
        return Tensor(a.sqrt() * noisy - (1 - a).sqrt() * output)
    return Tensor((noisy - (1 - a).sqrt() * output) / a.sqrt())


@torch.no_grad()
def check_prompts(family: Family, case: TinyCase) -> None:
    """Compare the encoded texts, as the denoiser gets them, with those of the diffusers pipeline."""
    pipe, denoiser = case.pipe, getattr(case.pipe, family.facts.denoiser_name)
    texts = list(case.captions[: case.max_rows])
    for group in [[text] for text in texts] if case.encodes_prompts_alone else [texts]:
        record, rows = Recorder(denoiser), take_rows(case.batch, len(group))
        arguments = {"prompt": list(group), **case.sizes, **case.texts, **case.no_guidance}
        call_pipeline(case, **arguments, latents=case.pack_latents(rows.latents), output_type="latent")
        t = case.convert_timesteps(torch.full((len(group),), float(pipe.scheduler.timesteps[0])))
        batch = replace(rows, cond=case.encode_prompts(family, pipe, group))
        reference, noisy = record.outputs[0], rows.latents * getattr(pipe.scheduler, "init_noise_sigma", 1.0)
        family.predict(pipe, denoiser, noisy, t, batch)
        differences = list(find_argument_differences(case, record))
        if not case.compares_arguments:
            for ours, theirs in zip(*map(flatten_tensors, (record.outputs[-1], reference)), strict=True):
                _ensure_equal_results(case, ours, theirs, differences)
        for name, value in batch.cond.items():
            ensure(len(value) == len(group), f"encode_prompts returns {len(value)} rows of {name} for {len(group)}")
    pair = case.encode_prompts(family, pipe, case.captions)
    is_different = any(not torch.equal(value[0], value[1]) for value in pair.values())
    ensure(is_different, "encode_prompts returns the same for different texts")


@torch.no_grad()
def check_sample_independence(family: Family, case: TinyCase) -> None:
    """Predict for prompts of different lengths in one batch, and for each alone."""
    pipe, denoiser, batch = case.pipe, getattr(case.pipe, family.facts.denoiser_name), case.batch
    t = torch.tensor(TIMESTEPS)
    batched = case.encode_prompts(family, pipe, case.captions)
    pair = family.predict(pipe, denoiser, batch.latents, t, replace(batch, cond=batched))
    for number, text in enumerate(case.captions):
        row = slice(number, number + 1)
        alone = case.encode_prompts(family, pipe, [text])
        for name, value in alone.items():
            reason = f"encode_prompts returns another {name} for a text that is encoded with others"
            ensure_close(value[0], batched[name][number], reason, rtol=1e-4, atol=1e-5)
        single = replace(slice_rows(replace(batch, cond=batched), row), cond=alone)
        predicted = family.predict(pipe, denoiser, batch.latents[row], t[row], single)
        reason = "predict returns something else for a sample in a batch than alone"
        ensure_close(predicted, pair[row], reason, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def check_text_independence(family: Family, case: TinyCase) -> None:
    """Encode texts twice, together and alone; the rows have the same kind and values."""
    texts = [case.captions[0], "", case.captions[1]]
    batched, again = (case.encode_prompts(family, case.pipe, texts) for _ in range(2))
    for row, text in enumerate(texts):
        single = case.encode_prompts(family, case.pipe, [text])
        ensure(single.keys() == batched.keys(), f"encode_prompts returns {sorted(single)} and {sorted(batched)}")
        for name, value in single.items():
            is_same_kind = isinstance(value, list) == isinstance(batched[name], list)
            ensure(is_same_kind, f"encode_prompts returns {name} as a list or a tensor, depending on the texts")
            reason = f"encode_prompts returns another {name} for a text that is encoded with others"
            ensure_close(value[0], batched[name][row], reason)
            ensure(torch.equal(again[name][row], batched[name][row]), f"encode_prompts draws random numbers in {name}")


@torch.no_grad()
def check_meta_shapes(family: Family, case: TinyCase) -> None:
    """Run a step on the meta device, where nothing may look at values, and compare the shapes with those of a real."""
    pipe = load_pipeline_on_meta(family, case.detect(), torch.float32)
    cond = encode_text_on_meta(family, pipe, list(case.captions), [image.size for image in case.controls])
    real = case.encode_prompts(family, case.pipe, case.captions)
    shapes = [{name: [tuple(row.shape) for row in rows] for name, rows in each.items()} for each in (cond, real)]
    ensure(shapes[0] == shapes[1], f"encode_prompts_on_meta returns the shapes {shapes[0]} instead of {shapes[1]}")
    sizes, latents = case.batch.size_conditioning.to("meta"), case.batch.latents.to("meta")
    controls = tuple(each.to("meta") for each in case.batch.control_latents)
    batch = replace(case.batch, latents=latents, cond=cond, size_conditioning=sizes, control_latents=controls)
    batch = resize_frame_cond(batch, latents)
    denoiser = getattr(pipe, family.facts.denoiser_name)
    predicted = family.predict(pipe, denoiser, latents, torch.empty(2, device="meta"), batch)
    ensure(predicted.shape == latents.shape, f"predict returns the shape {list(predicted.shape)} on the meta device")


@torch.no_grad()
def check_size_multiple(family: Family, case: TinyCase) -> None:
    """Predict for images whose sides are small multiples of the size multiple, and for one that is half of it."""
    step = case.detect().size_multiple // case.latent_factor
    pipe, denoiser, batch = case.pipe, getattr(case.pipe, family.facts.denoiser_name), case.batch
    t, channels, frames = torch.tensor(TIMESTEPS), batch.latents.shape[1], batch.latents.shape[2:-2]

    def find_problem(height: int, width: int) -> str:
        noisy = torch.zeros(2, channels, *frames, height, width)
        try:
            shape = family.predict(pipe, denoiser, noisy, t, resize_frame_cond(batch, noisy)).shape
        except (RuntimeError, AssertionError, ValueError) as error:
            return str(error).strip().partition("\n")[0] or type(error).__name__
        return "" if shape == noisy.shape else f"predict returns the shape {list(shape)} for {list(noisy.shape)}"

    for height, width in ((step, 3 * step), (5 * step, 2 * step)):
        if problem := find_problem(height, width):
            sides = f"{width * case.latent_factor} x {height * case.latent_factor} pixels"
            raise CheckFailedError(f"the size_multiple of match_configs is too small; {sides}: {problem}")
    if family.build_noise_process(pipe).prediction_type == "flow" and step > 1:
        problem = find_problem(step, 3 * step // 2)
        ensure(bool(problem), "the size_multiple of match_configs is larger than the model needs")


def check_text_encoder_gradients(family: Family, case: TinyCase) -> None:
    """Train text encoders through ``encode_prompts``."""
    if not family.facts.lora.text_encoders:
        raise CheckSkippedError("lora.text_encoders names none")
    cond = family.encode_prompts(case.pipe, ["a red circle"])
    losses = [value.float().square().sum() for rows in cond.values() for value in rows if value.requires_grad]
    ensure(bool(losses), "encode_prompts returns nothing that has a gradient")
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    for name in family.facts.lora.text_encoders:
        parameters = getattr(case.pipe, name).parameters()
        has_gradient = any(bool(each.grad.abs().sum() > 0) for each in parameters if each.grad is not None)
        ensure(has_gradient, f"no gradient reaches {name}")


@torch.no_grad()
def check_encoded_pixels(family: Family, case: TinyCase) -> None:
    """Compare the latents of pixels with those of a pipeline of diffusers that encodes images."""
    reference = case.encode(case.pipe, case.make_pixels(), make_generators())
    ours = family.encode_moments(case.pipe, case.make_pixels()).sample(make_generators())
    ensure_close(ours, reference, "encode_moments returns other latents than diffusers' code for this kind of VAE")
    expected = list(case.batch.latents.shape)
    expected[2] -= case.added_frames
    if family.facts.control.are_layers:
        expected[2] = 1  # that of the picture itself
    if family.frame_rule is not None and family.facts.has_sections:
        expected[2] = family.frame_rule.count_latent_frames(case.num_frames)
    ensure(list(ours.shape) == expected, f"encode_moments returns latents of the shape {list(ours.shape)}")


def get_images(output: Any) -> Any:
    """Return the images of a pipeline's output, or its clips."""
    return output.images if hasattr(output, "images") else output.frames


@torch.no_grad()
def check_decoded_latents(family: Family, case: TinyCase) -> None:
    """Compare the decoded latents with the image that the diffusers pipeline decodes."""
    rows = take_rows(case.batch, case.max_rows)
    arguments = {**case.call, "latents": case.pack_latents(rows.latents), **case.no_guidance}
    if family.facts.pipeline.has_vae:
        reference = get_images(call_pipeline(case, **arguments, output_type="pt"))
    else:  # whose "pt" are the latents
        arrays = get_images(call_pipeline(case, **arguments, output_type="np"))
        reference = torch.from_numpy(arrays).permute(0, 3, 1, 2)
    latents = get_images(call_pipeline(case, **arguments, output_type="latent"))
    ours = family.decode_latents(case.pipe, case.unpack_latents(latents))
    if family.facts.control.are_layers:  # of which diffusers decodes all but the first
        ours, reference = ours[:, :, 1:], torch.stack(list(reference))
    if ours.ndim == 5:
        ours = ours.transpose(1, 2)[:, case.dropped_frames :]  # diffusers' clips have their frames before the channels
    reason = "decode_latents returns another image than the pipeline"
    ensure_close((ours / 2 + 0.5).clamp(0, 1), reference, reason, rtol=1e-5, atol=case.decoding_tolerance)


@torch.no_grad()
def check_round_trip(family: Family, case: TinyCase) -> None:
    """Decode what was encoded: the result is that of the VAE alone."""
    if not family.facts.pipeline.has_vae:
        pixels = case.make_pixels(1)
        restored = family.decode_latents(case.pipe, family.encode_moments(case.pipe, pixels).mean_and_std[:, 0])
        ensure_close(restored, pixels, "decode_latents does not invert encode_moments")
        return
    vae = case.pipe.vae
    moments = family.encode_moments(case.pipe, case.make_pixels(1))
    restored = family.decode_latents(case.pipe, moments.mean_and_std[:, 0])
    is_video_vae = case.batch.latents.ndim == 5 or "temperal_downsample" in vae.config
    vae_input = case.add_channels(case.make_pixels(1))
    encoded = vae.encode(vae_input.unsqueeze(2) if is_video_vae and vae_input.ndim == 4 else vae_input)
    latents = encoded.latent if hasattr(encoded, "latent") else encoded.latent_dist.mode()
    levels = [torch.zeros(1)] if vae.config.get("timestep_conditioning") else []
    expected = case.restore_pixels(vae.decode(latents, *levels).sample)
    restored = restored.squeeze(2) if is_video_vae and restored.ndim == 5 and restored.shape[2] == 1 else restored
    expected = expected.squeeze(2) if is_video_vae and expected.shape[2] == 1 else expected
    reason = "decode_latents does not invert encode_moments: they scale and shift in different ways"
    ensure_close(restored, expected, reason, rtol=1e-3, atol=1e-4 * case.num_frames)


@torch.no_grad()
def check_latent_distribution(family: Family, case: TinyCase) -> None:
    """Draw latents many times: they have the mean and the standard deviation of the moments."""
    corner = case.make_pixels(1)[..., : case.size[0] // 2, : case.size[1] // 2]
    moments = family.encode_moments(case.pipe, corner)
    if not moments.mean_and_std[0, 1].any():  # the model was trained on the mean
        drawn = family.encode_moments(case.pipe, corner).sample(make_generators(1))[0]
        ensure_close(drawn, moments.mean_and_std[0, 0], "latents without a deviation are not their mean")
        return
    copies = corner.expand(NUM_DRAWS, *corner.shape[1:])
    draws = family.encode_moments(case.pipe, copies).sample(make_generators(NUM_DRAWS))
    mean, std = moments.mean_and_std[0]
    ensure(float(std.min()) > 0, "encode_moments returns a standard deviation that is not positive")
    # 400 draws: 7 standard errors
    ensure(float(((draws.mean(0) - mean) / std).abs().max()) < 0.35, "latents are drawn with another mean")
    ensure(float((draws.std(0) / std - 1).abs().max()) < 0.25, "latents are drawn with another standard deviation")


def check_latent_independence(family: Family, case: TinyCase) -> None:
    """Encode an image together with another one and alone."""
    pixels, generators = case.make_pixels(), make_generators()
    batched = family.encode_moments(case.pipe, pixels).sample(make_generators())
    single = family.encode_moments(case.pipe, pixels[1:]).sample(generators[1:])
    ensure_close(batched[1:], single, "encode_moments returns other latents for an image in a batch than alone")
    moments = family.encode_moments(case.pipe, pixels[:1])
    if moments.mean_and_std[:, 1].any():
        other = moments.sample(make_generators()[1:])
        ensure(not torch.allclose(batched[:1], other), "latents do not depend on the generator of their sample")


CHECKS: Mapping[str, Callable[[Family, TinyCase], None]] = {
    "the facts agree with the class": check_facts,
    "the denoiser is called as by the diffusers pipeline": check_denoiser_call,
    "the scheduler samples the clean latents with a perfect model": check_target,
    "prompts are encoded as by the diffusers pipeline": check_prompts,
    "a sample does not depend on the others of its batch": check_sample_independence,
    "a text is encoded alike each time, and alone as with others": check_text_independence,
    "a step on the meta device has the shapes of a real one": check_meta_shapes,
    "the size multiple is the smallest that the model takes": check_size_multiple,
    "text encoders can be trained through the prompts": check_text_encoder_gradients,
    "pixels are encoded as by diffusers": check_encoded_pixels,
    "latents are decoded as by the diffusers pipeline": check_decoded_latents,
    "decoding inverts encoding": check_round_trip,
    "latents have their mean and standard deviation": check_latent_distribution,
    "latents of an image do not depend on the others": check_latent_independence,
}
"""The checks by the sentence that they prove."""
