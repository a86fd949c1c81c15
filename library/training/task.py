"""The training task: from a batch of images and captions to one loss per sample (encode, add noise, predict, loss)."""

import random
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from math import lcm
from typing import Any

import torch
from PIL.Image import Image, fromarray
from torch import Tensor, nn

from ..adapters.injection import scale_adapters
from ..adapters.lora_dropout import LoraDropout
from ..cache.keys import hash_controls
from ..cache.readers import TextReader
from ..dataloader.batch import Batch, Cond, Moments, PixelBatch, concatenate_cond, map_cond_tensors, normalize_pixels
from ..diffusion.masked_loss import reduce_loss_per_sample, resize_mask_to_latents
from ..diffusion.noise import copy_async
from ..diffusion.objective import NoisyBatch, Objective
from ..diffusion.timestep_sampling import draw_timestep_buckets
from ..distributed.step_phases import record_phase
from ..errors import UserError
from ..models.base import ControlTextFamily, Family, T5Family
from ..models.text_encoding import EncodedCaptions, encode_text_on_meta
from ..parallel.async_copy import CopyStream
from ..randomness import Purpose, derive_generator, derive_rng, derive_seed
from .preservation import OutputPreservation, PreservedOutput


@dataclass(frozen=True)
class MicroBatchStats:
    """Statistics of a micro-batch for logging; tensors stay on the device until they are read."""

    noise_fractions: Tensor  # (B,): in 0..1, where 1 is the highest noise level
    losses: Tensor  # (B,): before loss_weights
    loss_weights: Tensor  # (B,): 0 for padding
    sample_keys: tuple[str, ...]
    global_positions: tuple[int, ...]


@dataclass(frozen=True)
class StepInputs:
    """What the loss of a micro-batch is computed from, on the device: after it no more random numbers are drawn."""

    batch: Batch
    noised: NoisyBatch
    dropout_keys: Tensor | None
    """The keys of the samples for LoRA dropout."""
    preserved: tuple[PreservedOutput, ...] = ()
    """Other texts of the samples, for which the model should predict as the base model does."""

    @property
    def loss_weights(self) -> Tensor:
        return self.batch.loss_weights

    def get_tensors(self) -> dict[str, Any]:
        """Return all tensors, in dicts, lists and tuples."""
        parts = {"batch": self.batch, "noised": self.noised}
        tensors = {name: {key: getattr(part, key) for key in TENSOR_FIELDS[name]} for name, part in parts.items()}
        return {**tensors, "dropout_keys": self.dropout_keys}

    def replace_tensors(self, tensors: dict[str, Any]) -> "StepInputs":
        """Return the same inputs with other tensors, for a CUDA graph, in which a family can draw no numbers."""
        batch = replace(self.batch, **tensors["batch"], build_draws=_refuse_draws)
        return StepInputs(batch, replace(self.noised, **tensors["noised"]), tensors["dropout_keys"])


TENSOR_FIELDS = {
    "batch": (
        *("latents", "cond", "size_conditioning", "loss_weights", "mask", "control_latents", "frame_cond"),
        *("sound", "noisy_sound"),
    ),
    "noised": ("latents", "target", "timesteps", "sound_target"),
}


def _refuse_draws(purpose: str) -> list[random.Random]:
    raise UserError(f"--cuda_graphs: the model draws random numbers in its forward ({purpose}); remove the option")


@dataclass
class DiffusionTask:
    """Computes the loss of each sample; distributing samples over processes is up to the strategy."""

    family: Family
    pipe: Any
    denoiser: nn.Module  # the model as the strategy wraps it
    objective: Objective
    seed: int
    to_device: CopyStream
    """Copies tensors to the device asynchronously."""
    normalize_masked_loss: bool = False  # divide by the unmasked area
    vae_batch_size: int = 1
    text_encoder_batch_size: int = 1
    text_reader: TextReader | None = None  # reads cached text encoder outputs
    trains_text_encoders: bool = False
    dropout: LoraDropout | None = None
    conditioning_dropout_prob: float = 0.0
    """The probability of a sample without caption, without control image, and without both, each."""
    preservation: OutputPreservation | None = None
    samples_per_step: int = 1
    """The most samples of an optimizer step over all ranks, by which ``num_timestep_buckets`` counts samples."""
    resolution_sides: tuple[int, ...] = ()
    """Sides in pixels of squares with the areas of the datasets' resolutions."""
    only_expert: str = ""
    """The expert that all steps train, where it is not drawn."""
    pads_texts: bool = False
    """Whether texts are padded, so that fewer batches differ in shape."""
    encoded_captions: EncodedCaptions = field(default_factory=EncodedCaptions)
    micro_batch_stats: list[MicroBatchStats] = field(default_factory=list)
    """The statistics of each micro-batch of the latest optimizer step on this rank."""
    stats_step: int = -1
    """The optimizer step of ``micro_batch_stats``."""

    def __call__(self, pixel_batch: PixelBatch, step: int) -> Tensor:
        """Compute the weighted losses (B,) of a batch in optimizer step ``step``."""
        inputs = self.prepare(pixel_batch, step)
        losses = self.compute_losses(inputs)
        self.record_losses(inputs, losses.detach(), step)
        return losses * inputs.loss_weights

    def prepare(self, pixel_batch: PixelBatch, step: int) -> StepInputs:
        """Encode images and captions, and add noise: all that the host takes part in."""
        self.seed_dropout(pixel_batch, step)
        with record_phase("encode", pixel_batch):
            batch = self.encode(pixel_batch, step)
        batch = self.family.select_section(batch, derive_rng(self.seed, Purpose.SECTION, step).random())
        draws = partial(self._build_draws, step=step, global_positions=batch.global_positions)
        expert, quantiles = self._draw_expert(step, batch.latents)
        controls = self._drop_controls(batch.control_latents, pixel_batch.captions, draws)
        batch = replace(batch, build_draws=draws, expert=expert, control_latents=controls)
        noised = self.objective.add_noise(
            batch.latents,
            partial(self.build_generators, step=step, global_positions=batch.global_positions),
            self._draw_timestep_buckets(step, batch.global_positions),
            quantiles,
        )
        batch, noised = self.add_noise_to_sound(
            batch, noised, self.build_generators(Purpose.SOUND_NOISE, step, batch.global_positions)
        )
        dropout_keys = None if self.dropout is None else self.dropout.sample_keys
        return StepInputs(batch, noised, dropout_keys, self._prepare_preserved(pixel_batch, batch, noised))

    def add_noise_to_sound(
        self, batch: Batch, noised: NoisyBatch, generators: Sequence[torch.Generator]
    ) -> tuple[Batch, NoisyBatch]:
        """Noise the sound of the samples, if they have some, at the timesteps that belong to those of their frames."""
        if batch.sound is None:
            return batch, noised
        drawn = torch.stack([torch.randn(batch.sound.shape[1:], generator=each) for each in generators])
        timesteps = self.family.convert_to_sound_timesteps(noised.timesteps)
        sound = self.objective.add_noise_at(batch.sound, copy_async(drawn, batch.sound), timesteps)
        return replace(batch, noisy_sound=sound.latents), replace(noised, sound_target=sound.target)

    def _prepare_preserved(
        self, pixel_batch: PixelBatch, batch: Batch, noised: NoisyBatch
    ) -> tuple[PreservedOutput, ...]:
        """Encode the texts for which the output is preserved, and predict their targets with the base model."""
        if self.preservation is None:
            return ()
        outputs = []
        for texts in self.preservation.list_texts(pixel_batch.captions):
            with torch.no_grad():
                cond = self._encode_other_captions(pixel_batch, texts.captions)
            weights = self.to_device(texts.weights)
            other = replace(batch, cond=cond)
            outputs.append(self.preservation.build_output(self.family, self.pipe, noised, other, weights))
        return tuple(outputs)

    def _drop_controls(
        self, controls: tuple[Tensor, ...], captions: Sequence[str], build_draws: Callable[[str], list[random.Random]]
    ) -> tuple[Tensor, ...]:
        """Set the latents of the pictures of some samples to zero, as diffusers' training of InstructPix2Pix does.

        Captions are dropped twice as often as captions alone, so half of those without caption lose their picture.
        """
        share = self.conditioning_dropout_prob
        if not share or not controls:
            return controls
        chances = [0.5 if caption == "" else share / (1 - 2 * share) for caption in captions]
        draws = [draw.random() for draw in build_draws(Purpose.CONTROL_DROPOUT)]
        kept = self.to_device(torch.tensor([draw >= chance for draw, chance in zip(draws, chances, strict=True)]))
        return tuple(each * kept.view(-1, *[1] * (each.ndim - 1)) for each in controls)

    def _encode_other_captions(self, pixel_batch: PixelBatch, captions: Sequence[str]) -> Cond:
        """Encode other captions of the samples with their control images, or read them from the cache."""
        if self.text_reader is not None:
            cached = self.text_reader.read_batch_cond(pixel_batch, captions)
            return self._encode_captions(captions, cached)
        return self._encode_captions(captions, None, self._list_text_images(pixel_batch))

    def compute_losses(self, inputs: StepInputs, denoiser: nn.Module | None = None) -> Tensor:
        """Compute the loss of each sample (B,), before its weight, on the device alone.

        ``denoiser``: instead of the model as the strategy wraps it.
        """
        batch, noised = inputs.batch, inputs.noised
        if self.dropout is not None:
            self.dropout.sample_keys = inputs.dropout_keys
        denoiser = self.denoiser if denoiser is None else denoiser
        losses = self.compute_prediction_losses(denoiser, batch, noised)
        for preserved in inputs.preserved:
            losses = losses + preserved.weights * self._compute_preserved_losses(preserved, denoiser)
        return losses * self.objective.compute_loss_weights(noised.timesteps)

    def compute_prediction_losses(self, denoiser: nn.Module, batch: Batch, noised: NoisyBatch) -> Tensor:
        """Compute the loss of each sample (B,) without any weight of its timestep: of its frames, and of its sound."""
        predicted, sound = self.family.predict_with_sound(self.pipe, denoiser, noised.latents, noised.timesteps, batch)
        loss = self.family.select_trained_frames(self.objective.compute_elementwise_loss(predicted, noised), batch)
        losses = reduce_loss_per_sample(loss, batch.mask, normalize_by_area=self.normalize_masked_loss)
        if sound is None or batch.noisy_sound is None or noised.sound_target is None:
            return losses
        timesteps = self.family.convert_to_sound_timesteps(noised.timesteps)
        noisy_sound = NoisyBatch(batch.noisy_sound, noised.sound_target, timesteps)
        loss = self.objective.compute_elementwise_loss(sound, noisy_sound)
        return losses + self.objective.loss_config.audio_loss_weight * reduce_loss_per_sample(loss, None)

    def _compute_preserved_losses(self, preserved: PreservedOutput, denoiser: nn.Module) -> Tensor:
        """Compute the loss of each sample (B,) against the prediction of the base model, of the whole image."""
        noised = preserved.noised
        predicted = self.family.predict(self.pipe, denoiser, noised.latents, noised.timesteps, preserved.batch)
        loss = self.objective.compute_elementwise_loss(predicted, noised)
        return reduce_loss_per_sample(
            self.family.select_trained_frames(loss, preserved.batch), None, normalize_by_area=False
        )

    def record_losses(self, inputs: StepInputs, losses: Tensor, step: int) -> None:
        """Keep the losses of a micro-batch for logging."""
        batch, fractions = inputs.batch, inputs.noised.timesteps / self.objective.process.num_timesteps
        stats = MicroBatchStats(fractions, losses, batch.loss_weights, batch.sample_keys, batch.global_positions)
        self._record_stats(stats, step)

    def _draw_expert(self, step: int, latents: Tensor) -> tuple[str, tuple[float, float]]:
        """Draw the expert that a step trains, and the quantiles of its noise levels; none and all without experts."""
        experts, distribution = self.family.experts, self.objective.distribution
        if experts is None or distribution is None:
            return "", (0.0, 1.0)
        expert = self.only_expert or experts.draw(self.seed, step, distribution)
        num_tokens = self.objective.count_tokens(latents.shape)
        return expert, experts.get_quantiles(expert, distribution, num_tokens)

    def list_expert_tasks(self) -> "list[DiffusionTask]":
        """This task, or of a model of two experts one for either, whatever the step."""
        experts = self.family.experts
        return [self] if experts is None else [replace(self, only_expert=name) for name in experts.list_trained()]

    def _draw_timestep_buckets(self, step: int, global_positions: Sequence[int]) -> Sequence[int]:
        """Draw the timestep buckets of samples by their number in the run; none without ``num_timestep_buckets``."""
        count = self.objective.noise_config.num_timestep_buckets or 1
        numbers = [step * self.samples_per_step + position for position in global_positions]
        return draw_timestep_buckets(self.seed, count, numbers) if count > 1 else ()

    def scale_adapter(self, pixel_batch: PixelBatch) -> AbstractContextManager[None]:
        """Return a context for forward and backward in which the adapter has the strength of the batch."""
        return scale_adapters(self.denoiser, pixel_batch.network_multiplier)

    def seed_dropout(self, pixel_batch: PixelBatch, step: int) -> None:
        """Seed LoRA dropout by step and sample, so that recomputation in the backward pass drops the same."""
        if self.dropout is not None:
            keys = [
                derive_seed(self.seed, Purpose.LORA_DROPOUT, step, position) % 2**62
                for position in pixel_batch.global_positions
            ]
            self.dropout.sample_keys = self.to_device(torch.tensor(keys))

    def _record_stats(self, stats: MicroBatchStats, step: int) -> None:
        """Keep the statistics of a step once per micro-batch and in the plan's order, however often it was run."""
        if step != self.stats_step:
            self.micro_batch_stats, self.stats_step = [], step
        self.micro_batch_stats[:] = sorted(
            [*(each for each in self.micro_batch_stats if each.global_positions != stats.global_positions), stats],
            key=lambda each: each.global_positions,
        )

    def get_shape_key(self, pixel_batch: PixelBatch) -> Hashable:
        """Return a key that is equal for batches whose tensors have equal shapes."""
        text = self._compute_text_length(pixel_batch) if self.family.facts.text.has_variable_length else None
        size = tuple(pixel_batch.size_conditioning[0, -2:].tolist())
        controls = [each.shape[-2:] for each in pixel_batch.control_pixels or pixel_batch.control_latents]
        frames = pixel_batch.frame_shape, pixel_batch.sound is None
        shapes = tuple(controls), pixel_batch.num_references
        return len(pixel_batch), size, frames, shapes, pixel_batch.mask is None, text

    def _compute_text_length(self, pixel_batch: PixelBatch) -> int:
        """Compute the padded length of the longest text, without encoding it."""
        sizes = [(pixels.shape[-1], pixels.shape[-2]) for pixels in pixel_batch.control_pixels]
        cond = pixel_batch.cond or encode_text_on_meta(self.family, self.pipe, pixel_batch.captions, sizes)
        longest = max(len(text) for texts in cond.values() for text in texts)
        multiple = lcm(self.family.facts.text.denoiser_pad_multiple, self._text_pad_multiple)
        return -(-longest // multiple) * multiple

    @property
    def _text_pad_multiple(self) -> int:
        return self.family.facts.text.pad_multiple if self.pads_texts else 1

    def reset_stats(self) -> None:
        """Forget the statistics of the current step, which is retried."""
        self.stats_step = -1

    def encode(self, pixel_batch: PixelBatch, step: int) -> Batch:
        """Encode images to latents and captions to conditioning, unless they are cached."""
        with torch.set_grad_enabled(self.trains_text_encoders and torch.is_grad_enabled()):
            controls = self._list_text_images(pixel_batch) if pixel_batch.cond is None else ()
            cond = self._encode_captions(pixel_batch.captions, pixel_batch.cond, controls)
        with torch.no_grad():
            return self._build_batch(pixel_batch, cond, step)

    def _build_batch(self, pixel_batch: PixelBatch, cond: Cond, step: int) -> Batch:
        moments, frame_cond = self._encode_images(pixel_batch)
        frame_cond |= self._encode_control_cond(pixel_batch)
        latents = moments.sample(self.build_generators(Purpose.LATENT_SAMPLE, step, pixel_batch.global_positions))
        size_conditioning = self.to_device(pixel_batch.size_conditioning)
        loss_weights = self.to_device(pixel_batch.loss_weights)
        mask = None if pixel_batch.latent_mask is None else self.to_device(pixel_batch.latent_mask)
        if pixel_batch.mask is not None:
            mask = resize_mask_to_latents(self.to_device(pixel_batch.mask), (latents.shape[-2], latents.shape[-1]))
        batch = Batch(
            latents=latents,
            cond=cond,
            size_conditioning=size_conditioning,
            loss_weights=loss_weights,
            global_positions=pixel_batch.global_positions,
            sample_keys=pixel_batch.sample_keys,
            mask=mask,
            text_pad_multiple=self._text_pad_multiple,
            control_latents=self._encode_controls(pixel_batch),
            resolution_sides=self.resolution_sides,
            frame_cond=frame_cond,
            sound=None if pixel_batch.sound is None else self.to_device(pixel_batch.sound).float(),
        )
        return self.family.arrange_batch(batch)

    def _encode_images(self, pixel_batch: PixelBatch) -> tuple[Moments, dict[str, Tensor]]:
        """Encode images or clips, and what the model gets of their own frames, unless both are cached."""
        if pixel_batch.moments is not None:
            copied = {name: self.to_device(value) for name, value in (pixel_batch.frame_cond or {}).items()}
            frame_cond = {name: value.float() if value.is_floating_point() else value for name, value in copied.items()}
            return Moments(self.to_device(pixel_batch.moments.mean_and_std)), frame_cond
        if pixel_batch.pixels is None:
            raise AssertionError("a batch has pixels or moments")
        moments, parts = list[Tensor](), list[dict[str, Tensor]]()
        with torch.autocast(self.to_device.device.type, enabled=False):  # the VAE overflows in half precision
            for part in torch.split(pixel_batch.pixels, self.vae_batch_size):
                pixels = normalize_pixels(self.to_device(part))
                encoded = self.family.encode_moments(self.pipe, pixels)
                moments.append(encoded.mean_and_std)
                parts.append(self.family.encode_frame_cond(self.pipe, pixels, encoded))
        return Moments(torch.cat(moments)), {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _encode_control_cond(self, pixel_batch: PixelBatch) -> dict[str, Tensor]:
        """Encode what else the denoiser gets of control images; with cached latents it is cached, too."""
        if not pixel_batch.control_pixels:
            return {}
        controls = [normalize_pixels(self.to_device(each)) for each in pixel_batch.control_pixels]
        with torch.autocast(self.to_device.device.type, enabled=False):
            return self.family.encode_control_cond(self.pipe, controls)

    def _encode_controls(self, pixel_batch: PixelBatch) -> tuple[Tensor, ...]:
        """Encode control images, unless they are cached; diffusers' pipelines draw no samples of them either."""
        if pixel_batch.control_latents:
            copied = map(self.to_device, pixel_batch.control_latents)
            return tuple(each.float() if each.is_floating_point() else each for each in copied)
        if not pixel_batch.control_pixels:
            return ()
        if pixel_batch.pixels is None:
            raise AssertionError("control images are cached together with the moments of their pictures")
        every = (pixel_batch.pixels, *pixel_batch.control_pixels)
        encoded = []
        with torch.autocast(self.to_device.device.type, enabled=False):  # the VAE overflows in half precision
            for part in zip(*(torch.split(each, self.vae_batch_size) for each in every), strict=True):
                pixels, *controls = (normalize_pixels(self.to_device(each)) for each in part)
                count = pixel_batch.num_references
                encoded.append(self.family.encode_all_controls(self.pipe, controls, pixels, count))
        return tuple(map(torch.cat, zip(*encoded, strict=True)))

    def encode_moments(self, pixels: Tensor | None) -> Moments:
        """Encode images with the VAE, ``vae_batch_size`` at a time."""
        if pixels is None:
            raise AssertionError("a batch has pixels or moments")
        with torch.autocast(self.to_device.device.type, enabled=False):  # the VAE overflows in half precision
            parts = [
                self.family.encode_moments(self.pipe, normalize_pixels(self.to_device(part))).mean_and_std
                for part in torch.split(pixels, self.vae_batch_size)
            ]
        return Moments(torch.cat(parts))

    def encode_text(
        self, captions: Sequence[str], controls: Sequence[Sequence[Image]] = (), *, is_negative: bool = False
    ) -> Cond:
        """Return conditioning for captions, each with its control images: from the cache, or from the text encoders.

        ``is_negative``: they are negative prompts, which some families encode in another way.
        """
        keys, is_apart = (
            list(map(hash_controls, controls)),
            is_negative and self.family.facts.text.has_negative_encoding,
        )
        cached = None if self.text_reader is None else self.text_reader.read_cond(captions, keys, is_negative=is_apart)
        if is_apart and cached is None:
            return self.family.encode_negative_prompts(self.pipe, captions)
        return self._encode_captions(captions, cached, controls)

    def _list_text_images(self, pixel_batch: PixelBatch) -> list[list[Image]]:
        """The images of each sample that the text encoder reads with its caption."""
        kind, pixels = self.family.facts.text_images, pixel_batch.pixels
        if kind == "none":
            return []
        if kind == "first frame":
            if pixels is None:
                raise AssertionError("captions are cached where latents are, if they are read with the first frame")
            first = pixels[:, :, 0] if pixels.ndim == 5 else pixels
            return [[fromarray(frame)] for frame in first.permute(0, 2, 3, 1).contiguous().numpy()]
        if not pixel_batch.control_pixels:
            if pixel_batch.control_latents:
                raise AssertionError("captions are cached where latents are, if they are read with control images")
            return [[] for _ in pixel_batch.captions]
        rows = zip(*(pixels.permute(0, 2, 3, 1).numpy() for pixels in pixel_batch.control_pixels), strict=True)
        return [list(map(fromarray, row)) for row in rows]

    def _encode_captions(
        self, captions: Sequence[str], cached: Cond | None, controls: Sequence[Sequence[Image]] = ()
    ) -> Cond:
        """Encode what is not cached; ``cached`` is all, or the part of T5 while CLIP is trained."""
        if cached is not None:
            cached = map_cond_tensors(cached, self.to_device)
            if not self.trains_text_encoders:
                return cached
            if not isinstance(self.family, T5Family):
                raise AssertionError("text encoders are trained beside cached outputs only where these are of T5 alone")
            return self.family.encode_clip_prompts(self.pipe, captions, cached)
        # Trained text encoders keep their graph for the whole batch anyway.
        size = len(captions) if self.trains_text_encoders else self.text_encoder_batch_size
        if size == 1 and not self.trains_text_encoders and not isinstance(self.family, ControlTextFamily):
            encode_text = partial(self.family.encode_prompts, self.pipe)
            is_autocast = torch.is_autocast_enabled(self.to_device.device.type)
            return concatenate_cond(self.encoded_captions.encode(captions, encode_text, is_autocast=is_autocast))
        parts = [slice(first, first + size) for first in range(0, len(captions), size)]
        if isinstance(self.family, ControlTextFamily):
            encode = self.family.encode_prompts_with_controls
            return concatenate_cond([encode(self.pipe, captions[part], controls[part]) for part in parts])
        return concatenate_cond([self.family.encode_prompts(self.pipe, list(captions[part])) for part in parts])

    def _build_draws(self, purpose: str, step: int, global_positions: tuple[int, ...]) -> list[random.Random]:
        """Build one generator per sample for what families draw, seeded as those of noise are."""
        return [derive_rng(self.seed, purpose, step, position) for position in global_positions]

    def build_generators(self, purpose: str, step: int, global_positions: tuple[int, ...]) -> list[torch.Generator]:
        """Build one generator per sample, seeded by (seed, purpose, step, position in the step).

        So one device with four micro-batches, four devices with one, and a resumed run draw the same noise.
        """
        return [derive_generator(self.seed, purpose, step, position) for position in global_positions]
