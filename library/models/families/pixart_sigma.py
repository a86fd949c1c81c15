"""PixArt-Sigma: cross-attention to variable-length text of T5, learned variances beside the predicted noise; DDPM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import PEFT_LOADER_KEYS, OriginalModule
from ..base import BaseModelInfo, Family
from ..facts import (
    BlockFacts,
    DetectionFacts,
    FamilyFacts,
    FamilyLora,
    FamilyMatch,
    FamilyOptions,
    PipelineFacts,
    SamplingFacts,
    SingleFileFacts,
    TextFacts,
    TrainerNames,
)
from ..model_configs import ConfigReader, ModelError, get_downscale_factor, read_required
from ..shared_facts import DENOISER_PREFIXES, T5_PREFIXES, T5_TOKENIZER, read_prediction_type

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt

PIXART_MAX_SEQUENCE_LENGTH = 300
"""Maximum tokens of the prompt, as in diffusers' pipeline."""


def _match_pixart_sigma(read: ConfigReader) -> FamilyMatch:
    config, vae = read_required(read, "transformer/config.json"), read_required(read, "vae/config.json")
    channels, sample_size = config.get("in_channels", 4), config.get("sample_size", 128)
    if channels != vae.get("latent_channels", 4):
        raise ModelError(f"its transformer has {channels} input channels; control models cannot be trained")
    has_sizes = config.get("use_additional_conditions")
    if has_sizes or (has_sizes is None and sample_size == 128):
        raise ModelError("its transformer is told sizes of images, as that of PixArt-Alpha; use PixArt-Sigma")
    size_multiple = get_downscale_factor(vae) * int(config.get("patch_size", 2))
    reason = f"the transformer has {config.get('num_layers')} blocks"
    return FamilyMatch(reason, size_multiple, read_prediction_type(read))


_OUTER_NAMES = {
    "x_embedder.proj": "pos_embed.proj",
    "t_embedder.mlp.0": "adaln_single.emb.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "adaln_single.emb.timestep_embedder.linear_2",
    "t_block.1": "adaln_single.linear",
    "y_embedder.y_proj.fc1": "caption_projection.linear_1",
    "y_embedder.y_proj.fc2": "caption_projection.linear_2",
    "final_layer.linear": "proj_out",
    "final_layer": "",  # the table of shift and scale
}
_BLOCK_NAMES = {
    "attn.qkv": ("attn1.to_q", "attn1.to_k", "attn1.to_v"),
    "attn.proj": ("attn1.to_out.0",),
    "cross_attn.q_linear": ("attn2.to_q",),
    "cross_attn.kv_linear": ("attn2.to_k", "attn2.to_v"),
    "cross_attn.proj": ("attn2.to_out.0",),
    "mlp.fc1": ("ff.net.0.proj",),
    "mlp.fc2": ("ff.net.2",),
}
PIXART_LAYOUT = (
    *(OriginalModule(original, (module,)) for original, module in _OUTER_NAMES.items()),
    OriginalModule("blocks.{}", ("transformer_blocks.{}",)),  # the table of shift, scale and gate
    *(
        OriginalModule(f"blocks.{{}}.{original}", tuple(f"transformer_blocks.{{}}.{module}" for module in modules))
        for original, modules in _BLOCK_NAMES.items()
    ),
)
"""The modules of the original transformer."""


FACTS = FamilyFacts(
    title="PixArt-Sigma",
    pipeline=PipelineFacts(
        class_name="PixArtSigmaPipeline",
        num_parameters=610_856_096,
        hub_id="PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
    ),
    detection=DetectionFacts(
        match_configs=_match_pixart_sigma,
        keys=("t_block.1.weight", "y_embedder.y_proj.fc1.weight", "blocks.0.cross_attn.kv_linear.weight"),
        diffusers_keys={
            "t_block.1.weight": "adaln_single.linear.weight",
            "y_embedder.y_proj.fc1.weight": "caption_projection.linear_1.weight",
            "blocks.0.cross_attn.kv_linear.weight": "transformer_blocks.0.attn2.to_k.weight",
            "ar_embedder.mlp.0.weight": "adaln_single.emb.aspect_ratio_embedder.linear_1.weight",
        },
        shape_checks={
            ("t_block.1.weight", 1): ("transformer", "cross_attention_dim"),
            ("y_embedder.y_proj.fc1.weight", 1): ("transformer", "caption_channels"),
            ("ar_embedder.mlp.0.weight", None): ("transformer", "use_additional_conditions"),
        },
        trainer_names=TrainerNames(
            ai_toolkit=("pixart_sigma", "is_pixart_sigma"),
            onetrainer=("PIXART_SIGMA",),
            simpletuner=("pixart",),
            simpletuner_flavours={
                "900M-1024-v0.6": "terminusresearch/pixart-900m-1024-ft-v0.6",
                "600M-512": "PixArt-alpha/PixArt-Sigma-XL-2-512-MS",
                "600M-1024": "PixArt-alpha/PixArt-Sigma-XL-2-1024-MS",
                "600M-2048": "PixArt-alpha/PixArt-Sigma-XL-2-2K-MS",
            },
            simpletuner_default="900M-1024-v0.6",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={"transformer": DENOISER_PREFIXES, "vae": ("vae.",), "text_encoder": T5_PREFIXES},
        layout=PIXART_LAYOUT,
    ),
    lora=FamilyLora(
        # The attention to the image and to the text.
        targets=("to_q", "to_k", "to_v", "to_out.0"),
        targets_of="SimpleTuner",
        key_style=PEFT_LOADER_KEYS,
        format="diffusers",
        modelspec_architecture="pixart-sigma",
    ),
    blocks=BlockFacts(
        lists=("transformer_blocks",),
        activation_args=("hidden_states",),
        text_attention_calls=(1,),
        text_attention_layers=("attn2.to_k", "attn2.to_v"),
        attention_modes=("xformers",),
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": T5_TOKENIZER},
        has_variable_length=True,
        pad_multiple=64,
    ),
    sampling=SamplingFacts(num_inference_steps=20, guidance_scale=4.5),
    options=FamilyOptions(components={"vae": "vae", "t5xxl": "text_encoder"}),
    notes="LoRA in ComfyUI and peft; diffusers has no loader for it",
)


class PixArtSigma(Family):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("pixart_sigma", "pixart-sigma")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        with text_encoding.suppress_truncation_warnings(pipe, pipe.tokenizer):
            embeds, mask, *_ = pipe.encode_prompt(
                list(prompts),
                do_classifier_free_guidance=False,
                device=pipe.text_encoder.device,
                max_sequence_length=PIXART_MAX_SEQUENCE_LENGTH,
            )
        return {"embeds": text_encoding.drop_padding(embeds, mask)}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        width, max_length = pipe.transformer.config.caption_channels, PIXART_MAX_SEQUENCE_LENGTH
        texts = pipe._text_preprocessing(list(prompts))
        return {"embeds": text_encoding.build_meta_text_embeds(pipe.tokenizer, texts, width, max_length)}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        max_tokens = PIXART_MAX_SEQUENCE_LENGTH - 1  # minus the end token
        return text_encoding.find_truncated_prompts(pipe.tokenizer, prompts, max_tokens)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from ..text_encoding import pad_text_embeds

        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        predicted: Tensor = denoiser(
            noisy_latents,
            encoder_hidden_states=embeds,
            encoder_attention_mask=mask,
            timestep=timesteps,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
            return_dict=False,
        )[0]
        return predicted[:, : noisy_latents.shape[1]]  # the other half are variances, which sampling does not use

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        from ..text_encoding import pad_text_embeds

        # The pipeline needs both texts to have one length.
        embeds, mask = pad_text_embeds([*cond["embeds"], *negative_cond["embeds"]], PIXART_MAX_SEQUENCE_LENGTH)
        return dict(
            guidance_scale=self.facts.sampling.get_guidance_scale(prompt.cfg_scale),
            negative_prompt=None,
            prompt_embeds=embeds[:1],
            prompt_attention_mask=mask[:1],
            negative_prompt_embeds=embeds[1:],
            negative_prompt_attention_mask=mask[1:],
            use_resolution_binning=False,
        )
