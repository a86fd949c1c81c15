"""Video models that are given the first frame as clean latents at noise level 0, each token with a time of its own."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any

from .base import Family

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..dataloader.batch import Batch, Moments


class CleanFirstFrame(Family):
    """The first frame of each clip is given, and is not trained.

    An image has no other frame and is trained as from text alone.  The class stands before that of the model that is
    trained from text.
    """

    def encode_frame_cond(self, pipe: Any, pixels: Tensor, moments: Moments) -> dict[str, Tensor]:
        """The latents of the first frame, which do not depend on later frames."""
        return {"first": moments.mean_and_std[:, 0, :, :1].clone()}  # which may be all of the moments of an image

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        if noisy_latents.shape[2] == 1:
            return super().predict(pipe, denoiser, noisy_latents, timesteps, batch)  # type: ignore[safe-super]
        num_frames, height, width = noisy_latents.shape[2:]
        tokens_per_frame = self.count_frame_tokens(pipe, height, width)
        times = timesteps[:, None, None].expand(-1, num_frames, tokens_per_frame).clone()
        times[:, 0] = 0
        latents = torch.cat([batch.frame_cond["first"].to(noisy_latents), noisy_latents[:, :, 1:]], dim=2)
        return self.predict_with_token_times(pipe, denoiser, latents, timesteps, times.flatten(1), batch=batch)

    def count_frame_tokens(self, pipe: Any, height: int, width: int) -> int:
        """Count the tokens of a frame of latents."""
        return height * width

    @abstractmethod
    def predict_with_token_times(
        self, pipe: Any, denoiser: nn.Module, latents: Tensor, timesteps: Tensor, token_times: Tensor, *, batch: Batch
    ) -> Tensor:
        """Run the denoiser with a time of each token (B, tokens) beside that of each sample."""

    def select_trained_frames(self, loss: Tensor, batch: Batch) -> Tensor:
        return loss[:, :, 1:] if loss.shape[2] > 1 else loss
