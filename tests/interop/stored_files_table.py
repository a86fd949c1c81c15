"""Load each family's tiny model from the kinds of files that people have, and print a table.

    python tests/interop/stored_files_table.py [--families z_image,...]

A cell is the largest difference of the denoiser's weights to those of the kind's own values, relative to the largest
weight, or why the kind is not read.  ``kept`` counts the layers that training keeps as they are stored.  Kinds: ComfyUI's
separate files; the same with the denoiser in scaled fp8 (``scale_weight``) and in GGUF (Q8_0); a diffusers folder in
several files of a variant (fp16), and one in nf4 of bitsandbytes.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import model_layouts  # noqa: E402
import torch  # noqa: E402
from tiny_pipelines import TINY  # noqa: E402
from torch import Tensor  # noqa: E402

from library.config.schema import ModelConfig  # noqa: E402
from library.errors import UserError  # noqa: E402
from library.models.detect import detect_model  # noqa: E402
from library.models.families import FAMILIES, FAMILY_FACTS  # noqa: E402
from library.models.loading import disable_progress_bars  # noqa: E402
from library.parallel.stored_base import keep_stored_layers  # noqa: E402

Written = tuple[ModelConfig, Mapping[str, Tensor] | None]
"""The options of a model that was written, and the weights of its file in float32 with its names; None: diffusers'."""


def write_separate(name: str, pipe: Any, folder: Path) -> Written:
    return model_layouts.write_separate_files(name, pipe, folder), None


def write_fp8(name: str, pipe: Any, folder: Path) -> Written:
    stored, reference = model_layouts.scale_to_fp8(model_layouts.convert_denoiser(name, pipe), "scale_weight")
    model_layouts.save_tensors(stored, folder / "stored.safetensors")
    return _add_others(name, pipe, folder, "stored.safetensors"), reference


def write_gguf(name: str, pipe: Any, folder: Path) -> Written:
    reference = model_layouts.write_gguf(model_layouts.convert_denoiser(name, pipe), folder / "stored.gguf", "any")
    return _add_others(name, pipe, folder, "stored.gguf"), reference


def _add_others(name: str, pipe: Any, folder: Path, file: str) -> ModelConfig:
    options = model_layouts.write_separate_files(name, pipe, folder)
    values = {key: value for key, value in vars(options).items() if value != getattr(ModelConfig, key)}
    return ModelConfig(**{**values, "pretrained_model_name_or_path": str(folder / file)})


def write_shards(name: str, pipe: Any, folder: Path) -> Written:
    pipe.save_pretrained(folder / "model", variant="fp16", max_shard_size="100KB")
    return ModelConfig(str(folder / "model")), None


def write_nf4(name: str, pipe: Any, folder: Path) -> Written:
    pipe.save_pretrained(folder / "model")
    part = FAMILY_FACTS[name].denoiser_name
    stored, reference = model_layouts.quantize_nf4(getattr(pipe, part).state_dict())
    model_layouts.save_tensors(stored, folder / "model" / part / "diffusion_pytorch_model.safetensors")
    path = folder / "model" / part / "config.json"
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    return ModelConfig(str(folder / "model")), reference


KINDS: Mapping[str, Callable[[str, Any, Path], Written]] = {
    "separate files": write_separate,
    "fp8": write_fp8,
    "GGUF": write_gguf,
    "variant in shards": write_shards,
    "nf4": write_nf4,
}


def load_kind(name: str, kind: str) -> str:
    """Load a family's model of one kind, and describe how it differs from what was written."""
    pipe, part = TINY[name]().pipe, FAMILY_FACTS[name].denoiser_name
    with tempfile.TemporaryDirectory() as place, disable_progress_bars():
        folder = Path(place)
        try:
            options, reference = KINDS[kind](name, pipe, folder)
            family, detected = FAMILIES.get(name)(options), detect_model(options)
            loaded = getattr(family.load(detected, torch.float32, (part,)), part)
            kept = getattr(family.load(detected, torch.float32, (part,), keeps_stored=True), part)
            count = keep_stored_layers(kept)
            expected = _load_reference(name, part, folder, options, reference, pipe)
        except (UserError, KeyError, ValueError, AttributeError, NotImplementedError) as error:
            return f"no: {str(error).strip().splitlines()[0][-90:]}"
        worst = max(_list_differences(loaded.state_dict(), expected), default=0.0)
        modules: dict[str, Any] = dict(kept.named_modules())
        own = {key: tensor for key, tensor in loaded.state_dict().items() if key.endswith("weight")}
        ours = {key: modules[key.rpartition(".")[0]].weight.detach() for key in own}
        worst = max([worst, *_list_differences(ours, own)])
        return f"{worst:.0e}" + (f", kept {count}" if count else "")


def _load_reference(
    name: str, part: str, folder: Path, options: ModelConfig, reference: Mapping[str, Tensor] | None, pipe: Any
) -> dict[str, Tensor]:
    """Load what the file stands for from a file in float32; the model itself where nothing was rounded."""
    if reference is None:
        return dict(getattr(pipe, part).state_dict())
    if not options.pretrained_model_name_or_path.endswith((".safetensors", ".gguf")):
        return dict(reference)
    path = model_layouts.save_tensors(reference, folder / "reference.safetensors")
    values = {key: value for key, value in vars(options).items() if value != getattr(ModelConfig, key)}
    plain = ModelConfig(**{**values, "pretrained_model_name_or_path": path})
    state: dict[str, Tensor] = getattr(
        FAMILIES.get(name)(plain).load(detect_model(plain), torch.float32, (part,)), part
    ).state_dict()
    return state


def _list_differences(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Iterator[float]:
    for key, tensor in theirs.items():
        if tensor.is_floating_point() and key in ours:
            yield float((ours[key].float() - tensor.float()).abs().max() / tensor.float().abs().max().clamp_min(1e-12))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--families", help="names with commas; default: all")
    names = parser.parse_args().families
    print(f"| family | {' | '.join(KINDS)} |\n|{'---|' * (len(KINDS) + 1)}", flush=True)
    for name in names.split(",") if names else [each for each in FAMILY_FACTS if each in TINY]:
        print(f"| {name} | {' | '.join(load_kind(name, kind) for kind in KINDS)} |", flush=True)


if __name__ == "__main__":
    main()
