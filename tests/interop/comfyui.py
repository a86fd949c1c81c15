"""Load LoRA files with ComfyUI as its node "Load LoRA" does, and write the merged weights.

    PYTHON tests/interop/comfyui.py FOLDER_OF_COMFYUI FOLDER_OF_CASES

ComfyUI is a program of its own under the GPL, and no part of this project: ``client_table.py`` starts this script in
a process of its own, with ComfyUI's Python.
"""

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import diffusers  # noqa: F401  it looks for torchvision, and must not find what stands in for it
import torch
import transformers  # noqa: F401
from client_weights import ClientCase, build_module_tree, read_cases
from safetensors.torch import load_file
from transformers import CLIPTextModel  # noqa: F401

MODEL_CLASSES = {  # a family that is not here is not in ComfyUI
    "sd1": "BaseModel",
    "sd2": "BaseModel",
    "sdxl": "SDXL",
    "sd3": "SD3",
    "flux": "Flux",
    "chroma": "Chroma",
    "flux2_dev": "Flux2",
    "flux2_klein": "Flux2",
    "z_image": "Lumina2",
    "qwen_image": "QwenImage",
    "aura_flow": "AuraFlow",
    "ovis_image": "Flux",
    "longcat_image": "LongCatImage",
    "flux_kontext": "Flux",
    "qwen_image_edit": "QwenImage",
    "qwen_image_edit_plus": "QwenImage",
    "qwen_image_layered": "QwenImage",
    "longcat_image_edit": "LongCatImage",
    "joyimage_edit": "JoyImage",
    "joyimage_edit_plus": "JoyImage",
    "z_image_omni": "Lumina2",
    "ernie_image": "ErnieImage",
    "lumina2": "Lumina2",
    "krea2": "Krea2",
    "ideogram4": "Ideogram4",
    "anima": "Anima",
    "hunyuan_image": "HunyuanImage21",
    "pixart_sigma": "PixArt",
    "hidream": "HiDream",
    "kandinsky5_image": "Kandinsky5Image",
}


class UnreadKeys(logging.Handler):
    """Collects the keys that the loader reports as not loaded, and failed merges."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "not loaded" in text or "NOT LOADED" in text or text.startswith("ERROR"):
            self.lines.append(text)


def main(comfyui: str, root: str) -> None:
    stub_modules(
        *("torchvision", "torchvision.transforms", "torchvision.ops", "torchvision.transforms.functional"),
        *("torchvision.transforms.v2", "torchaudio", "torchaudio.transforms", "torchaudio.functional", "av"),
    )
    sys.path.insert(0, comfyui)
    sys.argv = [sys.argv[0], "--" + "cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    for case in read_cases(root):
        for file in case.list_files() if case.family in MODEL_CLASSES else ():
            unread = UnreadKeys()
            logging.getLogger().addHandler(unread)
            try:
                merged = merge_file(case, load_file(file))
                case.write_result("comfyui", file, merged, len(set(unread.lines)))
            except Exception as error:  # what a user would see
                case.write_error("comfyui", file, error)
            logging.getLogger().removeHandler(unread)


def stub_modules(*names: str) -> None:
    """ComfyUI imports these for images and audio; loading a LoRA needs none of them."""
    for name in names:
        module: Any = ModuleType(name)
        module.__getattr__ = lambda attribute: MagicMock()
        module.__path__ = []
        sys.modules.setdefault(name, module)


@torch.no_grad()
def merge_file(case: ClientCase, tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """The whole path of the node: key maps, conversion, loader, patchers, merging."""
    import comfy.model_base
    import comfy.model_patcher
    import comfy.sd

    weights = case.read_weights("comfyui")
    denoiser = {f"diffusion_model.{name}": tensor for name, tensor in weights["denoiser"].items()}
    names = case.facts["comfyui_text_encoders"]
    text = {f"{names[part]}.transformer.{key}": each for part in names for key, each in weights[part].items()}
    model = build_module_tree(denoiser)
    cls = getattr(comfy.model_base, MODEL_CLASSES[case.family])
    model.__class__ = type("Model", (cls,), {"__init__": torch.nn.Module.__init__, "forward": None})
    model.model_config = SimpleNamespace(unet_config=case.facts["comfyui_unet_config"])
    patcher = build_patcher(model)
    clip = None
    if text:
        clip = comfy.sd.CLIP(no_init=True)
        clip.cond_stage_model, clip.patcher = build_module_tree(text), None
        clip.patcher = build_patcher(clip.cond_stage_model)
        clip.tokenizer, clip.layer_idx, clip.tokenizer_options = None, None, {}
        clip.use_clip_schedule, clip.apply_hooks_to_conds = False, None
    patched, patched_clip = comfy.sd.load_lora_for_models(patcher, clip, tensors, 1.0, 1.0)
    merged: dict[str, dict[str, torch.Tensor]] = {"denoiser": {}}
    apply_patches(patched)
    merged["denoiser"] = strip(patched.model.state_dict(), "diffusion_model.")
    if patched_clip is not None:
        apply_patches(patched_clip.patcher)
        state = patched_clip.patcher.model.state_dict()
        merged |= {part: strip(state, f"{name}.transformer.") for part, name in names.items()}
    return merged


def build_patcher(model: Any) -> Any:
    import comfy.model_patcher

    device = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(model, load_device=device, offload_device=device)


def apply_patches(patcher: Any) -> None:
    for key in list(patcher.patches):
        patcher.patch_weight_to_device(key, device_to=torch.device("cpu"))


def strip(state: dict[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): each for name, each in state.items() if name.startswith(prefix)}


if __name__ == "__main__":
    main(*sys.argv[1:])
