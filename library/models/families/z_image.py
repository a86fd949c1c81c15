"""Z-Image and its Turbo: single-stream, with variable-length text of Qwen3; flow matching with reversed time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import KeyStyle, OriginalModule
from ...config.network_args import NetworkFacts
from ...diffusion.timestep_shift import FixedShift
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
from ..family_noise_levels import LOGIT_NORMAL, WEIGHTED, NoiseLevels, TrainingNoiseFacts
from ..model_configs import ConfigReader, ModelError, read_required, read_scheduler_config
from ..shared_facts import DENOISER_PREFIXES, MASKED_ATTENTION_MODES, match_flow_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt

Z_IMAGE_MAX_SEQUENCE_LENGTH = 512
"""Maximum tokens of the prompt with the chat template, as in diffusers' pipeline."""


def _match_z_image(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    if config.get("siglip_feat_dim") is not None:
        raise ModelError("its transformer is that of Z-Image-Omni; its pipeline has to be ZImageOmniPipeline")
    variant = "Turbo" if _is_turbo(read_scheduler_config(read)) else "base"
    return match_flow_model(
        read, 1, f"the transformer has {config.get('n_layers')} blocks, its scheduler is of {variant}"
    )


def _is_turbo(scheduler_config: Mapping[str, Any]) -> bool:
    """The two have the same transformer; Turbo is sampled in few steps with shift 3, the base model with shift 6."""
    return float(scheduler_config.get("shift", 3.0)) <= 3.0


def build_layout(*more_blocks: str) -> tuple[OriginalModule, ...]:
    """Build the modules with other names in the original Z-Image, of its blocks and of more lists of blocks."""
    return tuple(
        original
        for blocks in ("layers", "noise_refiner", "context_refiner", *more_blocks)
        for original in (
            OriginalModule(
                f"{blocks}.{{}}.attention.qkv",
                tuple(f"{blocks}.{{}}.attention.{part}" for part in ("to_q", "to_k", "to_v")),
            ),
            OriginalModule(f"{blocks}.{{}}.attention.out", (f"{blocks}.{{}}.attention.to_out.0",)),
        )
    )


ORIGINAL_KEYS = KeyStyle("z_image", build_layout())
Z_IMAGE_KEYS = KeyStyle(
    "diffusers", has_lokr_in_diffusers=True, unread_in_comfyui={"kohya": "loads no attention layers of this layout"}
)


FACTS = FamilyFacts(
    title="Z-Image",
    pipeline=PipelineFacts(
        class_name="ZImagePipeline", num_parameters=6_154_908_736, hub_id="Tongyi-MAI/Z-Image-Turbo"
    ),
    detection=DetectionFacts(
        match_configs=_match_z_image,
        keys=(
            "noise_refiner.0.attention.qkv.weight",
            "cap_embedder.1.weight",
            "layers.0.adaLN_modulation.0.weight",
        ),
        diffusers_keys={"noise_refiner.0.attention.qkv.weight": "noise_refiner.0.attention.to_q.weight"},
        shape_checks={
            ("cap_embedder.1.weight", 0): ("transformer", "dim"),
            ("cap_embedder.1.weight", 1): ("transformer", "cap_feat_dim"),
        },
        trainer_names=TrainerNames(
            ai_toolkit=("zimage",),
            diffusion_pipe=("z_image",),
            onetrainer=("Z_IMAGE",),
            simpletuner=("z_image",),
            simpletuner_flavours={
                "base": "Tongyi-MAI/Z-Image",
                "turbo": "Tongyi-MAI/Z-Image-Turbo",
                "turbo-ostris-v2": "Tongyi-MAI/Z-Image-Turbo",
                "ostris-de-turbo": "Tongyi-MAI/Z-Image-Turbo",
            },
            simpletuner_default="turbo-ostris-v2",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.",),
            "text_encoder": ("text_encoders.qwen3_4b.transformer.",),
        },
    ),
    lora=FamilyLora(
        # The linear layers of the main blocks, without the refiners before them and without the modulation.
        targets=(
            *(f"layers.*.attention.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
            *(f"layers.*.feed_forward.{layer}" for layer in ("w1", "w2", "w3")),
        ),
        targets_of="musubi-tuner",
        optional_targets=(
            "layers.*.adaLN_modulation.0",
            "noise_refiner.*.adaLN_modulation.0",
            *(
                f"{refiner}.*.{layer}"
                for refiner in ("noise_refiner", "context_refiner")
                for layer in (
                    *(f"attention.{each}" for each in ("to_q", "to_k", "to_v", "to_out.0")),
                    *(f"feed_forward.{each}" for each in ("w1", "w2", "w3")),
                )
            ),
        ),
        key_style=Z_IMAGE_KEYS,
        other_key_styles=(ORIGINAL_KEYS,),
        format="diffusers",
        modelspec_architecture="z-image",
    ),
    blocks=BlockFacts(
        lists=("layers",),
        activation_args=("x",),
        token_args={"attn_mask": ((1, ("x",)),), "freqs_cis": ((1, ("x",)),)},
        attention_modes=MASKED_ATTENTION_MODES,
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "Tongyi-MAI/Z-Image-Turbo:tokenizer"},
        has_variable_length=True,
        denoiser_pad_multiple=32,
    ),
    training_noise=TrainingNoiseFacts(
        shift=FixedShift(2.0),
        reason="as musubi-tuner's guide recommends, for base and Turbo",
        other_trainers={
            "musubi-tuner": NoiseLevels("shift", 2.0, origin="its guide"),
            "ai-toolkit": WEIGHTED,
            "OneTrainer": LOGIT_NORMAL,
        },
    ),
    sampling=SamplingFacts(num_inference_steps=9, guidance_scale=0.0),
    options=FamilyOptions(
        components={"ae": "vae", "vae": "vae", "text_encoder": "text_encoder"},
        network=NetworkFacts(modules=("networks.lora_zimage",)),
    ),
)


class ZImage(Family):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("z_image", "z-image")

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        embeds, _ = pipe.encode_prompt(
            list(prompts),
            pipe.text_encoder.device,
            do_classifier_free_guidance=False,
            max_sequence_length=Z_IMAGE_MAX_SEQUENCE_LENGTH,
        )
        return {"embeds": embeds}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        texts = [_apply_chat_template(pipe, prompt) for prompt in prompts]
        width, max_length = pipe.transformer.config.cap_feat_dim, Z_IMAGE_MAX_SEQUENCE_LENGTH
        return {"embeds": text_encoding.build_meta_text_embeds(pipe.tokenizer, texts, width, max_length)}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        return text_encoding.find_truncated_chats(pipe.tokenizer, prompts, Z_IMAGE_MAX_SEQUENCE_LENGTH)

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        import torch

        frames = list(noisy_latents.unsqueeze(2).unbind(0))  # each (C, 1, H, W)
        predicted = denoiser(frames, 1 - timesteps / 1000, batch.cond["embeds"], return_dict=False)[0]
        return -torch.stack(predicted).squeeze(2)  # the model's time, and so its velocity, runs from noise to image

    def is_step_distilled(self, pipe: Any) -> bool:
        return _is_turbo(pipe.scheduler.config)

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        kwargs = super().build_sampling_kwargs(pipe, prompt, cond, negative_cond)
        if _is_turbo(pipe.scheduler.config):
            return kwargs
        return {
            **kwargs,
            "num_inference_steps": prompt.num_inference_steps or 50,
            "guidance_scale": 4.0 if prompt.cfg_scale is None else prompt.cfg_scale,
        }


def _apply_chat_template(pipe: Any, prompt: str) -> str:
    messages = [{"role": "user", "content": prompt}]
    text: str = pipe.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, enable_thinking=True
    )
    return text
