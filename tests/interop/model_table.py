"""Count the keys of each family's default LoRA file that diffusers and ComfyUI read, and print a table.

    python tests/interop/model_table.py [--comfyui FOLDER] [--python PYTHON] [--families sd1,...] [--formats auto,...]
        [--patterns FILE]

Models have their published sizes and no weights: they are on the meta device, and the adapter has rank 1.  diffusers
loads the file with its own loader, and each tensor is a number of its own, which is looked for in the loaded layers.
ComfyUI detects the model by the names and shapes of its file, and maps the keys to its own class (``comfyui_keys.py``).
``--patterns`` writes the names of layers that ComfyUI reads, which ``tests/golden/test_comfyui_keys.py`` compares.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import peft  # noqa: E402
import torch  # noqa: E402
from client_table import ORIGINAL_WRITERS, SAME_FILES  # noqa: E402
from original_checkpoints import convert_unet_to_ldm  # noqa: E402
from published_configs import build_component_on_meta  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor  # noqa: E402

from library.adapters import injection  # noqa: E402
from library.adapters.component_key_names import build_key_map  # noqa: E402
from library.config import parse_config  # noqa: E402
from library.models.families import FAMILIES, FAMILY_FACTS  # noqa: E402
from library.training.save_adapter import build_adapter_file  # noqa: E402
from library.training.trainable_modules import build_trainable_modules  # noqa: E402

VARIANTS = ("sd3_5_medium", "sd3_5_large", "flux2_klein_4b")
"""Configurations with other layers than that of their family."""
TRAINER_RULES: Mapping[str, tuple[bool, str, str]] = {
    **dict.fromkeys(("sd1", "sd2", "sdxl"), (False, r"attentions\.", "")),
    "sd3": (True, r"^joint_blocks\.", ""),
    **dict.fromkeys(("flux", "chroma"), (True, r"^(double|single)_blocks\.", "")),
    "lumina2": (True, r"^(layers|noise_refiner|context_refiner|final_layer)\.", ""),
    **dict.fromkeys(("flux2_dev", "flux2_klein"), (True, r"^(double|single)_blocks\.", r"modulation")),
    "z_image": (False, r"^layers\.", r"_modulation"),
    "qwen_image": (False, r"^transformer_blocks\.", ""),
    "krea2": (True, "", ""),
    "ernie_image": (False, r"^layers\.", ""),
    "hunyuan_image": (True, r"^(double|single)_blocks\.", ""),
    "anima": (True, r"^(net\.)?blocks\.", r"_modulation"),
    **dict.fromkeys(("longcat_image", "sana", "pixart_sigma"), (False, r"\.to_([qkv]|out\.0)$", "")),
    "kandinsky5_image": (False, r"\.to_(query|key|value)$", ""),
    "aura_flow": (False, r"\.(to_([qkv]|out\.0|add_out)|add_[qkv]_proj)$", ""),
}
"""What the program that ``lora_targets_of`` names trains by default: layers whose names, those of the original model or
of diffusers, match the first pattern and not the second."""
DOWN_NAMES = ("lora_down.weight", "lora_A.weight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", help="the folder of ComfyUI")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs ComfyUI")
    parser.add_argument("--families", default=",".join((*FAMILY_FACTS, *VARIANTS)), help="names of configurations")
    parser.add_argument("--formats", default="auto", help="the default file, or further values of save_format")
    parser.add_argument("--patterns", help="write the names of layers that ComfyUI reads to this file")
    parser.add_argument("--keep", help="keep the files in this folder")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(arguments.keep or folder)
        for name in arguments.families.split(","):
            rows += measure_family(root / name, name, arguments.formats.split(","))
        if arguments.comfyui:
            script = str(Path(__file__).with_name("comfyui_keys.py"))
            subprocess.run([arguments.python, script, arguments.comfyui, str(root)], check=True, stdout=sys.stderr)
            results = {
                name: json.loads((root / name / "comfyui.json").read_text()) for name in {row["family"] for row in rows}
            }
            for row in rows:
                add_comfyui(row, results[row["family"]])
            if arguments.patterns:
                patterns: dict[str, list[str]] = {}
                for name, each in sorted(results.items()):
                    if is_own(name, each):
                        base = get_family_name(name)
                        patterns[base] = sorted({*patterns.get(base, ()), *each["patterns"]})
                Path(arguments.patterns).write_text(json.dumps(patterns, indent=0) + "\n")
    print(format_table(rows))


def get_family_name(config: str) -> str:
    return max((name for name in FAMILY_FACTS if config == name or config.startswith(f"{name}_")), key=len)


def is_own(name: str, result: Mapping[str, Any]) -> bool:
    """Whether the names of layers are kept for the test: those of U-Nets are many, and known for long."""
    return (
        result["model"] is not None
        and name not in SAME_FILES
        and FAMILY_FACTS[get_family_name(name)].denoiser_name != "unet"
    )


def measure_family(folder: Path, name: str, formats: list[str]) -> list[dict[str, Any]]:
    """Write the files of a family, and the names and shapes of its model."""
    folder.mkdir(parents=True, exist_ok=True)
    base = get_family_name(name)
    family, rows = FAMILIES.get(base)(), []
    model = build_component_on_meta(name, family.facts.denoiser_name)
    original = ORIGINAL_WRITERS.get(SAME_FILES.get(base, base), convert_unet_to_ldm)(model)
    shapes = {key: list(tensor.shape) for key, tensor in original.items()}
    trainer = count_trainer_layers(SAME_FILES.get(base, base), shapes, model)
    (folder / "model.json").write_text(json.dumps(shapes))
    for file_format in formats:
        file = build_file(family, build_component_on_meta(name, family.facts.denoiser_name), file_format)
        path = folder / f"{file_format}.safetensors"
        save_file(file.tensors, path, dict(file.metadata) or None)
        row = {
            "family": name,
            "layers": file.num_layers,
            "trainer": format_trainer(family, trainer, file.modules),
            "format": file.file_format,
            "keys": len(file.tensors),
            "losses": file.client_losses,
            "file": path.name,
        }
        row["diffusers"] = count_in_diffusers(family, model, path, file)
        print(f"{name} {file_format}: {row['diffusers']} of {row['keys']} keys in diffusers", file=sys.stderr)
        rows.append(row)
    return rows


def build_file(family: Any, model: Any, file_format: str) -> Any:
    """The file of a run with rank 1, in which every LoRA tensor has an odd number of its own and alpha is 1."""
    pipe = SimpleNamespace(**{family.facts.denoiser_name: model})
    config = parse_config(["--network_dim", "1", "--network_alpha", "1", "--network_train_unet_only"]).config
    trained, adapter = build_trainable_modules(config, family, pipe)
    made: dict[int, Tensor] = {}
    state = injection.get_adapter_state_dict(trained)
    # Layers of one fused module share a tensor.
    real = {key: made.setdefault(id(tensor), torch.ones(tensor.shape)) for key, tensor in state.items()}
    file = build_adapter_file(real, adapter, family, pipe, file_format)
    numbered = {
        key: tensor if key.endswith(".alpha") else torch.full_like(tensor, 2 * number + 1)
        for number, (key, tensor) in enumerate(file.tensors.items())
    }
    modules = [module.removeprefix(f"{family.facts.denoiser_name}.") for module in adapter.modules]
    return SimpleNamespace(**{**vars(file), "tensors": numbered}, num_layers=len(modules), modules=modules)


def count_trainer_layers(name: str, shapes: Mapping[str, list[int]], model: Any) -> tuple[bool, int] | None:
    """How many layers the other program trains in a model of this size; the first is whether fused ones count as one."""
    if name not in TRAINER_RULES:
        return None
    is_original, pattern, excluded = TRAINER_RULES[name]
    if not is_original:
        shapes = {key: list(tensor.shape) for key, tensor in model.state_dict().items()}
    layers = [
        key.removesuffix(".weight") for key, shape in shapes.items() if key.endswith(".weight") and len(shape) > 1
    ]
    chosen = [layer for layer in layers if re.search(pattern, layer) and not (excluded and re.search(excluded, layer))]
    return is_original, len(chosen)


def format_trainer(family: Any, trainer: tuple[bool, int] | None, modules: list[str]) -> str:
    """The other program and the number of its layers, after ours if they differ."""
    if trainer is None:
        return "own choice"
    is_original, count = trainer
    key_map = build_key_map(modules, family.facts.lora.key_style)
    own = len(key_map.group_modules(modules)) if is_original else len(modules)
    title = family.facts.lora.targets_of
    return f"{own} = {title}" if own == count else f"{own} ({title}: {count})"


def count_in_diffusers(family: Any, model: Any, path: Path, file: Any) -> int | str:
    """How many keys of a file change what diffusers loads: a tensor by its number, an alpha by its layers' strength."""
    try:
        tensors = load_file(path)
        loaded = load_layers(family, model, tensors)
        scaled = {key: 4 * tensor if key.endswith(".alpha") else tensor for key, tensor in tensors.items()}
        stronger = loaded if not any(key.endswith(".alpha") for key in tensors) else load_layers(family, model, scaled)
    except Exception as error:  # what a user would see
        print(f"{family.facts.title}: diffusers: {error!r:.300}", file=sys.stderr)
        return "refused"
    numbers = {number for layer in loaded.values() for number in layer[:2]}
    read = {
        key for key, tensor in tensors.items() if not key.endswith(".alpha") and float(tensor.flatten()[0]) in numbers
    }
    scaled_downs = {layer[0] for name, layer in loaded.items() if stronger[name][2] == 4 * layer[2]}
    for key in tensors:
        down = next((each for each in (key.replace("alpha", end) for end in DOWN_NAMES) if each in tensors), None)
        if key.endswith(".alpha") and down is not None and float(tensors[down].flatten()[0]) in scaled_downs:
            read.add(key)
    return len(read)


def load_layers(family: Any, model: Any, tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float, float]]:
    """The numbers in ``lora_A`` and ``lora_B`` of the layers that the pipeline of a family loads, and the strength."""
    cls, taken = family.get_pipeline_class(), {}
    parts = dict.fromkeys(("text_encoder", "text_encoder_2", "text_encoder_3")) | {family.facts.denoiser_name: model}
    bare = type(cls.__name__, (cls,), {**parts, "components": parts, "config": {}})  # the loader asks for no others
    pipe = bare.__new__(bare)
    set_state = peft.set_peft_model_state_dict

    def record(model: Any, state: dict[str, Tensor], *arguments: Any, **options: Any) -> Any:
        taken.update({key: float(tensor.flatten()[0]) for key, tensor in state.items()})
        result = set_state(model, state, *arguments, **options)
        for key in result.unexpected_keys:
            taken.pop(key.replace(".file.", "."), None)
        return result

    options: dict[str, Any] = {"adapter_name": "file", "low_cpu_mem_usage": True}
    try:
        peft.set_peft_model_state_dict = record  # the model is on the meta device, and loaded layers follow it there
        if hasattr(pipe, "load_lora_weights"):
            pipe.load_lora_weights(dict(tensors), **options)
        else:
            model.load_lora_adapter(dict(tensors), prefix="transformer", **options)
        layers = {}
        for name, module in model.named_modules():
            if hasattr(module, "lora_A") and f"{name}.lora_A.weight" in taken:
                down, up = (taken[f"{name}.lora_{each}.weight"] for each in "AB")
                layers[name] = (down, up, down * up * module.scaling["file"])
    finally:
        peft.set_peft_model_state_dict = set_state
        if hasattr(model, "peft_config"):
            model.unload_lora()
    return layers


def add_comfyui(row: dict[str, Any], result: Mapping[str, Any]) -> None:
    if result["model"] is None:
        row["ComfyUI"] = f"not in ComfyUI {result['version']}"
        return
    row["ComfyUI"] = len(result["files"][row["file"]])
    wrong = {kind: names for kind, names in result["weights"].items() if names}
    if wrong:
        print(f"{row['family']}: {result['model']}: {json.dumps(wrong)[:600]}", file=sys.stderr)


def format_table(rows: list[dict[str, Any]]) -> str:
    """The table of docs/models.md."""
    heads = ("model", "LoRA layers", "as the trainer counts them", "format", "read by diffusers", "by ComfyUI")
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [f"`{row['family']}`", str(row["layers"]), row["trainer"], row["format"]]
        for client in ("diffusers", "ComfyUI"):
            value = row.get(client, "")
            cells.append(f"{value} of {row['keys']}" if isinstance(value, int) else value)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
