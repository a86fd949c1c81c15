"""Load our LoRA files with stable-diffusion.cpp: count the loaded tensors, and compare with merged weights.

    python tests/interop/sdcpp.py FOLDER_OF_THE_PACKAGE WORK_FOLDER

Run it from the repository's folder, after ``pip install --target FOLDER stable-diffusion-cpp-python``.  It builds a
Stable Diffusion 1.5 of the real size with random weights (2 GB, twice) and samples three images of one step.
docs/files.md has the figures.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import original_checkpoints  # noqa: E402

PROMPT = "a red circle"
LEFT_OUT = ("model_ema.", "alphas_cumprod")  # the latter is a placeholder in the tests, which the program would use


def main(package: str, work: str) -> None:
    sys.path.append(package)
    folder = Path(work)
    (folder / "loras").mkdir(parents=True, exist_ok=True)
    names = write_models(folder)
    base, images, merged = sample_image(folder, "base", ""), {}, sample_image(folder, "merged", "")
    for name in names:
        images[name] = sample_image(folder, "base", f"<lora:{name}:1>")
    print(f"the LoRA changes pixels by up to {np.abs(merged - base).max():.0f} of 255")
    for name, image in images.items():
        off = np.abs(image - merged)
        print(f"{name}: off from merged weights by up to {off.max():.0f}, on average {off.mean():.3f}")


@torch.no_grad()
def write_models(folder: Path) -> list[str]:
    """Write the model, the model with merged weights, and the LoRA in two formats, text encoder included."""
    from adapter_states import build_random_state
    from adapter_tensors import merge

    from library.adapters.kohya_diffusers_comfyui_keys import convert_to_file_format
    from library.models.families import FAMILIES

    pipe = FAMILIES.get("sd1")().load("random:sd1", torch.float32)
    state, alphas, parts = build_random_state("sd1", pipe=pipe)
    state = {key: 0.02 * tensor for key, tensor in state.items()}
    forms: dict[str, Any] = {"kohya": "kohya", "diffusers": "diffusers"}
    for name, file_format in forms.items():
        save_file(
            convert_to_file_format(state, alphas, parts, file_format)[0], folder / "loras" / f"{name}.safetensors"
        )
    for name in ("base", "merged"):
        if name == "merged":
            merge(pipe, state, alphas)
        checkpoint = original_checkpoints.build_checkpoint("sd1", pipe)
        weights = {
            key: tensor.half().contiguous() for key, tensor in checkpoint.items() if not key.startswith(LEFT_OUT)
        }
        save_file(weights, folder / f"{name}.safetensors")
    return list(forms)


def sample_image(folder: Path, model: str, words: str) -> Any:
    from stable_diffusion_cpp import StableDiffusion

    program = StableDiffusion(
        str(folder / f"{model}.safetensors"),
        lora_model_dir=str(folder / "loras"),
        n_threads=1,
        wtype="f16",
        lora_apply_mode="immediately",
        verbose=True,
    )
    image = program.generate_image(
        f"{PROMPT}{words}", width=64, height=64, sample_steps=1, cfg_scale=1, seed=1, sample_method="euler"
    )[0]
    return np.asarray(image, dtype=np.float32)


if __name__ == "__main__":
    main(*sys.argv[1:])
