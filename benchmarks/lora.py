"""Benchmark the LoRA tools: CPU time and peak memory of each as a process of its own, and how exact its result is.

Models have random weights and are diffusers folders, or single files of the original code.  The LoRAs have all usual
layers, text encoders included.
"""

import json
import math
import re
import shutil
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from library.adapters.file_writer import SAVE_DTYPES, write_adapter_file
from library.adapters.kohya_diffusers_comfyui_keys import convert_to_file_format
from library.adapters.merge import compute_delta_weight
from library.adapters.original_module_names import map_to_ldm_names
from library.adapters.targets_rank_alpha import match_target_modules
from library.cli import run_tool
from library.errors import ConfigError, UserError
from library.models.collect_component_keys import collect_component_keys
from library.models.families import FAMILIES
from library.problems import Problem, report_argument
from library.tools.lora.lora_files import read_lora_files_for_model
from library.tools.lora.low_rank import add_updates, compute_difference, compute_norm, factor_update
from library.tools.lora.model_weights import ModelFiles, locate_model_weights

from .processes import TAIL, start_python
from .report import Measurement

RANK, SMALL_RANK, ALPHA = 16, 4, 8.0
ENERGY = 1 - 1e-8
"""Layers that are one in the original model have the ranks of their parts together."""
FACTOR = 0.02
"""Standard deviation of the elements of both factors."""


def add_arguments(parser: ArgumentParser) -> None:
    tiny = [f"random:{name}:tiny" for name in FAMILIES.entries]
    parser.add_argument("--models", nargs="+", default=tiny, help="random:FAMILY[:SIZE] ... (default: all, tiny)")
    parser.add_argument("--precision", choices=SAVE_DTYPES, default="float", help="of the model (default %(default)s)")
    parser.add_argument("--single_file", action="store_true", help="as one file with the original keys: sd1 only")
    parser.set_defaults(repetitions=1)


def run(options: Namespace, training_options: Sequence[str], directory: Path) -> Iterator[Measurement]:
    """Try all tools on one model after another."""
    if training_options:
        raise ConfigError([report_argument(training_options[0], "unknown option")])
    if options.single_file and any(source.split(":")[1] != "sd1" for source in options.models):
        raise ConfigError([Problem("single_file", "only for random:sd1")])
    for source in options.models:
        folder = directory / source.replace(":", "_")
        folder.mkdir()
        title = source.removeprefix("random:").removesuffix(":tiny")
        try:
            end = ".safetensors" if options.single_file else ""
            write_model_and_loras(source, SAVE_DTYPES[options.precision], folder, is_file=options.single_file)
            for name, words in list_commands(folder, end).items():
                usages = [
                    run_command([*words, "--overwrite"] if name != "inspect" else words)
                    for _ in range(options.repetitions)
                ]
                peak = max(usage["peak_bytes"] for usage in usages) / 1e6
                yield Measurement(
                    f"{title}: {name}", [each["seconds"] for each in usages], "s", note=f"peak {peak:,.0f} MB"
                )
            yield from measure_errors(title, folder, end)
        finally:
            shutil.rmtree(folder)


def write_model_and_loras(source: str, dtype: torch.dtype, folder: Path, *, is_file: bool) -> None:
    """Write ``model``, and ``one`` and ``two``, LoRAs of it in float32."""
    family = FAMILIES.get(source.split(":")[1])()
    pipe: Any = family.load(source, dtype)
    if is_file:
        save_file(collect_original_tensors(pipe), folder / "model.safetensors")
    else:
        pipe.save_pretrained(folder / "model")
    components = collect_component_keys(family, pipe)
    for seed, name in enumerate(("one", "two")):
        generator, state = torch.Generator().manual_seed(seed), dict[str, torch.Tensor]()
        for part in components:
            model, is_denoiser = getattr(pipe, part.name), part.name == family.facts.denoiser_name
            targets = family.facts.lora.targets if is_denoiser else family.facts.lora.text_encoders[part.name].targets
            for module in match_target_modules(model, targets):
                outputs, inputs, *kernel = model.get_submodule(module).weight.shape
                for end, shape in (("A", (RANK, inputs, *kernel)), ("B", (outputs, RANK, *[1] * len(kernel)))):
                    state[f"{part.name}.{module}.lora_{end}.weight"] = FACTOR * torch.randn(shape, generator=generator)
        alphas = {key.removesuffix(".lora_A.weight"): ALPHA for key in state if key.endswith(".lora_A.weight")}
        tensors, metadata = convert_to_file_format(state, alphas, components, family.facts.lora.format)
        write_adapter_file(folder / f"{name}.safetensors", tensors, metadata, is_trained=False)


def collect_original_tensors(pipe: Any) -> dict[str, torch.Tensor]:
    """The tensors of Stable Diffusion 1 by the keys of the original code."""
    names = map_to_ldm_names(name for name, _ in pipe.unet.named_modules())
    tensors = dict[str, torch.Tensor]()
    for key, tensor in pipe.unet.state_dict().items():
        module, _, end = key.rpartition(".")
        tensors[f"model.diffusion_model.{names[module]}.{end}"] = tensor
    for key, tensor in pipe.text_encoder.state_dict().items():
        tensors[f"cond_stage_model.transformer.text_model.{key.removeprefix('text_model.')}"] = tensor
    num_levels = len(pipe.vae.config.block_out_channels)
    for key, tensor in pipe.vae.state_dict().items():
        is_projection = tensor.dim() == 2  # a convolution of 1x1 in the original
        name = f"first_stage_model.{rename_vae_key(key, num_levels)}"
        tensors[name] = tensor[:, :, None, None] if is_projection else tensor
    return tensors


VAE_NAMES = {
    "resnets": "block",
    "downsamplers.0": "downsample",
    "upsamplers.0": "upsample",
    "mid_block.resnets.0": "mid.block_1",
    "mid_block.resnets.1": "mid.block_2",
    "mid_block.attentions.0": "mid.attn_1",
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
    "conv_norm_out": "norm_out",
    "conv_shortcut": "nin_shortcut",
}
"""Parts of key names of a VAE in diffusers, and in the original code."""


def rename_vae_key(key: str, num_levels: int) -> str:
    """The key in the original code, which numbers the levels of the decoder from the other end."""
    key = re.sub(r"up_blocks\.(\d+)", lambda match: f"up.{num_levels - 1 - int(match[1])}", key)
    key = key.replace("down_blocks.", "down.")
    for name in sorted(VAE_NAMES, key=len, reverse=True):
        key = re.sub(rf"(?<![^.]){re.escape(name)}(?![^.])", VAE_NAMES[name], key)
    return key


def list_commands(folder: Path, end: str) -> dict[str, list[str]]:
    """The commands by what they do."""
    one, two, sums, svd, small, back = (
        str(folder / f"{name}.safetensors") for name in ("one", "two", "sum", "svd", "small", "back")
    )
    model, merged = str(folder / f"model{end}"), str(folder / f"merged{end}")
    return {
        "inspect": ["inspect", one],
        "merge two": ["merge", one, two, "--output", sums],
        "merge two by SVD": ["merge", one, two, "--rank", str(RANK), "--output", svd],
        "resize": ["resize", one, "--rank", str(SMALL_RANK), "--output", small],
        "merge into the model": ["merge", one, "--model", model, "--output", merged],
        "extract": ["extract", model, merged, "--energy", str(ENERGY), "--output", back],
    }


def run_command(words: Sequence[str]) -> dict[str, float]:
    """Run one command; return its CPU seconds, start of Python included, and its peak memory."""
    with start_python(["-m", __name__, *words]) as process:
        assert process.stderr is not None
        errors = process.stderr.read()
        code = process.wait()
    if code:
        raise UserError(f"lora {' '.join(words)[:200]} failed:\n{errors[-TAIL:]}")
    usage: dict[str, float] = json.loads(errors.splitlines()[-1])
    return usage


def measure_errors(title: str, folder: Path, end: str) -> Iterator[Measurement]:
    """Norms of differences as shares of the update's norm, over all layers."""
    model, merged = (locate_model_weights(str(folder / f"{name}{end}")) for name in ("model", "merged"))
    names = ("one", "two", "sum", "small", "back")
    one, two, sums, small, back = (
        file.updates
        for file in read_lora_files_for_model([str(folder / f"{name}.safetensors") for name in names], model)
    )
    wanted, others = ({name: factor_update(each) for name, each in file.items()} for file in (one, two))

    def compare(found: Any, expected: Any) -> list[float]:
        norms = [compute_norm(expected[name]) for name in expected]
        differences = [
            compute_difference(factor_update(found[name]), expected[name])
            if name in found
            else compute_norm(expected[name])
            for name in expected
        ]
        return [math.hypot(*differences) / math.hypot(*norms)]

    both = {name: add_updates([each, others[name]]) for name, each in wanted.items()}
    yield Measurement(f"{title}: error of the sum", compare(sums, both))
    yield Measurement(f"{title}: error of the model", [compare_weights(model, merged, one)])
    yield Measurement(f"{title}: error of the extracted LoRA", compare(back, wanted))
    yield Measurement(f"{title}: error of rank {SMALL_RANK}", compare(small, wanted))


def compare_weights(model: ModelFiles, merged: ModelFiles, updates: Any) -> float:
    """The error of the merged weights."""
    differences, norms = [], []
    for name, update in updates.items():
        base = model.weights[name].read(torch.float64)
        delta = compute_delta_weight(update, torch.float64).reshape(base.shape) * update.scale
        differences.append(float(torch.linalg.vector_norm(merged.weights[name].read(torch.float64) - base - delta)))
        norms.append(float(torch.linalg.vector_norm(delta)))
    return math.hypot(*differences) / math.hypot(*norms)


def read_peak_bytes() -> int:
    """The peak of this process alone; that of ``getrusage`` begins with its parent's."""
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))


if __name__ == "__main__":
    exit_code = run_tool(["lora", *sys.argv[1:]])
    usage = {"seconds": time.process_time(), "peak_bytes": read_peak_bytes()}
    sys.stderr.write(f"{json.dumps(usage)}\n")
    raise SystemExit(exit_code)
