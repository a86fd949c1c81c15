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
from dataclasses import replace
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

Written = tuple[ModelConfig, Mapping[str, Mapping[str, Tensor]] | None]
"""The options of a model that was written, and the weights of each denoiser's file in float32; None: diffusers'."""


def write_separate(name: str, pipe: Any, folder: Path) -> Written:
    return model_layouts.write_separate_files(name, pipe, folder), None


def write_fp8(name: str, pipe: Any, folder: Path) -> Written:
    def write(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
        stored, reference = model_layouts.scale_to_fp8(tensors, "scale_weight")
        model_layouts.save_tensors(stored, path)
        return reference

    return _write_denoisers(name, pipe, folder, write, "safetensors")


def write_gguf(name: str, pipe: Any, folder: Path) -> Written:
    def write(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
        return model_layouts.write_gguf(tensors, path, "any")

    return _write_denoisers(name, pipe, folder, write, "gguf")


def _write_denoisers(
    name: str, pipe: Any, folder: Path, write: Callable[[Mapping[str, Tensor], Path], dict[str, Tensor]], end: str
) -> Written:
    """Write separate files with each denoiser's by ``write``, which returns what it stands for."""
    parts = FAMILY_FACTS[name].pipeline.denoisers
    references = {
        part: write(model_layouts.convert_denoiser(name, pipe, part), folder / f"stored_{part}.{end}") for part in parts
    }
    return _name_denoisers(
        name, model_layouts.write_separate_files(name, pipe, folder), folder, "stored", end
    ), references


def _name_denoisers(name: str, options: ModelConfig, folder: Path, start: str, end: str) -> ModelConfig:
    """Put the files of denoisers that begin and end like this in the place of those that the options name."""
    facts = FAMILY_FACTS[name]
    paths = {part: str(folder / f"{start}_{part}.{end}") for part in facts.pipeline.denoisers}
    option_names = {component: option for option, component in facts.options.components.items()}
    named = {option_names[part]: path for part, path in paths.items() if part != facts.file_denoiser}
    return replace(options, pretrained_model_name_or_path=paths[facts.file_denoiser], **named)


def write_shards(name: str, pipe: Any, folder: Path) -> Written:
    pipe.save_pretrained(folder / "model", variant="fp16", max_shard_size="100KB")
    return ModelConfig(str(folder / "model")), None


def get_denoiser(pipe: Any, part: str) -> Any:
    """Get a denoiser; that of high noise where the pipeline has both experts in its place."""
    model = getattr(pipe, part)
    return getattr(model, "high_noise", model)


def write_nf4(name: str, pipe: Any, folder: Path) -> Written:
    pipe.save_pretrained(folder / "model")
    references, settings = {}, {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    for part in FAMILY_FACTS[name].pipeline.denoisers:
        stored, references[part] = model_layouts.quantize_nf4(get_denoiser(pipe, part).state_dict())
        model_layouts.save_tensors(stored, folder / "model" / part / "diffusion_pytorch_model.safetensors")
        path = folder / "model" / part / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))
    return ModelConfig(str(folder / "model")), references


KINDS: Mapping[str, Callable[[str, Any, Path], Written]] = {
    "separate files": write_separate,
    "fp8": write_fp8,
    "GGUF": write_gguf,
    "variant in shards": write_shards,
    "nf4": write_nf4,
}

FILE_KINDS = ("separate files", "fp8", "GGUF")
"""The kinds of files that are the denoiser alone, which some families do not read."""


def load_kind(name: str, kind: str) -> str:
    """Load a family's model of one kind, and describe how it differs from what was written."""
    if kind in FILE_KINDS and not FAMILY_FACTS[name].detection.keys:
        return "folders only"
    pipe, parts = TINY[name]().pipe, FAMILY_FACTS[name].pipeline.denoisers
    with tempfile.TemporaryDirectory() as place, disable_progress_bars():
        folder = Path(place)
        try:
            options, references = KINDS[kind](name, pipe, folder)
            family, detected = FAMILIES.get(name)(options), detect_model(options)
            loaded = family.load(detected, torch.float32, parts)
            kept = family.load(detected, torch.float32, parts, keeps_stored=True)
            count = sum(keep_stored_layers(getattr(kept, part)) for part in parts)
            expected = _load_references(name, folder, options, references, pipe)
        except (UserError, KeyError, ValueError, AttributeError, NotImplementedError) as error:
            return f"no: {str(error).strip().splitlines()[0][-90:]}"
        worst = 0.0
        for part in parts:
            one, modules = get_denoiser(loaded, part), dict[str, Any](get_denoiser(kept, part).named_modules())
            worst = max([worst, *_list_differences(one.state_dict(), expected[part])])
            own = {key: tensor for key, tensor in one.state_dict().items() if key.endswith("weight")}
            ours = {key: modules[key.rpartition(".")[0]].weight.detach() for key in own}
            worst = max([worst, *_list_differences(ours, own)])
        return f"{worst:.0e}" + (f", kept {count}" if count else "")


def _load_references(
    name: str, folder: Path, options: ModelConfig, references: Mapping[str, Mapping[str, Tensor]] | None, pipe: Any
) -> Mapping[str, Mapping[str, Tensor]]:
    """Load what the files stand for from files in float32; the model itself where nothing was rounded."""
    parts = FAMILY_FACTS[name].pipeline.denoisers
    if references is None:
        return {part: get_denoiser(pipe, part).state_dict() for part in parts}
    if not options.pretrained_model_name_or_path.endswith((".safetensors", ".gguf")):
        return references
    for part in parts:
        model_layouts.save_tensors(references[part], folder / f"reference_{part}.safetensors")
    plain = _name_denoisers(name, options, folder, "reference", "safetensors")
    loaded = FAMILIES.get(name)(plain).load(detect_model(plain), torch.float32, parts)
    return {part: get_denoiser(loaded, part).state_dict() for part in parts}


def _list_differences(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Iterator[float]:
    for key, tensor in theirs.items():
        if tensor.is_floating_point() and key in ours:
            yield float((ours[key].float() - tensor.float()).abs().max() / tensor.float().abs().max().clamp_min(1e-12))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--families", help="names with commas; default: all")
    names = parser.parse_args().families
    if unknown := {*(names or "").split(",")} - {*TINY, ""}:
        parser.error(f"no such family: {', '.join(sorted(unknown))}")
    print(f"| family | {' | '.join(KINDS)} |\n|{'---|' * (len(KINDS) + 1)}", flush=True)
    for name in names.split(",") if names else [each for each in FAMILY_FACTS if each in TINY]:
        print(f"| {name} | {' | '.join(load_kind(name, kind) for kind in KINDS)} |", flush=True)


if __name__ == "__main__":
    main()
