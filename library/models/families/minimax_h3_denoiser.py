"""diffusers' transformer of MiniMax H3 for batches: samples with noise levels and lengths of text of their own.

diffusers' packs one sample: the noise levels, positions and kinds of tokens are given once, for all rows of a batch.
Here each sample has a row of noise levels, and texts are padded before their first token.  The positions of all samples
are the same then, since attention depends on differences of positions only, and padding is masked.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ...registry import copy_class_name

if TYPE_CHECKING:
    from torch import Tensor

TEXT_MASK = "encoder_attention_mask"
"""An argument of the denoiser that diffusers' has not: which tokens of a text (B, tokens) are no padding."""


def prepare_for_batches(denoiser: Any) -> None:
    """Let the transformer take noise levels (B, levels) in place of (levels), and a mask of texts."""
    module: Any = import_module("diffusers.models.transformers.transformer_minimax_h3")
    if hasattr(denoiser.rope, "text_mask"):  # prepared before
        return
    denoiser.register_forward_pre_hook(_take_text_mask, with_kwargs=True)
    denoiser.time_proj.__class__ = _build_time_class(type(denoiser.time_proj))
    denoiser.rope.__class__ = _build_position_class(module.MiniMaxH3RotaryPosEmbed)
    denoiser.token_refiner.__class__ = _build_refiner_class(module.MiniMaxH3TokenRefiner)
    denoiser.norm_out.__class__ = _build_norm_class(module.MiniMaxH3AdaLayerNormOut)
    block_class = _build_block_class(module.MiniMaxH3TransformerBlock)
    processor = _build_attention_processor(module.MiniMaxH3AttnProcessor, 6 * denoiser.rope.rope_freq_dim)
    for block in denoiser.transformer_blocks:
        block.__class__ = block_class
        block.attn.set_processor(processor)
    refiner_class = _build_refiner_block_class(module.MiniMaxH3TokenRefinerBlock)
    for block in denoiser.token_refiner.refiner_blocks:
        block.__class__ = refiner_class


def _take_text_mask(denoiser: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Keep the mask of a forward where its parts look for it: in the modules of positions and of texts."""
    mask = kwargs.get(TEXT_MASK)
    denoiser.rope.text_mask = denoiser.token_refiner.text_mask = mask
    return args, {name: value for name, value in kwargs.items() if name != TEXT_MASK}


def _build_time_class(time_class: Any) -> Any:
    """The sinusoids of noise levels, which may have several axes."""

    class SampleTimes(time_class):  # type: ignore[misc]
        def forward(self, timesteps: Tensor) -> Tensor:
            states: Tensor = super().forward(timesteps.flatten())
            return states.view(*timesteps.shape, -1)

    return copy_class_name(SampleTimes, time_class)


def _build_position_class(position_class: Any) -> Any:
    """The rotary positions of tokens, with a column for each sample: whether the token is no padding of its text.

    What the positions give goes to every block, on a shard of the tokens as well, and to its recomputation.
    """
    import torch

    class MaskedPositions(position_class):  # type: ignore[misc]
        text_mask: Tensor | None = None

        def forward(self, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = super().forward(position_ids)
            if self.text_mask is None:
                return cos, sin
            padding = len(position_ids) - self.text_mask.shape[1]
            mask = torch.nn.functional.pad(self.text_mask.to(cos), (0, padding), value=1.0).T
            return torch.cat([cos, mask], dim=1), torch.cat([sin, mask], dim=1)

    return copy_class_name(MaskedPositions, position_class)


def _build_attention_processor(processor_class: Any, width: int) -> Any:
    """diffusers' attention with the mask that the positions carry after so many columns, if they do."""

    class TextMaskProcessor(processor_class):  # type: ignore[misc]
        def __call__(self, attn: Any, hidden_states: Tensor, rotary_emb: Any = None, attention_mask: Any = None) -> Any:
            cos, sin = rotary_emb
            if cos.shape[1] > width:
                attention_mask = cos[:, width:].T.bool()[:, None, None]
            return super().__call__(attn, hidden_states, (cos[:, :width], sin[:, :width]), attention_mask)

    return TextMaskProcessor()


def _build_refiner_class(refiner_class: Any) -> Any:
    """The blocks for the text alone, with a mask of its padding."""
    import torch

    class MaskedRefiner(refiner_class):  # type: ignore[misc]
        text_mask: Tensor | None = None

        def forward(self, hidden_states: Tensor) -> Any:
            if self.text_mask is None:
                return super().forward(hidden_states)
            mask = self.text_mask.bool()[:, None, None]
            for block in self.refiner_blocks:
                if torch.is_grad_enabled() and self.gradient_checkpointing:
                    hidden_states = self._gradient_checkpointing_func(block, hidden_states, mask)
                else:
                    hidden_states = block(hidden_states, mask)
            return self.final_norm(hidden_states)

    return copy_class_name(MaskedRefiner, refiner_class)


def _build_refiner_block_class(block_class: Any) -> Any:
    """A block for the text alone, with a mask."""

    class MaskedRefinerBlock(block_class):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None) -> Any:
            hidden_states = hidden_states + self.attn(self.norm1(hidden_states), None, attention_mask)
            return hidden_states + self.ff(self.norm2(hidden_states))

    return copy_class_name(MaskedRefinerBlock, block_class)


def _build_block_class(block_class: Any) -> Any:
    """A block whose modulation has a table for each sample, of a row for each pair of noise level and kind of token."""

    class SampleBlock(block_class):  # type: ignore[misc]
        def forward(
            self,
            hidden_states: Tensor,
            temb: Tensor,
            adaln_indices: Tensor,
            rotary_emb: tuple[Tensor, Tensor],
            attention_mask: Tensor | None = None,
        ) -> Any:
            if temb.ndim == 2:
                return super().forward(hidden_states, temb, adaln_indices, rotary_emb, attention_mask)
            tables = (table.view(len(temb), -1, table.shape[-1]) for table in self.adaln_proj(temb))
            shift, scale, gate, ff_shift, ff_scale, ff_gate = (each.index_select(1, adaln_indices) for each in tables)
            states = self.norm1(hidden_states) * (1 + scale) + shift
            hidden_states = hidden_states + gate * self.attn(states, rotary_emb, attention_mask)
            states = self.norm2(hidden_states) * (1 + ff_scale) + ff_shift
            return hidden_states + ff_gate * self.ff(states)

    return copy_class_name(SampleBlock, block_class)


def _build_norm_class(norm_class: Any) -> Any:
    """The last norm, whose shift and scale follow from the noise levels of each sample."""
    from diffusers.models.modeling_utils import get_parameter_dtype
    from torch.nn.functional import silu

    class SampleNorm(norm_class):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, temb: Tensor, timestep_indices: Tensor) -> Any:
            if temb.ndim == 2:
                return super().forward(hidden_states, temb, timestep_indices)
            modulation = self.linear(silu(temb).to(get_parameter_dtype(self.linear)))
            shift, scale = modulation.index_select(1, timestep_indices).chunk(2, dim=-1)
            return self.norm(hidden_states) * (1 + scale) + shift

    return copy_class_name(SampleNorm, norm_class)
