"""Merge LoRA files with sd-scripts' own network modules, and write the merged weights.

    PYTHON tests/interop/sd_scripts.py FOLDER_OF_SD_SCRIPTS FOLDER_OF_CASES

``client_table.py`` starts it in a process of its own.
"""

import importlib
import sys
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import diffusers  # noqa: F401  it looks for torchvision, and must not find what stands in for it
import torch
from client_weights import ClientCase, build_module_tree, read_cases
from safetensors.torch import load_file
from transformers import CLIPTextModel  # noqa: F401

NETWORKS = {
    "sd1": "lora",
    "sd2": "lora",
    "sdxl": "lora",
    "sd3": "lora_sd3",
    "flux": "lora_flux",
    "anima": "lora_anima",
    "hunyuan_image": "lora_hunyuan_image",
}


def main(folder: str, root: str) -> None:
    for name in ("torchvision", "torchvision.transforms", "cv2", "imagesize", "toml", "voluptuous", "opencv"):
        module: Any = ModuleType(name)
        module.__getattr__ = lambda attribute: MagicMock()
        module.__path__ = []
        sys.modules.setdefault(name, module)
    sys.path.insert(0, folder)
    for case in read_cases(root):
        if case.family not in NETWORKS:
            continue
        network = importlib.import_module(f"networks.{NETWORKS[case.family]}")
        for file in case.list_files():
            try:
                case.write_result("sd_scripts", file, *merge_file(case, network, load_file(file)))
            except Exception as error:
                case.write_error("sd_scripts", file, error)


@torch.no_grad()
def merge_file(
    case: ClientCase, module: Any, tensors: dict[str, torch.Tensor]
) -> tuple[dict[str, dict[str, torch.Tensor]], int]:
    weights, classes = case.read_weights("sd_scripts"), case.facts["sd_scripts_classes"]
    models = {part: build_module_tree(each, classes[part]) for part, each in weights.items()}
    if case.family == "sdxl":  # the class decides which prefixes text encoders have
        cls = module.SdxlUNet2DConditionModel
        models["denoiser"].__class__ = type("Unet", (cls,), {"__init__": torch.nn.Module.__init__})
    encoders = [model for part, model in models.items() if part != "denoiser"]
    texts = encoders[0] if case.family in ("sd1", "sd2") else encoders
    network, state = module.create_network_from_weights(1.0, None, None, texts, models["denoiser"], tensors, True)
    known = {lora.lora_name for lora in network.text_encoder_loras + network.unet_loras}
    unread = [name for name in state if name.partition(".")[0] not in known]
    network.merge_to(texts, models["denoiser"], state, torch.float32, "cpu")
    return {part: dict(model.state_dict()) for part, model in models.items()}, len(unread)


if __name__ == "__main__":
    main(*sys.argv[1:])
