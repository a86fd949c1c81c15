"""The commands of ``python -m library lora`` that work on LoRA files: from arguments to lines of text."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...adapters.file_writer import SAVE_DTYPES
from ...adapters.module_adapter import ModuleAdapter
from ...errors import FileError, UserError
from ...problems import Problem, report_file
from .block_names import find_unused_names, parse_block_factors
from .block_scaling import prune_blocks, scale_blocks
from .combining import WeightedFile, build_merged_lora, find_exact_dtype, list_merge_obstacles, merge_loras
from .extraction import Extraction, ExtractionSettings, build_extracted_lora, extract
from .inspection import export_json, inspect_lora
from .inspection_text import compare_loras, format_comparison, format_facts
from .lora_files import (
    LoraFile,
    build_result,
    describe_other_family,
    read_lora_files,
    read_lora_files_for_model,
    write_lora,
)
from .metadata_editing import edit_metadata, format_metadata
from .model_merging import merge_into_model
from .model_weights import ModelFiles, locate_model_weights
from .options import (
    BlockArguments,
    ExtractArguments,
    FormatOptions,
    InspectArguments,
    MergeArguments,
    MergeOptions,
    MetadataArguments,
    ResizeArguments,
)
from .resizing import format_errors, format_share, resize_lora
from .validate_arguments import build_rank_rule, resolve_block_factors


def resolve_dtype(options: FormatOptions, files: Sequence[LoraFile]) -> torch.dtype:
    """The type of the new factors: as set, or the widest of the files."""
    if options.save_precision is not None:
        return SAVE_DTYPES[options.save_precision]
    dtype = max((file.precision for file in files), key=lambda each: torch.finfo(each).bits)
    return torch.float32 if dtype == torch.float64 else dtype


def run_resize(files: Sequence[str], arguments: ResizeArguments) -> Iterator[str]:
    (file,) = read_lora_files(files, arguments.family.family)
    rule = build_rank_rule(arguments.ranks)
    if rule is None:
        raise AssertionError("preflight checks the rule")
    resized = resize_lora(file, rule, resolve_dtype(arguments.format, [file]))
    how = f"resized to {rule.describe()}"
    new = build_result(file, resized.updates, arguments.format.to, how, equalizes_alphas=True)
    written = write_lora(Path(arguments.output.output or "").expanduser(), new, arguments.format.save_precision)
    yield from format_errors(resized.errors, shows_layers=arguments.resize.show_layers)
    for title, count in resized.unchanged.items():
        yield f"{count} layers of type {title} stay as they are: they have no rank that could be reduced"
    yield written.describe()


def weigh_files(files: Sequence[LoraFile], options: MergeOptions) -> list[WeightedFile]:
    """The files with their weights; names of blocks that select no layer are problems."""
    common = options.weights or (1.0,) * len(files)
    denoiser, texts = options.denoiser_weights or common, options.text_encoder_weights or common
    blocks = resolve_block_factors(options.blocks, len(files))
    problems = [
        Problem("blocks", f"{name} selects no layer of {file.path.name}", "its blocks are listed by lora inspect")
        for file, factors in zip(files, blocks, strict=True)
        for name in find_unused_names(factors, file.list_modules())
        if not any(
            find_unused_names([each], other.list_modules()) == []
            for other in files
            for each in factors
            if each.name == name
        )
    ]
    if problems:
        raise FileError(problems)
    return [WeightedFile(*each) for each in zip(files, denoiser, texts, blocks, strict=True)]


def run_merge(files: Sequence[str], arguments: MergeArguments) -> Iterator[str]:
    if arguments.merge.model is not None:
        yield from _merge_into_model(files, arguments)
        return
    loras = read_lora_files(files, arguments.family.family)
    if problems := list_merge_obstacles(loras):
        raise FileError(problems)
    weighted = weigh_files(loras, arguments.merge)
    rule = build_rank_rule(arguments.ranks)
    dtype = resolve_dtype(arguments.format, loras)
    if rule is None and arguments.format.save_precision is None and dtype != find_exact_dtype(weighted, dtype):
        yield "written in float32: these weights would round the factors; --save_precision fp16 halves the file"
        dtype = torch.float32
    updates, errors = merge_loras(weighted, rule, dtype)
    path = Path(arguments.output.output or "").expanduser()
    how = "concatenated" if rule is None else f"SVD to {rule.describe()}"
    new = build_merged_lora(weighted, updates, path, arguments.format.to, how)
    written = write_lora(path, new, arguments.format.save_precision)
    families = " and ".join(dict.fromkeys(file.family for file in loras))
    yield f"merged {len(loras)} LoRAs of {families}: {how}"
    yield from format_errors(errors, shows_layers=False)
    yield written.describe()


def run_extract(files: Sequence[str], arguments: ExtractArguments) -> Iterator[str]:
    options, path = arguments.extract, Path(arguments.output.output or "").expanduser()
    base, tuned = _locate_models(files)
    settings = ExtractionSettings(
        rule=build_rank_rule(arguments.ranks),
        adapter_type=options.type,
        factor=options.factor,
        with_all_layers=options.layers == "all",
        with_convolutions=not options.no_conv,
        min_difference=options.min_difference,
        dtype=getattr(torch, options.math),
        save_dtype=SAVE_DTYPES[arguments.format.save_precision or "float"],
        device=None if options.device is None else _parse_device(options.device),
        fuses_layers=(arguments.format.to or base.family.facts.lora.format) == "kohya",
    )
    result = extract(base, tuned, settings)
    if not result.updates:
        raise FileError(
            [report_file(tuned.path, f"the layers that a LoRA can change are equal to those of {base.path}")]
        )
    yield from _describe_extraction(result, options.show_layers)
    new = build_extracted_lora(base, tuned, settings, result=result, path=path, to=arguments.format.to)
    yield write_lora(path, new).describe()


def _describe_extraction(result: Extraction, shows_layers: bool) -> Iterator[str]:
    yield from format_errors(tuple(result.errors), shows_layers=shows_layers)
    if result.num_equal:
        yield f"{result.num_equal} layers are equal in both models and are left out"
    if result.skipped_components:
        yield f"left out, as they differ by no more than --min_difference: {', '.join(result.skipped_components)}"
    if result.num_left_out:
        whole = math.hypot(result.covered_norm, result.left_out_norm)
        yield (
            f"{result.num_left_out} norms, biases, embeddings and other layers differ, too, and are in no LoRA layer:"
            f" {format_share(result.left_out_norm / whole)} of the norm of all differences"
        )


def _locate_models(files: Sequence[str]) -> list[ModelFiles]:
    models, problems = [], list[Problem]()
    for text in files:
        try:
            models.append(locate_model_weights(text))
        except UserError as error:
            problems += error.problems
    if problems:
        raise FileError(problems)
    return models


def _parse_device(name: str) -> torch.device:
    try:
        torch.zeros(1, device=name)
        return torch.device(name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise FileError([Problem("device", f"cannot be used: {str(error).splitlines()[0]}", value=name)]) from None


def _merge_into_model(files: Sequence[str], arguments: MergeArguments) -> Iterator[str]:
    (model,) = _locate_models([arguments.merge.model or ""])
    if (family := arguments.family.family) not in (None, model.detected.family):
        text = f"contradicts --model, which is a model of {model.detected.family}"
        raise FileError([Problem("family", text, value=family or "", others=("model",))])
    loras = read_lora_files_for_model(files, model)
    weighted = weigh_files(loras, arguments.merge)
    dtype = getattr(torch, arguments.merge.math)
    path = Path(arguments.output.output or "").expanduser()
    merged = merge_into_model(model, weighted, path, dtype, arguments.format.save_precision)
    for file in loras:
        if notice := describe_other_family(file):
            yield notice
        if file.lora.contents.embeddings:
            yield f"{file.path.name}: {len(file.lora.contents.embeddings)} bundled embeddings are not merged"
    yield f"merged {len(loras)} LoRAs into {model.path}: {merged.num_changed} layers of {model.detected.family}"
    yield f"{merged.path}: {merged.num_tensors} tensors, {merged.num_bytes / 1e9:.2f} GB, read back and verified"


def run_inspect(files: Sequence[str], arguments: InspectArguments) -> Iterator[str]:
    options = arguments.inspect
    loras = read_lora_files(files, arguments.family.family, is_for_inspection=True)
    facts = [inspect_lora(file) for file in loras]
    if options.json:
        exported: dict[str, Any] = {"files": [export_json(each, with_layers=options.layers) for each in facts]}
        if len(facts) == 2:
            exported["comparison"] = compare_loras(*facts)
        yield json.dumps(exported, indent=1)
        return
    for each in facts:
        yield from format_facts(each, with_layers=options.layers)
    if len(facts) == 2:
        yield from format_comparison(*facts)


def run_scale(files: Sequence[str], arguments: BlockArguments) -> Iterator[str]:
    (file,) = read_lora_files(files, arguments.family.family)
    texts = arguments.blocks.blocks
    factors = [factor for text in texts for factor in parse_block_factors(text)]
    yield from _write_blocks(file, scale_blocks(file, factors), f"scaled by block: {' '.join(texts)}", arguments)


def run_prune(files: Sequence[str], arguments: BlockArguments) -> Iterator[str]:
    (file,) = read_lora_files(files, arguments.family.family)
    options = arguments.blocks
    what = f"removed {' '.join(options.blocks)}" if options.blocks else f"kept {' '.join(options.keep)} only"
    yield from _write_blocks(file, prune_blocks(file, options.blocks, options.keep), f"pruned: {what}", arguments)


def _write_blocks(
    file: LoraFile, updates: Mapping[str, ModuleAdapter], how: str, arguments: BlockArguments
) -> Iterator[str]:
    new = build_result(file, updates, arguments.format.to, how)
    path = Path(arguments.output.output or "").expanduser()
    written = write_lora(path, new, arguments.format.save_precision)
    before = file.updates
    changed = sum(
        any(tensor is not before[module].tensors[name] for name, tensor in update.tensors.items())
        for module, update in updates.items()
    )
    yield f"{len(before)} layers: {len(before) - len(updates)} removed, {changed} scaled"
    yield written.describe()


def run_metadata(files: Sequence[str], arguments: MetadataArguments) -> Iterator[str]:
    options, source = arguments.metadata, Path(files[0]).expanduser()
    if not options.set and not options.remove:
        yield from format_metadata(source, as_json=options.json)
        return
    path = Path(arguments.output.output or "").expanduser()
    yield from edit_metadata(source, path, options.set, options.remove)
    yield f"{path}: the same tensors, {path.stat().st_size / 1e6:.1f} MB"
