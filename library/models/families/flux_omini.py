"""FLUX.1 with ``--control omini``: condition images as further tokens, as OminiControl trains them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import DIFFUSERS_KEYS
from ...config.network_args import GENERAL_NETWORK
from ..facts import ControlFacts
from ..shared_facts import MASKED_ATTENTION_MODES
from .flux import FACTS as FLUX_FACTS
from .flux import FLUX_KEYS, XLABS_KEYS, Flux

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt

_TOKENS_REASON = "control omini has tokens of its own kind in every block, which are not split"

FACTS = replace(
    FLUX_FACTS,
    title="FLUX.1 with control omini",
    lora=replace(
        FLUX_FACTS.lora,
        # All that condition tokens pass through, but the first layer of the double blocks' MLP; as OminiControl.
        targets=(
            "x_embedder",
            "norm1.linear",
            "transformer_blocks.*.attn.to_q",
            "transformer_blocks.*.attn.to_k",
            "transformer_blocks.*.attn.to_v",
            "attn.to_out.0",
            "transformer_blocks.*.ff.net.2",
            "single_transformer_blocks.*.norm.linear",
            "proj_mlp",
            "single_transformer_blocks.*.proj_out",
            "single_transformer_blocks.*.attn.to_q",
            "single_transformer_blocks.*.attn.to_k",
            "single_transformer_blocks.*.attn.to_v",
        ),
        targets_of="OminiControl",
        text_encoders={},
        key_style=DIFFUSERS_KEYS,
        other_key_styles=(FLUX_KEYS, XLABS_KEYS),
        format="diffusers",
    ),
    blocks=replace(
        FLUX_FACTS.blocks,
        unsupported_strategies=dict.fromkeys(("tp", "pp", "cp"), _TOKENS_REASON),
        attention_modes=MASKED_ATTENTION_MODES,
    ),
    text=replace(FLUX_FACTS.text, t5_encoder=None, is_masked_in_denoiser=False),
    control=ControlFacts(num_images=(1, 4)),
    options=replace(
        FLUX_FACTS.options,
        extra=("t5xxl_max_token_length", "guidance_scale"),
        network=GENERAL_NETWORK,
        kohya_objective=None,
    ),
)


class FluxOmini(Flux):
    facts = FACTS

    @classmethod
    def prepare_denoiser(cls, denoiser: nn.Module) -> None:
        from ..omini_control import add_condition_branch

        add_condition_branch(denoiser)

    def get_unused_layers(self, denoiser: Any) -> tuple[str, ...]:
        """Condition tokens end with their keys and values in the last block."""
        last = f"single_transformer_blocks.{len(denoiser.single_transformer_blocks) - 1}"
        return tuple(f"{last}.{name}" for name in ("attn.to_q", "proj_mlp", "proj_out"))

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from ..constant_copies import copy_constant

        count, channels, height, width = noisy_latents.shape
        embeds = batch.cond["embeds"]
        # Built on the CPU and copied asynchronously: the pipeline's own copy would synchronize.
        img_ids = pipe._prepare_latent_image_ids(count, height // 2, width // 2, None, noisy_latents.dtype)
        control = self._build_control(pipe, batch.control_latents, (height // 2, width // 2))
        guidance = timesteps.new_full(timesteps.shape, self.model_config.guidance_scale)
        predicted = denoiser(
            hidden_states=pipe._pack_latents(noisy_latents, count, channels, height, width),
            timestep=timesteps / 1000,
            guidance=guidance if pipe.transformer.config.guidance_embeds else None,
            encoder_hidden_states=embeds,
            pooled_projections=batch.cond["pooled"],
            txt_ids=noisy_latents.new_zeros(embeds.shape[1], 3),  # type: ignore[union-attr]
            img_ids=copy_constant(img_ids, noisy_latents.device),
            joint_attention_kwargs=control,
            return_dict=False,
        )[0]
        unpacked: Tensor = pipe._unpack_latents(predicted, height, width, vae_scale_factor=1)
        return unpacked

    def _build_control(
        self, pipe: Any, control_latents: Sequence[Tensor], grid: tuple[int, int], scale: float = 1.0
    ) -> dict[str, Any] | None:
        """Pack the conditions to tokens, and choose their positions: those of the image, or to the left of it."""
        import torch

        from ..constant_copies import copy_constant

        if not control_latents:
            return None
        tokens, positions, left = [], [], 0
        for latents in control_latents:
            count, channels, height, width = latents.shape
            rows, columns = height // 2, width // 2
            tokens.append(pipe._pack_latents(latents, count, channels, height, width))
            ids = pipe._prepare_latent_image_ids(count, rows, columns, None, torch.float32)
            if self.model_config.control_position == "offset":
                left -= columns
                ids[:, 2] += left
            else:  # a smaller condition image covers the whole image, its tokens in the middle of what they stand for
                for axis, (size, own) in enumerate(zip(grid, (rows, columns), strict=True), start=1):
                    ids[:, axis] = ids[:, axis] * (size / own) + (size / own - 1) / 2
            positions.append(ids)
        joined = torch.cat(tokens, dim=1)
        control = {
            "tokens": joined,
            "ids": copy_constant(torch.cat(positions), joined.device),
            "lengths": tuple(part.shape[1] for part in tokens),
            "scale": scale,
            "is_independent": self.model_config.control_independent,
        }
        return {"control": control}

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        """Encode the conditions: cropped to the shape of the image and at most as large, or with positions beside it
        as they are."""
        from PIL import ImageOps

        from ...dataloader.images import load_preview_controls
        from ..omini_control import ConditionCache

        kwargs = super().build_sampling_kwargs(pipe, prompt, cond, negative_cond)
        processor, multiple = pipe.image_processor, pipe.vae_scale_factor * 2
        width, height = self.facts.sampling.get_image_size(prompt.width, prompt.height)
        latents = []
        for image in load_preview_controls(prompt):
            wanted: tuple[float, float] = image.size
            if self.model_config.control_position == "aligned":
                ratio = min(1.0, image.width / width, image.height / height)
                wanted = (width * ratio, height * ratio)
            wide, high = (max(multiple, round(side / multiple) * multiple) for side in wanted)
            pixels = processor.preprocess(ImageOps.fit(image, (wide, high)), high, wide)
            latents.append(self.encode_moments(pipe, pixels.float()).mean_and_std[:, 0])
        grid = height // multiple, width // multiple
        control = self._build_control(pipe, latents, grid, self.model_config.control_scale)
        if control is not None and self.model_config.control_independent:
            control["control"]["cache"] = ConditionCache()
        return kwargs | {"joint_attention_kwargs": control}

    def build_control_kwargs(self, pipe: Any, images: Sequence[Image]) -> dict[str, Any]:
        """Return nothing: OminiControl passes conditions to the attention, and not to the pipeline."""
        return {}
