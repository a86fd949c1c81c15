"""Runs of sd-scripts' ``fine_tune.py`` and ``sdxl_train.py`` on tiny models, to be repeated with ``--train full``.

``tests/interop/sd_scripts_full.py`` runs them in sd-scripts, in whose process this module is imported as well.  What is
drawn at random, and the weights of the models, are functions of names, so that both programs get the same.
"""

import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

STEPS = 10
ELEMENTS = 6
"""Elements of each weight that are recorded, besides a random projection of all."""
MAX_TIMESTEP = 1000
TOKENIZERS = {
    "tokenizer": "openai_clip-vit-large-patch14",
    "tokenizer_2": "laion_CLIP-ViT-bigG-14-laion2B-39B-b160k",
}
"""The names under which sd-scripts looks for tokenizers in ``--tokenizer_cache_dir``."""
WIDTH, TEXT_WIDTHS = 32, (16, 24)
"""Channels of the UNets' first level, and of the text encoders."""
SDXL_LAYERS = (0, 1, 2)
"""Transformer blocks of each attention of a level; sd-scripts has 2 and 10, for which these stand."""
BLOCK_RATES = [round(0.01 + 0.002 * (number % 7), 3) for number in range(23)]
COMMON = (
    f"--max_train_steps {STEPS} --cache_latents --max_data_loader_n_workers 0 --mixed_precision no --seed 7 --sdpa"
    " --save_model_as diffusers_safetensors --save_precision float"
)


@dataclass(frozen=True)
class FullCase:
    """One run; every step trains all images, so that their order does not matter."""

    script: str
    flags: str
    sizes: tuple[tuple[int, int], ...]
    batch: int

    @property
    def is_sdxl(self) -> bool:
        return self.script == "sdxl_train.py"

    @property
    def accumulation(self) -> int:
        return len(self.sizes) // self.batch

    @property
    def encoders(self) -> tuple[str, ...]:
        return ("text_encoder", "text_encoder_2") if self.is_sdxl else ("text_encoder",)

    @property
    def captions(self) -> list[str]:
        return [f"picture {number}, a {number * 17} b" for number in range(len(self.sizes))]

    def build_flags(self, folder: Path) -> list[str]:
        """Build the command line of both programs, whose model and dataset are in a folder."""
        files = {"pretrained_model_name_or_path": "model", "dataset_config": "dataset.toml", "output_dir": "output"}
        files |= {"tokenizer_cache_dir": "tokenizers"}
        paths = [part for name, file in files.items() for part in (f"--{name}", str(folder / file))]
        accumulation = ("--gradient_accumulation_steps", str(self.accumulation))
        return [*COMMON.split(), *self.flags.split(), *accumulation, "--output_name", "lora", *paths]


# Gradients that are zero but for rounding would give AdamW updates of full size, of random sign; eps keeps them small.
CASES: Mapping[str, FullCase] = {
    "unet": FullCase(
        "fine_tune.py",
        "--learning_rate 0.05 --optimizer_type SGD --max_grad_norm 0.3 --lr_scheduler cosine --lr_warmup_steps 3",
        ((128, 128), (150, 128), (192, 64), (400, 128)),
        2,
    ),
    "unet_and_text": FullCase(
        "fine_tune.py",
        "--learning_rate 1e-3 --train_text_encoder --learning_rate_te 4e-4 --optimizer_type AdamW"
        " --optimizer_args eps=1e-3 weight_decay=0.1 --min_snr_gamma 5",
        ((128, 128), (150, 128), (64, 192), (100, 280)),
        2,
    ),
    "sdxl_and_texts": FullCase(
        "sdxl_train.py",
        "--learning_rate 1e-3 --train_text_encoder --learning_rate_te1 4e-4 --learning_rate_te2 2e-4"
        " --optimizer_type AdamW --optimizer_args eps=1e-3 weight_decay=0.1 --lr_scheduler linear --no_half_vae",
        ((96, 96), (192, 192), (64, 128), (128, 256)),
        2,
    ),
    "sdxl_blocks": FullCase(
        "sdxl_train.py",
        f"--learning_rate 1e-3 --block_lr {','.join(map(str, BLOCK_RATES))} --optimizer_type SGD --max_grad_norm 0.5"
        " --no_half_vae",
        ((96, 96), (192, 192), (64, 128), (128, 256)),
        2,
    ),
}


def build_generator(*parts: Any) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32("/".join(map(str, parts)).encode()))


def draw_noise(step: int, captions: Sequence[str], shape: Sequence[int]) -> Tensor:
    """Draw the noise of a batch (B, C, H, W); that of an image depends on step and caption."""
    return torch.stack(
        [torch.randn(tuple(shape[1:]), generator=build_generator("noise", step, each)) for each in captions]
    )


def draw_timesteps(step: int, captions: Sequence[str]) -> Tensor:
    draws = [torch.randint(0, MAX_TIMESTEP, (), generator=build_generator("timestep", step, each)) for each in captions]
    return torch.stack(draws)


def summarize_weights(weights: Mapping[str, Tensor]) -> Tensor:
    """Describe weights, in the order of their names, by some elements of each and a projection of all of them."""
    rows = []
    for name in sorted(weights):
        flat = weights[name].detach().reshape(-1).double()
        elements = torch.randint(0, len(flat), (ELEMENTS,), generator=build_generator("elements", name))
        direction = torch.randn(len(flat), generator=build_generator("direction", name)).double() / len(flat) ** 0.5
        rows.append(torch.cat([flat[elements], (flat @ direction).view(1)]))
    return torch.stack(rows).float()


def hash_names(weights: Iterable[str]) -> Tensor:
    return torch.tensor([zlib.crc32("\n".join(sorted(weights)).encode())])


def write_case(case: FullCase, folder: Path) -> None:
    """Write model, tokenizers and dataset of a run; here alone, as sd-scripts has a package ``library``, too."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_dataset(case, folder)
    _write_model(case, folder)


def _write_dataset(case: FullCase, folder: Path) -> None:
    images = folder / "images"
    images.mkdir()
    for number, ((width, height), caption) in enumerate(zip(case.sizes, case.captions, strict=True)):
        image = Image.radial_gradient("L").resize((width, height)).convert("RGB")
        image = Image.blend(image, Image.new("RGB", image.size, (40 * number, 255 - 50 * number, 90)), 0.5)
        image.putpixel((width // 2, number), (255, 0, 10 * number))
        image.save(images / f"{number}.png")
        (images / f"{number}.txt").write_text(caption, "utf-8")
    metadata = folder / "metadata.json"
    captions = {f"{number}.png": {"caption": caption} for number, caption in enumerate(case.captions)}
    metadata.write_text(json.dumps(captions), "utf-8")
    resolution, step = (96, 32) if case.is_sdxl else (128, 64)
    source = 'caption_extension = ".txt"' if case.is_sdxl else f"metadata_file = '{metadata}'"
    (folder / "dataset.toml").write_text(
        f"[general]\nenable_bucket = true\n[[datasets]]\nresolution = {resolution}\nbatch_size = {case.batch}\n"
        f"min_bucket_reso = {step}\nmax_bucket_reso = 256\nbucket_reso_steps = {step}\n"
        f"[[datasets.subsets]]\nimage_dir = '{images}'\n{source}\n",
        "utf-8",
    )


def _write_model(case: FullCase, folder: Path) -> None:
    from transformers import CLIPTokenizer

    from benchmarks.peers import save_clip_tokenizer
    from library.models.loading import import_model_class
    from library.models.tokenizers import END_TOKEN, START_TOKEN, build_byte_tokenizer, build_byte_vocabulary
    from library.models.weights import build_empty_model

    words = build_byte_vocabulary()
    configs = _build_configs(case, {"bos_token_id": words[START_TOKEN], "eos_token_id": words[END_TOKEN]}, len(words))
    index = {"_class_name": "StableDiffusionXLPipeline" if case.is_sdxl else "StableDiffusionPipeline"}
    for name, (package, config) in configs.items():
        path = folder / "model" / name
        path.mkdir(parents=True)
        index[name] = [package, config["_class_name"]]
        kind = "scheduler_config" if name == "scheduler" else "config"
        (path / f"{kind}.json").write_text(json.dumps(config), "utf-8")
        if name != "scheduler":
            model = build_empty_model(import_model_class(package, config["_class_name"]), config)
            file = "model" if package == "transformers" else "diffusion_pytorch_model"
            names = (each if "text_model." in each else f"text_model.{each}" for each in model.state_dict())
            weights = zip(
                names if name == "text_encoder" else model.state_dict(), model.state_dict().values(), strict=True
            )
            save_file(_draw_weights(name, dict(weights)), path / f"{file}.safetensors", {"format": "pt"})
    for name in [each.replace("text_encoder", "tokenizer") for each in case.encoders]:
        settings = {"model_max_length": 77, "pad_token": "!" if name == "tokenizer_2" else END_TOKEN}
        for path in (folder / "model" / name, folder / "tokenizers" / TOKENIZERS[name]):
            save_clip_tokenizer(build_byte_tokenizer(CLIPTokenizer, settings), path)
        index[name] = ["transformers", "CLIPTokenizer"]
    (folder / "model" / "model_index.json").write_text(json.dumps(index), "utf-8")


def _build_configs(case: FullCase, special: dict[str, int], words: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Build the configurations of the components; sd-scripts fixes blocks, layers and what it gets of them."""
    schedule = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "clip_sample": False}
    schedule |= {"num_train_timesteps": MAX_TIMESTEP, "set_alpha_to_one": False, "steps_offset": 1}
    scheduler = {"_class_name": "DDIMScheduler", "prediction_type": "epsilon", **schedule}
    return {
        "scheduler": ("diffusers", scheduler),
        "vae": ("diffusers", _build_vae_config(0.13025 if case.is_sdxl else 0.18215)),
        "unet": ("diffusers", _build_unet_config(case.is_sdxl)),
        **{
            name: ("transformers", _build_text_config(case, name) | special | {"vocab_size": words})
            for name in case.encoders
        },
    }


def _build_vae_config(scaling_factor: float) -> dict[str, Any]:
    return {
        "_class_name": "AutoencoderKL",
        "block_out_channels": [8, 8, 16, 16],
        "down_block_types": ["DownEncoderBlock2D"] * 4,
        "up_block_types": ["UpDecoderBlock2D"] * 4,
        "layers_per_block": 1,
        "norm_num_groups": 4,
        "latent_channels": 4,
        "scaling_factor": scaling_factor,
    }


def _build_unet_config(is_sdxl: bool) -> dict[str, Any]:
    config = {"_class_name": "UNet2DConditionModel", "sample_size": 16, "layers_per_block": 2}
    if not is_sdxl:
        widths = [WIDTH, WIDTH, 2 * WIDTH, 2 * WIDTH]
        return config | {"block_out_channels": widths, "attention_head_dim": 8, "cross_attention_dim": TEXT_WIDTHS[0]}
    return config | {
        "block_out_channels": [WIDTH, 2 * WIDTH, 4 * WIDTH],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "attention_head_dim": [1, 1, 2],
        "transformer_layers_per_block": [1, *SDXL_LAYERS[1:]],
        "cross_attention_dim": sum(TEXT_WIDTHS),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": TEXT_WIDTHS[1] + 6 * 256,
    }


def _build_text_config(case: FullCase, name: str) -> dict[str, Any]:
    is_second = name == "text_encoder_2"
    width = TEXT_WIDTHS[is_second]
    return {
        "_class_name": "CLIPTextModelWithProjection" if is_second else "CLIPTextModel",
        "architectures": ["CLIPTextModelWithProjection" if is_second else "CLIPTextModel"],
        "model_type": "clip_text_model",
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "projection_dim": width,
        "num_hidden_layers": 12 if case.is_sdxl and not is_second else 3,  # sd-scripts takes the eleventh
        "num_attention_heads": 4,
        "max_position_embeddings": 77,
        "hidden_act": "gelu" if is_second else "quick_gelu",
        "layer_norm_eps": 1e-5,
    }


def _draw_weights(component: str, empty: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Draw weights: matrices preserve the variance of their input, norms are near one and biases near zero."""
    weights = {}
    for name, weight in empty.items():
        if not weight.is_floating_point():
            continue
        drawn = torch.randn(weight.shape, generator=build_generator("weight", component, name))
        if weight.ndim > 1:
            drawn *= (weight.numel() / weight.shape[0]) ** -0.5
        else:
            drawn = 0.1 * drawn + float(name.endswith("weight"))
        if component == "vae" and name == "quant_conv.weight":
            drawn *= 5
        weights[name] = drawn
    return weights
