"""``python -m library convert IN OUT --to FORMAT``: convert a LoRA file to another program's key names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..models.families import FAMILY_FACTS
from ..problems import report_file
from .validate_arguments import check_convert_arguments

if TYPE_CHECKING:  # torch is imported only after the arguments were checked
    from torch import Tensor

    from ..adapters.component_keys import ComponentKeys
    from ..adapters.kohya_diffusers_comfyui_keys import AdapterFileContents
    from ..adapters.metadata import NetworkSizes
    from ..models.known_models import KnownModel

USAGE = "usage: python -m library convert IN.safetensors OUT.safetensors --to kohya|diffusers|comfy"
FORMAT_DESCRIPTIONS = {
    "kohya": "sd-scripts' keys; read by ComfyUI, Forge and diffusers for SD 1, SD 2 and SDXL",
    "diffusers": "diffusers' keys; alpha is multiplied into the weights, and stored in the metadata",
    "comfy": "keys that ComfyUI reads, with alpha: kohya for SD and SDXL, diffusers' for other models",
}


def run_convert(argv: Sequence[str]) -> tuple[str, int]:
    """Convert one file."""
    if not argv or set(argv) & {"--help", "-h"}:
        lines = [
            USAGE,
            "",
            *(f"  {name:<10} {what}" for name, what in FORMAT_DESCRIPTIONS.items()),
            "",
            "The model is detected from the keys. For which program reads which format, see docs/files.md.",
        ]
        return "\n".join(lines), 0
    return convert_lora_file(*_parse_arguments(list(argv))), 0


def _parse_arguments(argv: list[str]) -> tuple[Path, Path, str]:
    file_format = ""
    if "--to" in argv:
        at = argv.index("--to")
        file_format = "".join(argv[at + 1 : at + 2])
        del argv[at : at + 2]
    check_convert_arguments(argv, file_format, FORMAT_DESCRIPTIONS, USAGE)
    source, target = (Path(word).expanduser() for word in argv)
    return source, target, file_format


def convert_lora_file(source: Path, target: Path, file_format: Any) -> str:
    """Convert one file; return a summary."""
    from ..adapters import file_writer
    from ..adapters.alpha_folding import ALPHA_METADATA_KEYS, is_fold_exact
    from ..adapters.client_compatibility import format_client_losses, list_client_losses
    from ..adapters.kohya_diffusers_comfyui_keys import convert_to_file_format
    from ..adapters.metadata import add_model_hashes, list_network_sizes, update_network_metadata
    from ..adapters.peft_metadata import PEFT_METADATA_KEY

    lora = read_lora_file(source)
    content = lora.contents
    try:
        tensors, alpha_metadata = convert_to_file_format(
            content.state_dict, content.alphas, lora.components, file_format, content.alpha_dtype
        )
    except UserError as error:
        raise UserError(report_file(source, str(error))) from None
    has_embeddings = bool(content.embeddings) and file_format != "diffusers"
    if has_embeddings:
        tensors |= content.embeddings
    # diffusers takes rank and alpha from peft's settings if there are any; here they are in the tensors.
    replaced = {*ALPHA_METADATA_KEYS, PEFT_METADATA_KEY}
    metadata = {key: value for key, value in lora.metadata.items() if key not in replaced} | alpha_metadata
    metadata = update_network_metadata(metadata, lora.sizes, list_network_sizes(tensors))
    file_writer.write_adapter_file(target, tensors, add_model_hashes(tensors, metadata), is_trained=False)
    num_tensors = len(tensors)
    del tensors  # what follows needs memory, too
    updates = content.updates
    ranks = sorted({update.rank for update in updates.values()})
    count = f"{len(updates)} module" + "s" * (len(updates) != 1)
    rank = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
    size = "" if lora.is_known_size else " (of unknown size; detected from the keys)"
    lines = [
        f"{source.name}: {lora.family}{size}, {count}, rank {rank}, {content.file_format} format",
        f"{target}: {file_format} format, {num_tensors} tensors",
    ]
    if content.num_tucker:
        lines.append(f"{content.num_tucker} Tucker modules are written as LoRA of the same rank and effect")
    if content.embeddings:
        kept = "are kept" if has_embeddings else "are left out; diffusers' LoRA files have none"
        lines.append(f"{len(content.embeddings)} bundled embeddings of OneTrainer {kept}")
    rounded = [
        name
        for name, update in updates.items()
        if (file_format == "diffusers" or update.adapter_type in ("loha", "lokr")) and not is_fold_exact(update)
    ]
    if rounded:
        lines.append(f"{len(rounded)} modules are rounded in the last bit, as alpha / rank is not a power of two")
    if losses := list_client_losses(updates, lora.components, file_format):
        lines.append(f"not every program reads it right (docs/files.md): {format_client_losses(losses)}")
    return "\n".join(lines)


@dataclass(frozen=True)
class IdentifiedLora:
    """A LoRA file and the model that it is for."""

    family: str
    contents: "AdapterFileContents"
    components: "Sequence[ComponentKeys]"
    metadata: Mapping[str, str]
    is_known_size: bool
    sizes: "NetworkSizes"
    """Ranks and alphas of the file."""
    shapes: "Mapping[str, tuple[int, ...]]"
    """Of the weights of the known model that fits best, by layer; of a LoRA of unknown size only the kernels hold."""


def read_lora_file(path: Path, *, can_be_fused: bool = False, models: "Sequence[KnownModel]" = ()) -> IdentifiedLora:
    """Read a LoRA file in any supported format, and detect its model.

    ``can_be_fused``: also files with updates of fused layers that cannot be split into their parts.  ``models``: the
    known models, for one file after another.
    """
    if not path.is_file():
        raise UserError(report_file(path, f"no such file (looked in {path.absolute().parent})"))
    from ..adapters.file_reader import read_adapter_file

    tensors, metadata = read_adapter_file(path)
    try:
        lora = identify_lora(tensors, metadata, models)
    except UserError as error:
        raise UserError(report_file(path, str(error))) from None
    if lora.contents.fused and not can_be_fused:
        name, fused = next(iter(lora.contents.fused.items()))
        raise UserError(report_file(path, f"{name}: {fused.reason}", "--base_weights can merge it"))
    return lora


def identify_lora(
    tensors: "Mapping[str, Tensor]", metadata: Mapping[str, str], models: "Sequence[KnownModel]" = ()
) -> IdentifiedLora:
    """Find the model that has layers of these names and shapes, or else of these names; only then read the contents.

    So a file that is damaged is an error of its own model, and not a file of another one.
    """
    from ..adapters.kohya_diffusers_comfyui_keys import convert_from_file_format
    from ..adapters.metadata import list_network_sizes
    from ..adapters.validate_file import describe_foreign_keys, describe_origin, describe_unknown_keys
    from ..models.known_models import load_known_models

    if problem := describe_foreign_keys(list(tensors)):
        raise UserError(problem)
    fit = _find_best_fit(tensors, find_stated_family(metadata), models or load_known_models())
    model, unknown = fit.model, fit.unknown
    if unknown:
        text = describe_unknown_keys(unknown, len(tensors), f"{model.family}, which fits the others best")
        if not text.startswith("contains") and len(unknown) > len(tensors) / 2:
            text = f"LoRA of an unknown model; one of its {len(tensors)} keys is {unknown[0]}"
        raise UserError(text + describe_origin(metadata))
    shapes = model.shapes if fit.is_known_size else None
    content = convert_from_file_format(tensors, metadata, model.components, shapes)
    sizes = list_network_sizes(tensors)
    return IdentifiedLora(model.family, content, model.components, metadata, fit.is_known_size, sizes, model.shapes)


@dataclass(frozen=True)
class ModelFit:
    """How well the names and shapes of a file fit a model."""

    model: "KnownModel"
    unknown: Sequence[str]
    """Keys that the model does not have."""
    num_misfits: int
    num_layers: int
    """Layers of other sizes than the model's, and all layers that are not damaged."""

    @property
    def is_known_size(self) -> bool:
        """Whether it is this model, except for a few layers."""
        return self.num_misfits <= self.num_layers / 2


def _find_best_fit(tensors: "Mapping[str, Tensor]", stated: str | None, models: "Sequence[KnownModel]") -> ModelFit:
    """The model with the most names and shapes of the file, of equal ones the stated family, else the first."""
    from ..adapters.kohya_diffusers_comfyui_keys import group_by_file_module
    from ..adapters.validate_file import find_size_problems
    from ..adapters.validate_tensors import find_tensor_problems

    fits: list[ModelFit] = []
    for model in models:
        modules, unknown, _ = group_by_file_module(tensors, model.lookup)
        whole = {name: own for name, own in modules.items() if not any(find_tensor_problems(own))}
        fit = ModelFit(model, unknown, len(list(find_size_problems(whole, model.lookup, model.shapes))), len(whole))
        if whole and not unknown and not fit.num_misfits and stated in (None, model.family):
            return fit
        fits.append(fit)

    def rank(fit: ModelFit) -> tuple[int, float, bool]:
        misfits = fit.num_misfits / max(1, fit.num_layers) if fit.is_known_size else 1.0
        return len(fit.unknown), misfits, fit.model.family != stated

    return min(fits, key=rank)


def find_stated_family(metadata: Mapping[str, str]) -> str | None:
    """The family that the file names."""
    architecture = metadata.get("modelspec.architecture", "")
    starts = {facts.modelspec_architecture: family for family, facts in FAMILY_FACTS.items()}
    found = [start for start in starts if start and architecture.startswith(start)]
    return starts[max(found, key=len)] if found else None
