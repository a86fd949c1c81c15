"""Video models that are trained on the sound of clips, too: what their families have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .base import Family

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor, nn

    from ..dataloader.batch import Batch, Cond
    from ..dataloader.sample_prompts import Prompt
    from ..dataset.clip_encoding import SoundTrack

SILENT_STEPS = "steps of clips without sound give the layers of sound no gradient (train_audio)"
"""Why a model with sound cannot be trained by what expects a gradient of each layer in every step."""


class TrainedSound(Family):
    """A denoiser that returns what it predicts of frames and of sound, where it is given sound.

    Clips without sound are trained in steps of their own.  The class stands before that of the model without sound,
    and ``encode_sound`` and ``decode_sampled_sound`` are the family's.
    """

    @classmethod
    def prepare_denoiser(cls, denoiser: nn.Module) -> None:
        super().prepare_denoiser(denoiser)
        denoiser.has_silent_steps = True  # type: ignore[assignment]

    def get_unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        return ()

    def predict_with_sound(
        self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch
    ) -> tuple[Tensor, Tensor | None]:
        outputs = list[Any]()

        def keep_output(**inputs: Any) -> Any:
            outputs.append(denoiser(**inputs))
            return outputs[0]

        call: Any = keep_output
        predicted = self.predict(pipe, call, noisy_latents, timesteps, batch)
        return predicted, None if batch.noisy_sound is None else outputs[0][1]

    def generate_clip(
        self,
        pipe: Any,
        prompt: Prompt,
        cond: Cond,
        negative_cond: Cond,
        generator: torch.Generator,
        sampler: str | None,
    ) -> tuple[list[Image], SoundTrack | None]:
        from .sampling import sample_clip

        sampling_kwargs = self.build_prompt_kwargs(pipe, prompt, cond, negative_cond)
        frames, sound = sample_clip(self, pipe, prompt, sampling_kwargs, generator=generator, sampler=sampler)
        return frames, sound if len(frames) > 1 else None
