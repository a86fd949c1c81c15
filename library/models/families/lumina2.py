"""Lumina-Image 2.0: single-stream, with variable-length text of Gemma 2; flow matching with reversed time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...adapters.original_module_names import KeyStyle, OriginalModule
from ...config.network_args import NetworkFacts
from ...config.schema import ModelConfig
from ...problems import Problem
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
from ..family_noise_levels import NoiseLevels, TrainingNoiseFacts
from ..model_configs import ConfigReader, read_required
from ..shared_facts import DENOISER_PREFIXES, GEMMA2_PREFIXES, KOHYA_FLOW_OBJECTIVE, match_flow_model

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ...dataloader.batch import Batch, Cond
    from ...dataloader.sample_prompts import Prompt
    from ...diffusion.process import NoiseProcess

LUMINA2_MAX_SEQUENCE_LENGTH = 256
"""Maximum tokens of the prompt with the system prompt, as in diffusers' pipeline and sd-scripts."""


def _validate_lumina2(read: ConfigReader, options: ModelConfig) -> Iterator[Problem]:
    """Check that every token of a text, and the image after it, has a position in the denoiser."""
    length = options.gemma2_max_token_length
    most = read_required(read, "transformer/config.json").get("axes_lens", (300,))[0] - 1
    if length is not None and length > most:
        text = f"{length} is more than the {most} tokens that the transformer has positions for"
        yield Problem("gemma2_max_token_length", text, f"use at most {most}")


def _match_lumina2(read: ConfigReader) -> FamilyMatch:
    config = read_required(read, "transformer/config.json")
    return match_flow_model(read, 1, f"the transformer has {config.get('num_layers')} blocks")


_BLOCKS = ("layers", "noise_refiner", "context_refiner")
_LAYOUT: tuple[OriginalModule, ...] = (
    *(
        OriginalModule(f"{blocks}.{{}}.{name}", tuple(f"{blocks}.{{}}.{part}" for part in parts), ratios, input_ratio)
        for blocks in _BLOCKS
        for name, parts, ratios, input_ratio in (
            ("attention.qkv", ("attn.to_q", "attn.to_k", "attn.to_v"), (3, 1, 1), 3),
            ("attention.out", ("attn.to_out.0",), (1,), 1),
            *((f"feed_forward.w{number}", (f"feed_forward.linear_{number}",), (1,), 1) for number in (1, 2, 3)),
            ("adaLN_modulation.1", ("norm1.linear",), (1,), 1),
        )
    ),
    OriginalModule("final_layer.adaLN_modulation.1", ("norm_out.linear_1",)),
    OriginalModule("final_layer.linear", ("norm_out.linear_2",)),
)

FILE_LAYOUT = (
    *_LAYOUT,
    *(
        OriginalModule(f"{blocks}.{{}}.{name}", (f"{blocks}.{{}}.{part}",))
        for blocks in _BLOCKS
        for name, part in (
            ("attention.q_norm", "attn.norm_q"),
            ("attention.k_norm", "attn.norm_k"),
            ("attention_norm1", "norm1" if blocks == "context_refiner" else "norm1.norm"),
            ("attention_norm2", "norm2"),
            *((name, name) for name in ("ffn_norm1", "ffn_norm2")),
        )
    ),
    *(
        OriginalModule(name, (f"time_caption_embed.{part}",))
        for name, part in (
            *((f"cap_embedder.{number}", f"caption_embedder.{number}") for number in (0, 1)),
            ("t_embedder.mlp.0", "timestep_embedder.linear_1"),
            ("t_embedder.mlp.2", "timestep_embedder.linear_2"),
        )
    ),
    OriginalModule("x_embedder", ("x_embedder",)),
)
"""The modules in a single file, norms included."""

LUMINA2_KEYS = KeyStyle(
    "lumina2",
    _LAYOUT,
    is_read_by_diffusers=False,
    unread_in_comfyui=dict.fromkeys(("diffusers", "comfy"), "loads nothing of this layout"),
)


FACTS = FamilyFacts(
    title="Lumina-Image 2.0",
    pipeline=PipelineFacts(
        class_name="Lumina2Pipeline", num_parameters=2_609_769_152, hub_id="Alpha-VLLM/Lumina-Image-2.0"
    ),
    detection=DetectionFacts(
        match_configs=_match_lumina2,
        keys=(
            "noise_refiner.0.attention.qkv.weight",
            "cap_embedder.1.weight",
            "layers.0.adaLN_modulation.1.weight",
        ),
        diffusers_keys={
            "noise_refiner.0.attention.qkv.weight": "noise_refiner.0.attn.to_q.weight",
            "cap_embedder.1.weight": "time_caption_embed.caption_embedder.1.weight",
            "layers.0.adaLN_modulation.1.weight": "layers.0.norm1.linear.weight",
        },
        shape_checks={
            ("cap_embedder.1.weight", 0): ("transformer", "hidden_size"),
            ("cap_embedder.1.weight", 1): ("transformer", "cap_feat_dim"),
        },
        trainer_names=TrainerNames(
            ai_toolkit=("lumina2", "is_lumina2"),
            diffusion_pipe=("lumina_2",),
            kohya_gui=("lumina_checkbox",),
            simpletuner=("lumina2",),
            simpletuner_flavours={
                "2.0": "Alpha-VLLM/Lumina-Image-2.0",
                "neta-lumina": "terminusresearch/neta-lumina-v1",
            },
            simpletuner_default="2.0",
        ),
    ),
    single_files=SingleFileFacts(
        prefixes={
            "transformer": DENOISER_PREFIXES,
            "vae": ("vae.", "first_stage_model."),
            "text_encoder": GEMMA2_PREFIXES,
        },
        layout=FILE_LAYOUT,
    ),
    lora=FamilyLora(
        # The linear layers of all blocks, refiners and modulation included, and of the final layer.
        targets=(
            *(f"attn.{layer}" for layer in ("to_q", "to_k", "to_v", "to_out.0")),
            *(f"feed_forward.linear_{number}" for number in (1, 2, 3)),
            "norm1.linear",
            *("norm_out.linear_1", "norm_out.linear_2"),
        ),
        targets_of="sd-scripts",
        key_style=LUMINA2_KEYS,
        modelspec_architecture="lumina-2",
        modelspec_implementation="https://github.com/Alpha-VLLM/Lumina-Image-2.0",
    ),
    blocks=BlockFacts(
        lists=("layers",),
        activation_args=("hidden_states",),
        token_args={"attention_mask": ((1, ("hidden_states",)),), "image_rotary_emb": ((1, ("hidden_states",)),)},
        fused_layers={
            r"\.feed_forward\.linear_[13]$": ("colwise", (1,)),
            r"\.feed_forward\.linear_2$": ("rowwise", (1,)),
        },
        unsupported_strategies={"cuda_graphs": "Lumina-Image 2.0 copies its rotary embedding from the host"},
        attention_modes=("xformers",),
    ),
    text=TextFacts(
        components=("text_encoder", "tokenizer"),
        tokenizer_repo_ids={"tokenizer": "Alpha-VLLM/Lumina-Image-2.0:tokenizer"},
        has_variable_length=True,
        has_negative_encoding=True,
    ),
    training_noise=TrainingNoiseFacts(
        timestep_sampling="nextdit_shift",
        reason="as sd-scripts' guide recommends",
        other_trainers={
            "sd-scripts": NoiseLevels("nextdit_shift", origin="its guide; by default shift with 6"),
            "ai-toolkit": NoiseLevels("sigma", 6.0, origin="its example; by default sigmoid"),
        },
    ),
    sampling=SamplingFacts(num_inference_steps=30, guidance_scale=4.0),
    options=FamilyOptions(
        components={"ae": "vae", "vae": "vae", "text_encoder": "text_encoder"},
        extra=("system_prompt", "gemma2_max_token_length"),
        validate=_validate_lumina2,
        network=NetworkFacts(
            modules=("networks.lora_lumina",),
            args=("mlp_dim",),
            layer_type_ranks=(
                ("attn_dim", "_attention_"),
                ("mod_dim", "_modulation_"),
                ("refiner_dim", "_(noise|context)_refiner_"),
            ),
        ),
        kohya_objective=replace(
            KOHYA_FLOW_OBJECTIVE,
            defaults={"timestep_sampling": "shift", "discrete_flow_shift": 6.0, "system_prompt": ""},
        ),
    ),
)


class Lumina2(Family):
    facts = FACTS

    def get_base_model_info(self, pipe: Any) -> BaseModelInfo:
        return BaseModelInfo("lumina2", "lumina-2")

    def build_noise_process(self, pipe: Any) -> NoiseProcess:
        from ...diffusion.process import FlowMatchingProcess

        return replace(FlowMatchingProcess.from_scheduler(pipe.scheduler.config), velocity_sign=-1)

    @property
    def max_sequence_length(self) -> int:
        return self.model_config.gemma2_max_token_length or LUMINA2_MAX_SEQUENCE_LENGTH

    def _add_system_prompt(self, prompt: str) -> str:
        """Put the system prompt before a caption, as the pipeline and sd-scripts do; an empty one adds nothing."""
        system_prompt = self.model_config.system_prompt
        return f"{system_prompt} <Prompt Start> {prompt}" if system_prompt else prompt

    def encode_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        return self.encode_negative_prompts(pipe, [self._add_system_prompt(prompt) for prompt in prompts])

    def encode_negative_prompts(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        """Encode texts without a system prompt before them, as the pipeline does."""
        from .. import text_encoding

        device = pipe.text_encoder.device
        with text_encoding.suppress_truncation_warnings(pipe, pipe.tokenizer):
            embeds, mask = pipe._get_gemma_prompt_embeds(list(prompts), device, self.max_sequence_length)
        return {"embeds": text_encoding.drop_padding(embeds, mask)}

    def encode_prompts_on_meta(self, pipe: Any, prompts: Sequence[str]) -> Cond:
        from .. import text_encoding

        texts = [self._add_system_prompt(prompt) for prompt in prompts]
        width, max_length = pipe.transformer.config.cap_feat_dim, self.max_sequence_length
        return {"embeds": text_encoding.build_meta_text_embeds(pipe.tokenizer, texts, width, max_length)}

    def find_truncated_prompts(self, pipe: Any, prompts: Sequence[str]) -> list[str]:
        from .. import text_encoding

        texts = {self._add_system_prompt(prompt): prompt for prompt in prompts}
        found = text_encoding.find_truncated_prompts(pipe.tokenizer, list(texts), self.max_sequence_length)
        return [texts[text] for text in found]

    def predict(self, pipe: Any, denoiser: nn.Module, noisy_latents: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        from ..text_encoding import pad_text_embeds

        embeds, mask = pad_text_embeds(batch.cond["embeds"], batch.text_pad_multiple)
        with _read_lengths_on_host(pipe.transformer, [len(row) for row in batch.cond["embeds"]], embeds.shape[1]):
            predicted: Tensor = denoiser(
                hidden_states=noisy_latents,
                timestep=1 - timesteps / 1000,
                encoder_hidden_states=embeds,
                encoder_attention_mask=mask,
                return_dict=False,
            )[0]
        return -predicted  # the model's time, and so its velocity, runs from noise to image

    def build_sampling_kwargs(self, pipe: Any, prompt: Prompt, cond: Cond, negative_cond: Cond) -> dict[str, Any]:
        from ..text_encoding import pad_text_embeds

        # Of the pipeline's own length, which both texts need to have.
        texts = [*cond["embeds"], *negative_cond["embeds"]]
        embeds, mask = pad_text_embeds(texts, self.max_sequence_length)
        return dict(
            guidance_scale=self.facts.sampling.get_guidance_scale(prompt.cfg_scale),
            prompt_embeds=embeds[:1],
            prompt_attention_mask=mask[:1],
            negative_prompt_embeds=embeds[1:],
            negative_prompt_attention_mask=mask[1:],
        )


@contextmanager
def _read_lengths_on_host(transformer: Any, lengths: Sequence[int], max_length: int) -> Iterator[None]:
    """Give the positions a mask on the host: they read its values, which would wait for the device."""
    import torch

    mask = torch.arange(max_length) < torch.tensor(lengths).unsqueeze(1)
    handle = transformer.rope_embedder.register_forward_pre_hook(lambda _, args: (args[0], mask))
    try:
        yield
    finally:
        handle.remove()
