"""Trained adapters of every family and kind, their files, and the outputs of a model that has loaded one."""

import copy
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, SD3Transformer2DModel
from problem_lines import format_lines
from safetensors.torch import save_file
from tiny_pipelines import TINY
from torch import Tensor

from library.adapters import injection
from library.adapters.file_writer import ZERO_INIT_TENSORS
from library.adapters.module_adapter import MAGNITUDE, parse_tensor_key
from library.config import parse_config
from library.models.families import FAMILIES, FAMILY_FACTS
from library.training.save_adapter import AdapterFile, build_adapter_file
from library.training.trainable_modules import build_trainable_modules

WIDE_FLUX = "flux (published width)"
EVERY = tuple(name for name, facts in FAMILY_FACTS.items() if facts.pipeline.experts is None)
"""Files of two experts are those of the model with one."""
WITH_TEXT = ("sd1", "sd2", "sdxl", "sd3", "flux")
UNETS = ("sd1", "sd2", "sdxl")
_BLOCKS = {"sd1": 25, "sd2": 25, "sdxl": 23}

KINDS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "LoRA": ("networks.lora", ()),
    "LoRA, convolutions": ("networks.lora", ("conv_dim=2", "conv_alpha=1.5")),
    "LoRA, block_alphas": ("networks.lora", ()),
    "LoRA, outer layers": ("networks.lora", ()),
    "LoRA, T5": ("networks.lora", ("train_t5xxl=True",)),
    "DoRA": ("networks.lora", ("use_dora=True",)),
    "LoHa": ("networks.loha", ()),
    "LoKr": ("networks.lokr", ("factor=2",)),
    "OFT": ("networks.oft", ()),
    "BOFT": ("lycoris.kohya", ("algo=boft",)),
}
"""Kind of adapter -> ``network_module`` and ``network_args``."""


def get_family_name(name: str) -> str:
    return name.partition(" ")[0]


def list_kinds(name: str) -> list[str]:
    """The kinds that a family has."""
    if name == WIDE_FLUX:
        return ["LoRA"]
    only = {
        "LoRA, convolutions": UNETS,
        "LoRA, block_alphas": UNETS,
        "LoRA, outer layers": ("sd3", "flux"),
        "LoRA, T5": ("sd3", "flux"),
        "BOFT": ("sd1", "sd2", "sdxl", "sd3", "flux"),  # needs a common divisor of all layers
    }
    return [kind for kind in KINDS if name in only.get(kind, EVERY)]


def build_config(name: str, kind: str, *flags: str) -> Any:
    """The settings of a run that trains this kind of adapter, text encoders included."""
    module, arguments = KINDS[kind]
    if kind == "LoRA, block_alphas":
        count = _BLOCKS[name]
        alphas = ",".join(str(1 + number % 3) for number in range(count))
        arguments = (f"block_dims={','.join(['4'] * count)}", f"block_alphas={alphas}")
    if kind == "LoRA, outer layers":
        arguments = ("in_dims=[2,2,2,2,2]",) if name == "flux" else ("emb_dims=[2,2,2,2,2,2]",)
    words = ["--network_module", module, "--network_dim", "4"]
    words += [] if kind in ("OFT", "BOFT") else ["--network_alpha", "3"]
    words += ["--network_args", *arguments] if arguments else []
    words += ["--no-network_train_unet_only"] if get_family_name(name) in WITH_TEXT else []
    parsed = parse_config([*words, *flags])
    problems = [line for line in format_lines(parsed.problems) if "dataset_config" not in line]
    assert not problems, problems
    return parsed.config


@dataclass
class TrainedCase:
    """A model with a trained adapter, and what it computes."""

    name: str
    kind: str
    config: Any
    pipe: Any
    state: dict[str, Tensor]
    adapter: injection.Adapter
    base: dict[str, Tensor]
    """Outputs without the adapter."""
    expected: dict[str, Tensor]
    """Outputs with the adapter."""

    @property
    def family(self) -> Any:
        return FAMILIES.get(get_family_name(self.name))()


@functools.cache
def _load_tiny(name: str) -> Any:
    tiny = TINY[get_family_name(name)]()
    if name == WIDE_FLUX:  # diffusers splits the single blocks of kohya files at this width only
        size = {"num_attention_heads": 24, "attention_head_dim": 128, "num_layers": 1, "num_single_layers": 1}
        config = {**tiny.pipe.transformer.config, **size, "axes_dims_rope": (16, 56, 56)}
        torch.manual_seed(0)
        tiny.pipe.transformer = FluxTransformer2DModel.from_config(config).eval()
    if name == "sd3":  # ComfyUI assumes that an SD3 of n blocks has width 64 n
        config = tiny.pipe.transformer.config
        size = {
            "attention_head_dim": 32,
            "num_attention_heads": 2 * config.num_layers,
            "caption_projection_dim": 64 * config.num_layers,
        }
        torch.manual_seed(0)
        tiny.pipe.transformer = SD3Transformer2DModel.from_config({**config, **size}).eval()
    return tiny


def load_tiny_pipeline(name: str) -> Any:
    """The tiny model of a family, as a copy."""
    return copy.deepcopy(_load_tiny(name).pipe)


@torch.no_grad()
def build_trained_case(name: str, kind: str) -> TrainedCase:
    """An adapter as the settings make it, with random weights as if it was trained."""
    pipe, family, config = load_tiny_pipeline(name), FAMILIES.get(get_family_name(name))(), build_config(name, kind)
    base = compute_outputs(name, pipe)
    model, adapter = build_trainable_modules(config, family, pipe)
    draw = torch.Generator().manual_seed(4)
    for key, parameter in injection.iter_adapter_parameters(model):
        tensor = (parse_tensor_key(key) or ("", ""))[1]
        noise = torch.randn(parameter.shape, generator=draw)
        if tensor in ZERO_INIT_TENSORS:
            parameter.copy_(0.2 * noise)
        elif tensor == MAGNITUDE:
            parameter.mul_(1 + 0.2 * noise.clamp(-2, 2))
    model.eval()
    expected = compute_outputs(name, pipe)
    return TrainedCase(name, kind, config, pipe, injection.get_adapter_state_dict(model), adapter, base, expected)


def write_file(case: TrainedCase, path: Path, file_format: str = "auto") -> AdapterFile:
    """Write the adapter as a run does."""
    file = build_adapter_file(case.state, case.adapter, case.family, case.pipe, file_format)
    save_file(file.tensors, path, dict(file.metadata) or None)
    return file


@torch.no_grad()
def compute_outputs(name: str, pipe: Any) -> dict[str, Tensor]:
    """The prediction of the denoiser for one batch, and the hidden states of the text encoders."""
    family, batch = FAMILIES.get(get_family_name(name))(), _load_tiny(name).batch
    denoiser = getattr(pipe, family.facts.denoiser_name)
    found = {"denoiser": family.predict(pipe, denoiser, batch.latents, torch.tensor([300.0, 700.0]), batch)}
    for part in family.facts.lora.text_encoders:
        encoder = getattr(pipe, part)
        ids = torch.tensor([[5, 7, 11, encoder.config.eos_token_id]])
        found[part] = encoder(ids, output_hidden_states=True).hidden_states[-1]
    return found


def measure_errors(case: TrainedCase, outputs: Mapping[str, Tensor]) -> dict[str, float]:
    """Per component, the largest error of its output as a share of the adapter's largest effect there."""
    found = {}
    for part, expected in case.expected.items():
        effect = float((expected - case.base[part]).abs().max())
        if effect > 0:
            found[part] = float((outputs[part] - expected).abs().max()) / effect
    return found


def load_in_diffusers(case: TrainedCase, path: Path) -> dict[str, Tensor]:
    """The outputs of the family's diffusers pipeline with the file."""
    pipe = load_tiny_pipeline(case.name)
    if hasattr(pipe, "load_lora_weights"):
        pipe.load_lora_weights(str(path.parent), weight_name=path.name)
    else:
        pipe.transformer.load_lora_adapter(str(path.parent), weight_name=path.name, prefix="transformer")
    return compute_outputs(case.name, pipe)
