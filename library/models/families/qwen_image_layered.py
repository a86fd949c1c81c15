"""Qwen-Image-Layered: Qwen-Image that takes a picture apart into layers with alpha, all of which are denoised at once.

The latents are those of the picture itself and of its layers, as frames of a clip; behind their tokens are those of the
picture without noise.  The VAE reads and makes pixels with alpha.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...diffusion.timestep_shift import FixedShift
from ..base import BaseModelInfo
from ..facts import ControlFacts, FamilyMatch, TrainerNames
from ..family_noise_levels import NoiseLevels, TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, read_required
from ..shared_facts import match_flow_model
from .qwen_image import FACTS as QWEN_IMAGE_FACTS
from .qwen_image import QwenImage

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond, Moments
    from ...dataloader.sample_prompts import Prompt
    from ...dataset.clip_encoding import SoundTrack

DEFAULT_LAYERS = 4
"""The layers of a preview whose prompt does not set their number."""
RESOLUTION = 640
"""The side of a square with the area of previews, as the authors recommend; the pipeline takes 1024 as well."""
MAX_LAYERS = 20
PICTURE = "picture"
"""The key of ``Batch.frame_cond``: the latents of the picture without noise."""


def _match_layered(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    if not (config.get("use_layer3d_rope") and config.get("use_additional_t_cond")):
        raise ModelError("its transformer has no positions of layers, so it is not that of Qwen-Image-Layered")
    if read_required(read, "vae/config.json").get("input_channels", 3) != 4:
        raise ModelError("its VAE has no alpha channel; use that of Qwen-Image-Layered")
    return match_flow_model(read, 4, f"the transformer has {config.get('num_layers')} blocks and positions of layers")


FACTS = replace(
    QWEN_IMAGE_FACTS,
    title="Qwen-Image-Layered",
    pipeline=replace(
        QWEN_IMAGE_FACTS.pipeline,
        class_name="QwenImageLayeredPipeline",
        kind="edit",
        num_parameters=20_430_407_232,
        hub_id="Qwen/Qwen-Image-Layered",
    ),
    detection=replace(
        QWEN_IMAGE_FACTS.detection,
        match_configs=_match_layered,
        keys=(*QWEN_IMAGE_FACTS.detection.keys, "time_text_embed.addition_t_embedding.weight"),
        trainer_names=TrainerNames(),
    ),
    lora=replace(QWEN_IMAGE_FACTS.lora, modelspec_architecture="qwen-image-layered"),
    text=replace(
        QWEN_IMAGE_FACTS.text,
        components=("text_encoder", "tokenizer", "processor"),
        tokenizer_repo_ids={
            "tokenizer": "Qwen/Qwen-Image-Layered:tokenizer",
            "processor": "Qwen/Qwen-Image-Layered:processor",
        },
        version=1,
    ),
    training_noise=TrainingNoiseFacts(
        shift=FixedShift(2.2),
        reason="the guide of musubi-tuner; the pipeline's, exp of the side, leaves next to no low noise levels",
        other_trainers={"musubi-tuner": NoiseLevels("shift", 2.2, origin="its guide; or qwen_shift")},
    ),
    control=ControlFacts(num_images=(1, MAX_LAYERS), are_layers=True, sets_preview_size=True),
    options=replace(QWEN_IMAGE_FACTS.options, musubi_versions={"layered": {"use_layer3d_rope": True}}),
    notes="trained on pictures with their layers",
)


class QwenImageLayered(QwenImage):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("qwen_image_layered", "qwen-image-layered")

    def encode_moments(self, pipe: Any, pixels: Tensor) -> Moments:
        """Encode a picture, which is opaque where it has no alpha, or a layer as one frame, to its mean alone."""
        import torch

        from ...dataloader.batch import Moments
        from ..vae import encode_clip_moments

        alpha = torch.ones_like(pixels[:, : 4 - pixels.shape[1]])
        mean = encode_clip_moments(pipe.vae, torch.cat([pixels, alpha], dim=1).unsqueeze(2)).mean_and_std[:, 0]
        return Moments.from_mean_and_std(mean, torch.zeros_like(mean))

    def arrange_batch(self, batch: Batch) -> Batch:
        """Put the layers behind the picture: all of them get noise and are predicted, and the picture is seen clean."""
        import torch

        layers = [each.to(batch.latents.dtype) for each in batch.control_latents]
        latents = torch.cat([batch.latents, *layers], dim=2)
        return replace(batch, latents=latents, control_latents=(), frame_cond={PICTURE: batch.latents})

    def decode_latents(self, pipe: Any, latents: Tensor) -> Tensor:
        """Decode each layer by itself to pixels with alpha."""
        from ..vae import decode_frame_latents

        count, _, layers = latents.shape[:3]
        pixels = decode_frame_latents(pipe.vae, latents.transpose(1, 2).flatten(0, 1))
        return pixels.view(count, layers, *pixels.shape[1:]).transpose(1, 2)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        from ..text_encoding import pad_text_embeds

        count, channels, layers, height, width = noisy_latents.shape
        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        is_unpadded = all(len(row) == embeds.shape[1] for row in batch.cond["embeds"])
        needs_mask = batch.text_pad_multiple > 1 or not is_unpadded

        size = (count, channels, height, width)

        def pack(latents: Tensor) -> Tensor:
            rows = latents.transpose(1, 2).contiguous()
            packed: Tensor = pipe._pack_latents(rows, *size, layers=rows.shape[1])
            return packed

        tokens, grid = pack(noisy_latents), (1, height // 2, width // 2)
        picture = pack(batch.frame_cond[PICTURE].to(tokens.dtype))
        predicted = denoiser(
            hidden_states=torch.cat([tokens, picture], dim=1),
            timestep=timesteps / 1000,
            encoder_hidden_states=embeds,
            encoder_hidden_states_mask=mask if needs_mask else None,
            img_shapes=[[grid] * (layers + 1)] * count,
            additional_t_cond=torch.zeros(count, dtype=torch.long, device=noisy_latents.device),
            return_dict=False,
        )[0][:, : tokens.shape[1]]
        unpacked: Tensor = pipe._unpack_latents(predicted, height, width, layers - 1, 1)
        return unpacked

    # Hooks of previews, which are the layers of a given picture.

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        kwargs = super().build_sampling_kwargs(pipe, prompt, cond, negative_cond)
        # Without a prompt beside the embeddings, the pipeline lets its text encoder write one.
        return {**kwargs, "prompt": "encoded", "layers": prompt.num_frames or DEFAULT_LAYERS}

    def build_control_kwargs(self, pipe: Any, images: Sequence[Image]) -> dict[str, Any]:
        return {"image": images[0].convert("RGBA")} if images else {}

    def adapt_sampling_pipeline(self, sampling_pipe: Any) -> Any:
        return LayerSampler(self, sampling_pipe)

    def decode_sampled_latents(self, pipe: Any, latents: Tensor, height: int, width: int) -> Tensor:
        return self.decode_latents(pipe, latents[:, :, 1:])  # the first is the picture again

    def generate_clip(
        self,
        pipe: Any,
        prompt: Prompt,
        cond: Cond,
        negative_cond: Cond,
        generator: torch.Generator,
        sampler: str | None,
    ) -> tuple[list[Image], SoundTrack | None]:
        """Sample the layers of a preview, and put them side by side into one picture with alpha."""
        layers = self.generate_frames(
            pipe, prompt, cond, negative_cond=negative_cond, generator=generator, sampler=sampler
        )
        return [_join_side_by_side(layers)], None


class Precision:
    """The precision of a preview, which the pipeline reads from its text encoder."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype


class SampledLatents(Exception):
    """Ends a call of the pipeline after its last step."""

    def __init__(self, latents: Tensor):
        super().__init__()
        self.latents = latents


def sample_latents(call: Callable[..., Any], **arguments: Any) -> Tensor:
    """Call the pipeline and return its latents, which diffusers 0.42 fails to return by itself."""

    def end_after_last_step(pipe: Any, step: int, timestep: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        if step == pipe.num_timesteps - 1:
            raise SampledLatents(tensors["latents"])
        return tensors

    try:
        call(**arguments, callback_on_step_end=end_after_last_step)
    except SampledLatents as sampled:
        return sampled.latents
    raise AssertionError("the pipeline has ended without a step")


class LayerSampler:
    """Calls the pipeline in the way of previews: the picture sets the size, and no text encoder is there.

    Everything else is that of the pipeline.
    """

    def __init__(self, family: QwenImageLayered, pipe: Any):
        self.family, self.pipe = family, pipe

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pipe, name)

    def __call__(self, *, height: int, width: int, **arguments: Any) -> Any:
        from types import SimpleNamespace

        from diffusers.pipelines.qwenimage import pipeline_qwenimage_layered

        pipe, image = self.pipe, arguments["image"]
        pipe.text_encoder = Precision(pipe.vae.dtype)
        pipe._encode_vae_image = self._encode_picture
        tokens = sample_latents(pipe, **arguments, resolution=RESOLUTION)
        width, height = pipeline_qwenimage_layered.calculate_dimensions(RESOLUTION**2, image.width / image.height)
        latents = pipe._unpack_latents(tokens, height, width, arguments["layers"], pipe.vae_scale_factor)
        return SimpleNamespace(images=latents)

    def _encode_picture(self, image: Tensor, generator: torch.Generator) -> Tensor:
        """Encode the picture in the precision of the VAE, whose own the pipeline takes to be that of the texts."""
        return self.family.encode_moments(self.pipe, image.squeeze(2)).mean_and_std[:, 0].to(image.dtype)


def _join_side_by_side(images: Sequence[Image]) -> Image:
    from PIL import Image

    width, height = images[0].size
    sheet = Image.new("RGBA", (width * len(images), height))
    for number, image in enumerate(images):
        sheet.paste(image, (number * width, 0))
    return sheet
