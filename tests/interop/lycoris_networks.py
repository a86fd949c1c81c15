"""Merge LoRA files with LyCORIS' loader for sd-scripts' models, and write the merged weights.

    PYTHON tests/interop/lycoris_networks.py FOLDER_OF_THE_PACKAGE FOLDER_OF_CASES

``client_table.py`` starts it in a process of its own.
"""

import sys

import torch
from client_weights import ClientCase, build_module_tree, read_cases
from safetensors.torch import load_file


def main(folder: str, root: str) -> None:
    sys.path.append(folder)
    for case in read_cases(root):
        for file in case.list_files():
            try:
                case.write_result("lycoris", file, *merge_file(case, load_file(file)))
            except Exception as error:
                case.write_error("lycoris", file, error)


@torch.no_grad()
def merge_file(case: ClientCase, tensors: dict[str, torch.Tensor]) -> tuple[dict[str, dict[str, torch.Tensor]], int]:
    from lycoris.kohya import create_network_from_weights

    weights = case.read_weights("sd_scripts")
    models = {part: build_module_tree(each) for part, each in weights.items()}
    encoders = [model for part, model in models.items() if part != "denoiser"]
    texts = encoders[0] if case.family in ("sd1", "sd2") else encoders
    network, _ = create_network_from_weights(1.0, None, None, texts, models["denoiser"], tensors)
    known = {lora.lora_name for lora in network.text_encoder_loras + network.unet_loras}
    unread = [name for name in tensors if name.partition(".")[0] not in known]
    network.merge_to(texts, models["denoiser"], tensors, torch.float32, "cpu")
    return {part: dict(model.state_dict()) for part, model in models.items()}, len(unread)


if __name__ == "__main__":
    main(*sys.argv[1:])
