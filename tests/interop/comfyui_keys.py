"""Count the keys of LoRA files that ComfyUI reads for models of published size, without their weights.

    PYTHON tests/interop/comfyui_keys.py FOLDER_OF_COMFYUI FOLDER_OF_CASES

A case is a folder with ``model.json``, the names and shapes of a model's file, and LoRA files.  ComfyUI detects the
model by them, builds its own class on the meta device, and maps the keys of each file to its weights.  A key counts as
read if ComfyUI takes it and its update has the shape of the weight.  ``model_table.py`` starts this script in a process
of its own, with ComfyUI's Python.
"""

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import diffusers  # noqa: F401  it looks for torchvision, and must not find what stands in for it
import torch
import transformers  # noqa: F401
from comfyui import stub_modules
from safetensors.torch import load_file
from torch import Tensor
from transformers import CLIPTextModel  # noqa: F401


def main(comfyui: str, root: str) -> None:
    names = ("torchvision", "torchvision.transforms", "torchvision.ops", "torchvision.transforms.functional")
    audio = ("torchvision.transforms.v2", "torchaudio", "torchaudio.transforms", "torchaudio.functional", "av")
    stub_modules(*names, *audio)
    sys.path.insert(0, comfyui)
    sys.argv = [sys.argv[0], "--" + "cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    from comfyui_version import __version__

    for case in sorted(Path(root).iterdir()):
        result: dict[str, Any] = {"version": __version__, "model": None, "files": {}, "patterns": []}
        model = build_model(json.loads((case / "model.json").read_text()))
        if model is not None:
            result |= {"model": type(model).__name__, "weights": compare_weights(case, model)}
            keys = map_keys(model)
            ours = (key for key in keys if key.startswith(("lora_unet_", "transformer.", "diffusion_model.")))
            result["patterns"] = sorted({re.sub(r"(?<=[._])\d+(?=[._])", "{}", key) for key in ours})
            for file in sorted(case.glob("*.safetensors")):
                result["files"][file.name] = sorted(find_read_keys(load_file(file), keys, model))
        (case / "comfyui.json").write_text(json.dumps(result))


def build_model(shapes: Mapping[str, list[int]]) -> Any:
    """The model that ComfyUI detects by a file's names and shapes; None for an unknown one."""
    import comfy.model_detection

    # The values of biases tell Stable Diffusion 2 from its other prediction type.
    tensors = {name: torch.zeros(shape, device="meta" if len(shape) > 1 else "cpu") for name, shape in shapes.items()}
    # As for a file of the denoiser alone: diffusers' names are converted where ComfyUI knows how.
    config = comfy.model_detection.model_config_from_unet(tensors, "")
    if config is None:
        converted = comfy.model_detection.convert_diffusers_mmdit(tensors, "")
        config = None if converted is None else comfy.model_detection.model_config_from_unet(converted, "")
        tensors = converted or tensors
    if config is None:
        return None
    config.set_inference_dtype(torch.float32, None)
    model = config.get_model(tensors, "", device=torch.device("meta"))
    tensors = config.process_unet_state_dict(tensors)
    model.file_weights = {f"diffusion_model.{name}": list(tensor.shape) for name, tensor in tensors.items()}
    return model


def compare_weights(case: Path, model: Any) -> dict[str, list[str]]:
    """The weights of the file that the model does not have, and those of the model that the file does not have."""
    own = {name: list(tensor.shape) for name, tensor in model.state_dict().items() if "diffusion_model." in name}
    file = model.file_weights
    return {
        "unknown": sorted(name for name, shape in file.items() if own.get(name) != shape),
        "missing": sorted(name for name in own if name not in file),
    }


def map_keys(model: Any) -> dict[str, Any]:
    import comfy.lora

    return dict(comfy.lora.model_lora_keys_unet(model, {}))


def find_read_keys(tensors: dict[str, Tensor], keys: Mapping[str, Any], model: Any) -> set[str]:
    """The keys of a file that change a weight of the model."""
    import comfy.lora
    import comfy.lora_convert

    state = model.state_dict()
    tensors = comfy.lora_convert.convert_lora(tensors)
    read: set[str] = set()
    for name, target in keys.items():
        patches = comfy.lora.load_lora(tensors, {name: target}, log_missing=False)
        for key, patch in patches.items():
            weight, offset = (key[0], key[1]) if isinstance(key, tuple) else (key, None)
            if weight not in state or not hasattr(patch, "loaded_keys"):
                continue
            shape = list(state[weight].shape)
            if offset is not None:
                shape[offset[0]] = offset[2]
            up, down = patch.weights[0], patch.weights[1]
            if [len(up), down[0].numel()] == [shape[0], torch.Size(shape[1:]).numel()]:
                read |= set(patch.loaded_keys) | ({f"{name}.alpha"} & tensors.keys())
    return read


if __name__ == "__main__":
    main(*sys.argv[1:])
