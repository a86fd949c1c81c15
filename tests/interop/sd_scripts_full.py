"""Train a tiny model in full with sd-scripts' own script, and write the losses and the weights after the last step.

    PYTHON tests/interop/sd_scripts_full.py FOLDER_OF_SD_SCRIPTS CASE FOLDER_OF_THE_CASE FILE

``tests/golden/test_kohya_full_training.py`` starts it in a process of its own, with an environment for sd-scripts.
"""

import importlib
import sys
from collections import deque
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import diffusers  # noqa: F401  it looks for torchvision, and must not find what stands in for it
import numpy
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline  # noqa: F401
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from safetensors.torch import save_file
from torch import Tensor
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))
from kohya_full_runs import (
    CASES,
    SDXL_LAYERS,
    TEXT_WIDTHS,
    WIDTH,
    FullCase,
    draw_noise,
    draw_timesteps,
    hash_names,
    summarize_weights,
)


def main(folder: str, name: str, case_folder: str, file: str) -> None:
    case = CASES[name]
    _stand_in_for_torchvision()
    sys.path.insert(0, folder)
    script: Any = importlib.import_module(Path(case.script).stem)
    _shrink_models(case)
    parser = script.setup_parser()
    arguments = parser.parse_args(case.build_flags(Path(case_folder)))
    tensors = record_run(script, case, script.train_util.read_config_from_file(arguments, parser))
    save_file(tensors, file)


def record_run(script: Any, case: FullCase, arguments: Any) -> dict[str, Tensor]:
    """Run the script with the noise of the case; return the loss of each batch and a summary of the weights."""
    util, losses, weights = script.train_util, list[float](), dict[str, Tensor]()
    captions: deque[list[str]] = deque()  # of the batches that were loaded, and not trained yet
    collate, add_noise = util.collator_class.__call__, util.get_noise_noisy_latents_and_timesteps

    def collate_and_note(collator: Any, examples: Any) -> Any:
        captions.append(examples[0]["captions"])
        return collate(collator, examples)

    def add_noise_of_case(settings: Any, scheduler: Any, latents: Tensor) -> Any:
        step, batch = len(losses) // case.accumulation, captions.popleft()
        noise, timesteps = draw_noise(step, batch, latents.shape), draw_timesteps(step, batch)
        with (
            mock.patch.object(torch, "randn_like", lambda *_, **__: noise),
            mock.patch.object(util, "get_timesteps", lambda *_: timesteps),
        ):
            return add_noise(settings, scheduler, latents)

    def keep_weights(*values: Any) -> None:
        models = [value for value in values if isinstance(value, torch.nn.Module)]
        for name, model in zip((*case.encoders, "unet"), models, strict=False):
            state = {key: value.float() for key, value in model.state_dict().items() if value.is_floating_point()}
            if case.is_sdxl and name == "unet":
                state = sys.modules["library.sdxl_model_util"].convert_sdxl_unet_state_dict_to_diffusers(state)
            weights.update({f"{name}.{key}": value for key, value in state.items()})

    owner = sys.modules["library.sdxl_train_util"] if case.is_sdxl else util
    with (
        mock.patch.object(util.collator_class, "__call__", collate_and_note),
        mock.patch.object(util, "get_noise_noisy_latents_and_timesteps", add_noise_of_case),
        # It shuffles when the first batch of an epoch was already taken, so that others come twice or never.
        mock.patch.object(util.BaseDataset, "shuffle_buckets", lambda _: None),
        mock.patch.object(util.LossRecorder, "add", lambda _, *, epoch, step, loss: losses.append(loss)),
        mock.patch.object(util.LossRecorder, "moving_average", 0.0),
        mock.patch.object(DiagonalGaussianDistribution, "sample", DiagonalGaussianDistribution.mode),
        mock.patch.object(owner, "save_sd_model_on_train_end", keep_weights),
    ):
        script.train(arguments)
    return {
        "losses": torch.tensor(losses, dtype=torch.float64),
        "weights": summarize_weights(weights),
        "names": hash_names(weights),
    }


def _shrink_models(case: FullCase) -> None:
    """Give sd-scripts' UNets, whose sizes are constants, those of the case."""
    if not case.is_sdxl:
        unet: Any = importlib.import_module("library.original_unet")
        unet.BLOCK_OUT_CHANNELS = (WIDTH, WIDTH, 2 * WIDTH, 2 * WIDTH)
        unet.TIMESTEP_INPUT_DIM, unet.TIME_EMBED_DIM = WIDTH, 4 * WIDTH
        return
    unet = importlib.import_module("library.sdxl_original_unet")
    unet.MODEL_CHANNELS, unet.TIME_EMBED_DIM, unet.CONTEXT_DIM = WIDTH, 4 * WIDTH, sum(TEXT_WIDTHS)
    unet.ADM_IN_CHANNELS = TEXT_WIDTHS[1] + 6 * 256
    build = unet.Transformer2DModel.__init__
    layers = {2: SDXL_LAYERS[1], 10: SDXL_LAYERS[2]}

    def build_small(self: Any, *, num_transformer_layers: int, cross_attention_dim: int, **settings: Any) -> None:
        size = {"num_transformer_layers": layers[num_transformer_layers], "cross_attention_dim": sum(TEXT_WIDTHS)}
        build(self, **settings, **size)

    unet.Transformer2DModel.__init__ = build_small


def _stand_in_for_torchvision() -> None:
    """Provide what sd-scripts uses of torchvision to train: pixels of an image from -1 to 1."""
    package: Any = ModuleType("torchvision")
    transforms: Any = ModuleType("torchvision.transforms")
    transforms.ToTensor = lambda: lambda image: torch.from_numpy(numpy.array(image)).permute(2, 0, 1).float() / 255
    transforms.Normalize = lambda mean, std: lambda pixels: (pixels - mean[0]) / std[0]
    transforms.Compose = lambda steps: lambda image: _apply(steps, image)
    package.transforms = transforms
    sys.modules["torchvision"], sys.modules["torchvision.transforms"] = package, transforms


def _apply(steps: Any, value: Any) -> Any:
    for step in steps:
        value = step(value)
    return value


if __name__ == "__main__":
    main(*sys.argv[1:])
