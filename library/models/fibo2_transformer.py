"""The transformer of Bria Fibo 2 without waiting for the device: diffusers' reads the lengths of texts on the host.

A text is squeezed into gist tokens, more of them for a longer one.  diffusers (0.42) counts those of each text of a
batch in every step from the mask of the texts.  Here each text gets as many as one that fills the padded length, and
those that it would not have are masked: the length is that of a shape, which compiled code and CUDA graphs know.
"""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import BriaFibo2Transformer2DModel
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_bria_fibo2 import compute_gist_count
from torch import Tensor

from ..registry import copy_class_name
from .constant_copies import copy_constant

_transformer: Any = BriaFibo2Transformer2DModel
_compute_gist_count: Any = compute_gist_count


class UncountedTransformer(_transformer):  # type: ignore[misc]
    """diffusers' transformer, whose gist tokens are behind those of the image and its references.

    diffusers has them there as well where texts differ; so the numbers of the other tokens do not depend on a text.
    """

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        encoder_hidden_states: Tensor,
        encoder_attention_mask: Tensor | None = None,
        context_latents: list[Tensor] | None = None,
        return_dict: bool = True,
    ) -> Any:
        """Predict the velocity of ``hidden_states``; see diffusers' class."""
        images = [hidden_states, *(context_latents or ())]
        tokens, rotation = self._embed_images(images)
        rows, columns = self._get_grid(hidden_states)
        num_tokens, texts = tokens.shape[1], encoder_hidden_states.unbind(1)
        noisy = self.t_embedder(timestep * self.config.t_scale)
        modulation = noisy, self.t_embedder(torch.zeros_like(timestep))
        counts = self._count_gist_tokens(texts[0].shape[1])
        noise_mask = torch.arange(num_tokens + counts[-1], device=tokens.device) < rows * columns
        noise_mask = noise_mask.long().expand(len(tokens), -1)

        refined = noise_mask[:, :num_tokens] if context_latents else None
        for block in self.noise_refiner:
            tokens = self._run_block(block, tokens, None, rotation, noisy, refined, *modulation)
        gist_mask = None if encoder_attention_mask is None else _mask_gist_tokens(counts, encoder_attention_mask)
        gist = self.perceiver(texts[0], counts[-1], encoder_attention_mask, gist_mask)
        tokens = torch.cat([tokens, gist], dim=1)
        rotation = torch.cat([rotation, self._rotate_grid((counts[-1], 1, 1), 1, tokens.device)], dim=1)
        mask = None if gist_mask is None else torch.nn.functional.pad(gist_mask, (num_tokens, 0), value=True)
        read = dict(zip(self.config.injection_layer_ids, texts[1:], strict=True))
        for number, block in enumerate(self.layers):
            text = read.get(number), encoder_attention_mask
            tokens = self._run_block(block, tokens, mask, rotation, None, noise_mask, *modulation, *text)

        output = self.final_layer(tokens[:, : rows * columns], c=noisy).unflatten(1, (rows, columns))
        side = self.config.patch_size
        output = output.unflatten(3, (-1, side, side)).permute((0, 3, 1, 4, 2, 5)).flatten(4, 5).flatten(2, 3)
        return Transformer2DModelOutput(sample=output) if return_dict else (output,)

    def _run_block(self, block: Any, *args: Any) -> Tensor:
        is_checkpointed = torch.is_grad_enabled() and self.gradient_checkpointing
        output: Tensor = self._gradient_checkpointing_func(block, *args) if is_checkpointed else block(*args)
        return output

    def _embed_images(self, images: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Embed the patches of images; the first is in the plane of positions after all gist tokens."""
        plane, device = self.config.max_num_gist_tokens + 1, images[0].device
        grids = [(1, *self._get_grid(image)) for image in images]
        rotations = [self._rotate_grid(grid, plane + number, device) for number, grid in enumerate(grids)]
        patches = torch.cat([self._patchify(image) for image in images], dim=1)
        return self.x_embedder(patches), torch.cat(rotations, dim=1)

    def _get_grid(self, image: Tensor) -> tuple[int, int]:
        return image.shape[2] // self.config.patch_size, image.shape[3] // self.config.patch_size

    def _rotate_grid(self, grid: tuple[int, int, int], plane: int, device: torch.device) -> Tensor:
        """Return the rotary embedding (1, tokens, ...) of a grid whose first position is in this plane."""
        rotation: Tensor = self.rope_embedder(self.create_coordinate_grid(grid, (plane, 0, 0), device).flatten(0, 2))
        return rotation.unsqueeze(0)

    def _count_gist_tokens(self, max_length: int) -> list[int]:
        """Count the gist tokens of texts of 0, 1 ... ``max_length`` tokens."""
        config = self.config
        counts: list[int] = _compute_gist_count(
            list(range(max_length + 1)),
            min_gist=config.min_num_gist_tokens,
            max_gist=config.max_num_gist_tokens,
            gist_step=config.gist_step,
            min_text_len=config.gist_min_text_len,
            max_text_len=config.gist_max_text_len,
        )
        return counts


def count_on_the_device(denoiser: Any) -> None:
    """Let a transformer of diffusers' class count the tokens of texts on its device."""
    denoiser.__class__ = copy_class_name(UncountedTransformer, BriaFibo2Transformer2DModel)


def _mask_gist_tokens(counts: Sequence[int], text_mask: Tensor) -> Tensor:
    """Mask the gist tokens (B, tokens) that texts with this mask do not have."""
    table = copy_constant(torch.tensor(counts), text_mask.device)
    numbers = torch.arange(counts[-1], device=text_mask.device)
    return numbers < table[text_mask.long().sum(dim=1)].unsqueeze(1)
