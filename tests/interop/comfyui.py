"""Load our LoRA files with ComfyUI's loader: count the loaded tensors, and compare the merged weights.

    python tests/interop/comfyui.py FOLDER_OF_COMFYUI [FOLDER_OF_ITS_PACKAGES]

Run it from the repository's folder.  ComfyUI is a program of its own under the GPL, and no part of this project: it
is imported in this process and nowhere else.  docs/files.md has the figures.
"""

import logging
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import original_checkpoints
import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {
    "sd1": "BaseModel",
    "sd2": "BaseModel",
    "sdxl": "SDXL",
    "sd3": "SD3",
    "flux": "Flux",
    "z_image": "Lumina2",
    "qwen_image": "QwenImage",
}
TEXT = {
    "sd1": ("clip_l",),
    "sd2": ("clip_h",),
    "sdxl": ("clip_l", "clip_g"),
    "sd3": ("clip_l", "clip_g"),
    "flux": ("clip_l",),
}


class Log(logging.Handler):
    """Count the keys that the loader reports as not loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main(comfyui: str, packages: str | None = None) -> None:
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), comfyui]
    sys.path += [packages] if packages else []
    sys.argv = [sys.argv[0], "--" + "cpu"]
    import tiny_pipelines  # noqa: F401  transformers looks for torchvision, and must not find what stands in for it

    stub_modules(
        "torchvision",
        "torchvision.transforms",
        "torchvision.ops",
        "torchvision.transforms.functional",
        "torchvision.transforms.v2",
        "torchaudio",
        "torchaudio.transforms",
        "torchaudio.functional",
        "av",
    )
    import comfy.options

    comfy.options.enable_args_parsing()
    print(f"{'family':<11} {'kind':<5} {'format':<10} {'tensors taken':>14}  largest error of a merged weight")
    for family in FAMILIES:
        for kind in ("lora", "loha", "lokr", "dora"):
            for file_format in ("kohya", "diffusers", "comfy"):
                print(f"{family:<11} {kind:<5} {file_format:<10} {load_file(family, kind, file_format)}", flush=True)


def stub_modules(*names: str) -> None:
    """ComfyUI imports these for images and audio; loading a LoRA needs none of them."""
    for name in names:
        module: Any = ModuleType(name)
        module.__getattr__ = lambda attribute: MagicMock()
        module.__path__ = []
        sys.modules.setdefault(name, module)


@torch.no_grad()
def load_file(family: str, kind: str, file_format: Any) -> str:
    import comfy.lora
    from adapter_states import build_random_state
    from adapter_tensors import merge

    from library.adapters.formats import convert_to_file_format
    from library.errors import UserError

    pipe = build_tiny_model(family)
    state, alphas, parts = build_random_state(family, kind, pipe=pipe, with_t5=False)
    try:
        file, _ = convert_to_file_format(state, alphas, parts, file_format)
    except UserError as error:
        return f"not written: {error}"
    before = list_weights(family, pipe)
    log = Log()
    logging.getLogger().addHandler(log)
    key_map: dict[str, Any] = comfy.lora.model_lora_keys_unet(build_comfy_model(family, before, pipe), {})
    if family in TEXT:
        names = {key: tensor for key, tensor in before.items() if key.startswith("clip_")}
        key_map = comfy.lora.model_lora_keys_clip(SimpleNamespace(state_dict=lambda: names), key_map)
    patches = comfy.lora.load_lora(dict(file), key_map)
    missed = [line for line in log.lines if "not loaded" in line]
    merged = dict(before)
    for key, patch in patches.items():
        key, offset = (key, None) if isinstance(key, str) else key[:2]
        merged[key] = comfy.lora.calculate_weight([(1.0, patch, 1.0, offset, None)], merged[key].clone(), key)
    merge(pipe, state, alphas, by_comfyui=kind == "dora")
    after = list_weights(family, pipe)
    errors = {key: float((merged[key] - after[key]).abs().max()) for key in after}
    wrong = max(errors.values())
    change = max(float((before[key] - after[key]).abs().max()) for key in after)
    example = f"; not taken: {missed[0].rpartition(' ')[2]}" if missed else ""
    if wrong > 1e-3 * change and not missed:
        off = [key for key, error in errors.items() if error > 1e-3 * change]
        example = f"; {len(off)} of {len(errors)} weights are wrong: {off[0]}"
    return f"{len(file) - len(missed):>6} of {len(file):>4}  {wrong:.1e} of a change of {change:.1e}{example}"


def build_tiny_model(family: str) -> Any:
    """The tiny model of the tests; ComfyUI assumes that an SD3 of n blocks has width 64 n."""
    from diffusers import SD3Transformer2DModel
    from tiny_pipelines import TINY

    pipe = TINY[family]().pipe
    if family == "sd3":
        layers = pipe.transformer.config.num_layers
        size = {"attention_head_dim": 32, "num_attention_heads": 2 * layers, "caption_projection_dim": 64 * layers}
        pipe.transformer = SD3Transformer2DModel.from_config({**pipe.transformer.config, **size})
    return pipe


def list_weights(family: str, pipe: Any) -> dict[str, Tensor]:
    """The names of the weights that ComfyUI can patch."""

    writers = {
        "sd3": original_checkpoints.convert_sd3_transformer,
        "flux": original_checkpoints.convert_flux_transformer,
        "z_image": original_checkpoints.convert_z_image_transformer,
        "qwen_image": nn.Module.state_dict,
    }
    model = getattr(pipe, "unet", None) or pipe.transformer
    actual = original_checkpoints.add_prefix(
        "diffusion_model.", writers.get(family, original_checkpoints.convert_unet_to_ldm)(model)
    )
    for number, name in enumerate(TEXT.get(family, ())):
        encoder = pipe.text_encoder if number == 0 else pipe.text_encoder_2
        actual |= original_checkpoints.add_prefix(f"{name}.transformer.", original_checkpoints.convert_clip(encoder))
    return actual


def build_comfy_model(family: str, weights: dict[str, Tensor], pipe: Any) -> Any:
    """A model of ComfyUI's class with these weights and the attributes that its loader needs."""
    import comfy.model_base
    import comfy.model_detection

    own = {key: tensor for key, tensor in weights.items() if key.startswith("diffusion_model.")}
    cls = getattr(comfy.model_base, FAMILIES[family])
    model = type("Fake", (cls,), {"__init__": nn.Module.__init__, "state_dict": lambda self: own})()
    model.model_config = SimpleNamespace(unet_config=detect_unet_config(family, pipe))
    return model


def detect_unet_config(family: str, pipe: Any) -> dict[str, Any]:
    """The config that ComfyUI would detect for a model of this size."""
    if hasattr(pipe, "unet"):
        config = pipe.unet.config
        count = len(config.block_out_channels)
        layers = config.transformer_layers_per_block
        layers = [layers] * count if isinstance(layers, int) else list(layers)
        depths = [layers[number] if "CrossAttn" in kind else 0 for number, kind in enumerate(config.down_block_types)]
        each = config.layers_per_block
        return {
            "num_res_blocks": [each] * count,
            "channel_mult": [1] * count,
            "transformer_depth": [depth for depth in depths for _ in range(each)],
            "transformer_depth_output": [depth for depth in depths for _ in range(each + 1)],
            "transformer_depth_middle": layers[-1],
        }
    config = pipe.transformer.config
    if family == "sd3":
        return {"depth": config.num_layers}
    if family == "flux":
        return {
            "depth": config.num_layers,
            "depth_single_blocks": config.num_single_layers,
            "hidden_size": config.num_attention_heads * config.attention_head_dim,
        }
    if family == "z_image":
        return {"n_layers": config.n_layers, "n_refiner_layers": config.n_refiner_layers, "dim": config.dim}
    return {}


if __name__ == "__main__":
    main(*sys.argv[1:])
