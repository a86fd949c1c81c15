"""Open the LoRA files of every family and adapter type in other programs, and print the errors of the outputs.

    python tests/interop/client_table.py [--comfyui FOLDER] [--sd_scripts FOLDER] [--lycoris FOLDER]
        [--python PYTHON] [--formats auto,kohya,...] [--families sd1,...] [--kinds LoRA,...] [--json FILE]

For each case a tiny model gets an adapter as training makes it.  A run's default file of it is loaded by diffusers
here, and by each named program in a process of its own (``comfyui.py``, ``sd_scripts.py``, ``lycoris_networks.py``),
along the whole path that a user's file takes.  The merged weights come back, and the outputs of the denoiser and of
the text encoders are compared with those of the adapter in memory.  A cell is the largest error as a share of the
adapter's largest effect.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import client_cases  # noqa: E402
import original_checkpoints  # noqa: E402
import torch  # noqa: E402
from client_cases import TrainedCase  # noqa: E402
from client_weights import ClientLayout  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from library.adapters.original_module_names import map_to_ldm_names  # noqa: E402
from library.errors import UserError  # noqa: E402

TOLERANCE = 1e-4
NO_MODEL = "-"
CLIENTS = {"comfyui": "ComfyUI", "sd_scripts": "sd-scripts", "lycoris": "LyCORIS"}
SCRIPTS = {"comfyui": "comfyui.py", "sd_scripts": "sd_scripts.py", "lycoris": "lycoris_networks.py"}
COMFYUI_TEXT_ENCODERS = {
    "sd1": ("clip_l",),
    "sd2": ("clip_h",),
    "sdxl": ("clip_l", "clip_g"),
    "sd3": ("clip_l", "clip_g", "t5xxl"),
    "flux": ("clip_l", "t5xxl"),
}
ORIGINAL_WRITERS: Mapping[str, Callable[[Any], Mapping[str, Tensor]]] = {
    "sd3": original_checkpoints.convert_sd3_transformer,
    "flux": original_checkpoints.convert_flux_transformer,
    "z_image": original_checkpoints.convert_z_image_transformer,
    "qwen_image": nn.Module.state_dict,
    "chroma": original_checkpoints.convert_chroma_transformer,
    "flux2_dev": original_checkpoints.convert_flux2_transformer,
    "flux2_klein": original_checkpoints.convert_flux2_transformer,
    "ernie_image": nn.Module.state_dict,
    "aura_flow": original_checkpoints.convert_aura_flow_transformer,
    "ovis_image": original_checkpoints.convert_ovis_image_transformer,
    "longcat_image": original_checkpoints.convert_longcat_image_transformer,
    "lumina2": original_checkpoints.convert_lumina2_transformer,
    "krea2": original_checkpoints.convert_krea2_transformer,
    "ideogram4": original_checkpoints.convert_ideogram4_transformer,
    "sana": nn.Module.state_dict,
    "cogview4": nn.Module.state_dict,
    "anima": original_checkpoints.convert_anima_transformer,
    "flux3": original_checkpoints.convert_flux3_transformer,
    "hunyuan_image": original_checkpoints.convert_hunyuan_image_transformer,
    "hunyuan_video": original_checkpoints.convert_hunyuan_video_transformer,
    "qwen_image21": original_checkpoints.convert_qwen_image21_transformer,
    "pixart_sigma": original_checkpoints.convert_pixart_transformer,
    "hidream": nn.Module.state_dict,
    "kandinsky5_image": nn.Module.state_dict,
}
SAME_FILES = {
    "flux_kontext": "flux",
    "qwen_image_edit": "qwen_image",
    "qwen_image_edit_plus": "qwen_image",
    "qwen_image_layered": "qwen_image",
    "longcat_image_edit": "longcat_image",
    "z_image_omni": "z_image",
}
"""Editing models whose files have the names of another model's."""
SD_SCRIPTS_BLOCKS = {
    "anima": {"blocks.{}": "Block"},
    "flux": {"double_blocks.{}": "DoubleStreamBlock", "single_blocks.{}": "SingleStreamBlock"},
    "hunyuan_image": {"double_blocks.{}": "MMDoubleStreamBlock", "single_blocks.{}": "MMSingleStreamBlock"},
    "sd3": {"joint_blocks.{}.x_block": "SingleDiTBlock", "joint_blocks.{}.context_block": "SingleDiTBlock"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for client in CLIENTS:
        parser.add_argument(f"--{client}", help=f"the folder of {CLIENTS[client]}")
    parser.add_argument("--python", default=sys.executable, help="the Python that runs the programs")
    parser.add_argument("--formats", default="auto", help="the default file, or further values of save_format")
    parser.add_argument("--families", default=",".join((*client_cases.EVERY, client_cases.WIDE_FLUX)))
    parser.add_argument("--kinds", help="kinds of adapters, separated by /")
    parser.add_argument("--json", help="also write the figures to this file")
    parser.add_argument("--keep", help="keep the cases in this folder")
    arguments = parser.parse_args()
    clients = {client: folder for client in CLIENTS if (folder := getattr(arguments, client)) is not None}
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(Path(arguments.keep or folder), arguments, clients)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(format_table(rows, ["diffusers", *(CLIENTS[client] for client in clients)]))


def measure(root: Path, arguments: Any, clients: Mapping[str, str]) -> list[dict[str, str]]:
    """Write all files, load them everywhere, and return the rows of the table."""
    cases: dict[tuple[str, str, str], TrainedCase] = {}
    rows = []
    for name in arguments.families.split(","):
        layouts = write_family(root / name, name)
        for kind in client_cases.list_kinds(name):
            if arguments.kinds and kind not in arguments.kinds.split("/"):
                continue
            case = client_cases.build_trained_case(name, kind)
            for file_format in arguments.formats.split(","):
                row = {"family": name, "adapter": kind}
                path = root / name / "files" / f"{kind}-{file_format}.safetensors".replace(" ", "_")
                try:
                    file = client_cases.write_file(case, path, file_format)
                    row["format"] = file.file_format
                    row["losses"] = dict(file.client_losses)  # type: ignore[assignment]
                except UserError as error:
                    rows.append({**row, "format": file_format, "diffusers": f"not written: {error}"})
                    continue
                row["diffusers"] = measure_in_diffusers(case, path)
                rows.append(row)
                cases[name, kind, file_format] = case
                row["file"] = path.name
                row["layouts"] = layouts  # type: ignore[assignment]
        print(f"{name}: {sum(row['family'] == name for row in rows)} files written", file=sys.stderr)
    for client, folder in clients.items():
        script = Path(__file__).with_name(SCRIPTS[client])
        done = subprocess.run([arguments.python, str(script), folder, str(root)], capture_output=True, text=True)
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr)
        keys = iter(cases.items())
        for row in rows:
            if "file" in row:
                (_, case) = next(keys)
                row[CLIENTS[client]] = measure_in_client(root, client, row, case)
    for row in rows:
        row.pop("layouts", None)
        row.pop("file", None)
    return rows


def write_family(folder: Path, name: str) -> dict[str, dict[str, ClientLayout]]:
    """Write the base weights under the clients' names, and the facts of the model."""
    (folder / "files").mkdir(parents=True, exist_ok=True)
    (folder / "results").mkdir(exist_ok=True)
    pipe, name = client_cases.load_tiny_pipeline(name), client_cases.get_family_name(name)
    family = client_cases.FAMILIES.get(name)
    parts = {"denoiser": getattr(pipe, family.facts.denoiser_name)}
    parts |= {part: getattr(pipe, part) for part in family.facts.lora.text_encoders}
    layouts: dict[str, dict[str, ClientLayout]] = {}
    for client in ("comfyui", "sd_scripts"):
        layouts[client] = layouts.get("comfyui", {}) if name not in ("sd1", "sd2", "hunyuan_image") else {}
        layouts[client] = layouts[client] or {
            part: ClientLayout.trace(model, select_writer(name, part, model, client)) for part, model in parts.items()
        }
        weights = {
            f"{part}|{key}": tensor
            for part, layout in layouts[client].items()
            for key, tensor in layout.export_weights(parts[part]).items()
        }
        save_file(weights, folder / f"{client}.safetensors")
    encoders = dict(zip(list(parts)[1:], COMFYUI_TEXT_ENCODERS.get(SAME_FILES.get(name, name), ()), strict=True))
    classes = {part: find_class_names(name, part, model, layouts["sd_scripts"][part]) for part, model in parts.items()}
    facts = {
        "comfyui_text_encoders": encoders,
        "comfyui_unet_config": detect_unet_config(SAME_FILES.get(name, name), pipe),
        "sd_scripts_classes": classes,
    }
    (folder / "facts.json").write_text(json.dumps(facts))
    return layouts


def select_writer(name: str, part: str, model: nn.Module, client: str) -> Callable[[Any], Mapping[str, Tensor]]:
    """How a client names the weights of a component."""
    if part != "denoiser":
        return original_checkpoints.convert_clip if type(model).__name__.startswith("CLIP") else nn.Module.state_dict
    if client == "sd_scripts" and name in ("sd1", "sd2"):
        return nn.Module.state_dict  # sd-scripts has diffusers' names for these U-Nets
    if client == "comfyui" and name == "hunyuan_image":  # its class has other names than the file
        return original_checkpoints.convert_hunyuan_image_for_comfyui
    return ORIGINAL_WRITERS.get(SAME_FILES.get(name, name), original_checkpoints.convert_unet_to_ldm)


def find_class_names(name: str, part: str, model: nn.Module, layout: ClientLayout) -> dict[str, str]:
    """The class names that sd-scripts looks for, by the names of its modules."""
    if part == "denoiser" and name in SD_SCRIPTS_BLOCKS:
        return {pattern.format(number): cls for pattern, cls in SD_SCRIPTS_BLOCKS[name].items() for number in range(50)}
    names = {module: module for module, _ in model.named_modules()}
    if part == "denoiser" and name == "sdxl":
        names = dict(map_to_ldm_names(names))
    elif part != "denoiser" and type(model).__name__.startswith("CLIP"):
        names = {module: module if module.startswith("text_") else f"text_model.{module}" for module in names}
    return {names[module]: type(each).__name__ for module, each in model.named_modules() if module}


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
    if family in ("flux", "chroma", "flux2_dev", "flux2_klein", "ovis_image", "longcat_image"):
        return {
            "depth": config.num_layers,
            "depth_single_blocks": config.num_single_layers,
            "hidden_size": config.num_attention_heads * config.attention_head_dim,
        }
    if family == "aura_flow":
        layers = config.num_mmdit_layers + config.num_single_dit_layers
        return {"n_double_layers": config.num_mmdit_layers, "n_layers": layers}
    if family == "krea2":
        return {"layers": config.num_layers}
    if family == "lumina2":
        return {"n_layers": config.num_layers, "n_refiner_layers": config.num_refiner_layers, "dim": config.hidden_size}
    if family == "z_image":
        return {"n_layers": config.n_layers, "n_refiner_layers": config.n_refiner_layers, "dim": config.dim}
    return {}


def measure_in_diffusers(case: TrainedCase, path: Path) -> str:
    try:
        outputs = client_cases.load_in_diffusers(case, path)
    except Exception as error:  # what a user would see
        print(f"{case.name} {case.kind}: diffusers: {error!r:.200}", file=sys.stderr)
        return "refused"
    return format_errors(client_cases.measure_errors(case, outputs))


def measure_in_client(root: Path, client: str, row: Mapping[str, Any], case: TrainedCase) -> str:
    """Put the merged weights of a client into the model, and compare its outputs."""
    folder = root / case.name / "results"
    result = folder / f"{client}-{row['file']}.json"
    if not result.exists():
        return NO_MODEL
    found = json.loads(result.read_text())
    if "error" in found:
        print(f"{case.name} {case.kind}: {CLIENTS[client]}: {found['error'][:200]}", file=sys.stderr)
        return "refused"
    merged: dict[str, dict[str, Tensor]] = {}
    for key, tensor in load_file(folder / f"{client}-{row['file']}").items():
        part, _, name = key.partition("|")
        merged.setdefault(part, {})[name] = tensor
    pipe = client_cases.load_tiny_pipeline(case.name)
    layouts = row["layouts"]["comfyui" if client == "comfyui" else "sd_scripts"]
    for part, layout in layouts.items():
        attribute = case.family.facts.denoiser_name if part == "denoiser" else part
        layout.import_weights(getattr(pipe, attribute), merged[part])
    return format_errors(client_cases.measure_errors(case, client_cases.compute_outputs(case.name, pipe)))


def format_errors(errors: Mapping[str, float]) -> str:
    """``1e-06``, or the components that are wrong."""
    wrong = {part: error for part, error in errors.items() if not error < TOLERANCE}
    if not wrong:
        return f"{max(errors.values()):.0e}"
    if len(wrong) == len(errors) and all(abs(error - 1) < 1e-3 for error in wrong.values()):
        return "no effect"
    return ", ".join(f"{part} {error:.2f}" for part, error in wrong.items())


def format_table(rows: list[dict[str, str]], columns: list[str]) -> str:
    """The table in Markdown."""
    heads = ["family", "adapter", "format", *columns]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    lines += ["| " + " | ".join(row.get(head, "") for head in heads) + " |" for row in rows]
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
