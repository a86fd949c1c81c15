"""Format what is in LoRA files, and what two of them have in common, as lines of text and as JSON."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...adapters.client_compatibility import format_client_losses
from .block_names import get_block, is_text_encoder
from .inspection import MODEL_TITLES, LayerFacts, LoraFacts, group_by_component, iter_training_facts
from .low_rank import BASE_DEPENDENT_TYPES, compute_inner_product, compute_norm, factor_update

_BAR_WIDTH = 24
_CHANGING_KEYS = ("sshs_", "ss_session_id", "ss_training_started_at", "ss_training_finished_at", "modelspec.date")
"""Metadata that differ between any two files."""


def format_facts(facts: LoraFacts, *, with_layers: bool) -> Iterator[str]:
    """One file."""
    file, contents = facts.file, facts.file.lora.contents
    size = "" if file.lora.is_known_size else " of unknown size"
    precision = str(file.precision).removeprefix("torch.")
    types = Counter(layer.adapter_type for layer in facts.layers)
    kinds = ", ".join(
        _TITLES.get(name, name) if len(types) == 1 else f"{count} {name}" for name, count in types.items()
    )
    yield f"{file.path}: {kinds} for {file.family}{size}, {contents.file_format} format, {precision}"
    yield from (f"  {line}" for line in facts.notices)
    for component, layers in group_by_component(facts.layers).items():
        yield f"  {MODEL_TITLES.get(component, component)}: {_describe_layers(layers)}"
    if contents.num_tucker:
        yield f"  {contents.num_tucker} layers have a Tucker core, which is read as LoRA of the same rank"
    if contents.embeddings:
        yield f"  {len(contents.embeddings)} bundled embeddings of OneTrainer"
    for name, fused in list(contents.fused.items())[:1]:
        yield f"  {len(contents.fused)} fused layers cannot be split, such as {name}: {fused.reason}"
    yield from (f"  {line}" for line in iter_training_facts(file.lora.metadata))
    yield from _format_blocks(facts)
    if with_layers:
        yield from _format_layers(facts.layers)
    yield from _format_losses(facts)


_TITLES = {
    "lora": "LoRA",
    "dora": "DoRA",
    "loha": "LoHa",
    "lokr": "LoKr",
    "oft": "OFT",
    "boft": "BOFT",
    "glora": "GLoRA",
}


def _describe_layers(layers: Sequence[LayerFacts]) -> str:
    norms = [layer.norm for layer in layers if layer.norm is not None]
    norm = f", update norm {sum(each**2 for each in norms) ** 0.5:.4g}" if norms else ""
    dead = sum(each == 0 for each in norms)
    untrained = f", {dead} of them zero" if dead else ""
    return f"{len(layers)} layers, rank {_list_values(layer.rank for layer in layers)}, alpha" + (
        f" {_list_values(layer.alpha for layer in layers)}{norm}{untrained}"
    )


def _list_values(values: Any) -> str:
    """``16``, or ``8 (48), 16 (144)``, the most frequent ones first."""
    counts = Counter(values).most_common()
    if len(counts) == 1:
        return f"{counts[0][0]:g}"
    more = f" and {len(counts) - 4} more" if len(counts) > 4 else ""
    return ", ".join(f"{value:g} ({count} layers)" for value, count in counts[:4]) + more


def _format_blocks(facts: LoraFacts) -> Iterator[str]:
    """The denoiser by block; each text encoder in one line."""
    norms: dict[str, float] = {}
    for layer in facts.layers:
        if layer.norm is not None:
            name = layer.module.partition(".")[0] if is_text_encoder(layer.module) else layer.block
            norms[name] = (norms.get(name, 0.0) ** 2 + layer.norm**2) ** 0.5
    largest = max(norms.values(), default=0.0)
    if not largest:
        return
    yield "  update norm by block:"
    width = max(map(len, norms))
    for name, norm in norms.items():
        yield f"    {name:<{width}} {norm:10.4g}  {'#' * round(_BAR_WIDTH * norm / largest)}"


def _format_layers(layers: Sequence[LayerFacts]) -> Iterator[str]:
    width = max(len(layer.module) for layer in layers)
    yield f"  {'layer':<{width}}  type  rank  alpha  update norm"
    for layer in layers:
        norm = "-" if layer.norm is None else f"{layer.norm:.4g}"
        yield f"  {layer.module:<{width}}  {layer.adapter_type}  {layer.rank}  {layer.alpha:g}  {norm}"


def _format_losses(facts: LoraFacts) -> Iterator[str]:
    """Say which programs do not read this file right, and in which format they would."""
    own = facts.file.lora.contents.file_format
    losses = facts.losses
    if not losses[own]:
        yield "  diffusers and ComfyUI read all of it"
        return
    yield f"  not every program reads it right: {format_client_losses(losses[own])}"
    for client in ("diffusers", "ComfyUI"):
        better = [name for name, each in losses.items() if client not in each and client in losses[own]]
        if better:
            yield f"  for {client}: python -m library convert IN OUT --to {better[0]}"


def compare_loras(one: LoraFacts, other: LoraFacts) -> dict[str, Any]:
    """Compare the settings of two files, and the updates of each block by their cosine."""
    first, second = one.file.lora.metadata, other.file.lora.metadata
    keys = [key for key in sorted({*first, *second}) if not key.startswith(_CHANGING_KEYS)]
    settings = {key: (first.get(key), second.get(key)) for key in keys if first.get(key) != second.get(key)}
    own, others = one.file.updates, other.file.updates
    cosines: dict[str, float] = {}
    if one.file.family == other.file.family:
        cosines = _compute_cosines(one, other)
    return {
        "settings": settings,
        "only_in_first": sorted(own.keys() - others.keys()),
        "only_in_second": sorted(others.keys() - own.keys()),
        "cosine_by_block": cosines,
    }


def _compute_cosines(one: LoraFacts, other: LoraFacts) -> dict[str, float]:
    """Blocks in the order of the first file; layers of sizes or types that do not compare are left out."""
    own, others = one.file.updates, other.file.updates
    sums: dict[str, list[float]] = {"denoiser": [0.0] * 3, "text encoders": [0.0] * 3}
    for module in dict.fromkeys(layer.module for layer in one.layers):
        if module not in own or module not in others or own[module].shape != others[module].shape:
            continue
        pair = own[module], others[module]
        if any(each.adapter_type in (*BASE_DEPENDENT_TYPES[2:], "norm", "full") for each in pair):
            continue
        first, second = factor_update(pair[0]), factor_update(pair[1])
        values = compute_inner_product(first, second), compute_norm(first) ** 2, compute_norm(second) ** 2
        for name in ("text encoders" if is_text_encoder(module) else "denoiser", get_block(module)):
            sums[name] = [total + value for total, value in zip(sums.get(name, [0.0] * 3), values, strict=True)]
    return {
        name: inner / (square * other_square) ** 0.5
        for name, (inner, square, other_square) in sums.items()
        if square and other_square
    }


def format_comparison(one: LoraFacts, other: LoraFacts) -> Iterator[str]:
    """Format two files side by side."""
    compared = compare_loras(one, other)
    names = one.file.path.name, other.file.path.name
    yield f"{names[0]} and {names[1]}:"
    if compared["settings"]:
        yield "  settings that differ:"
        yield from (
            f"    {key}: {_cut(first)} | {_cut(second)}" for key, (first, second) in compared["settings"].items()
        )
    else:
        yield "  the same settings in the metadata"
    for key, name in (("only_in_first", names[0]), ("only_in_second", names[1])):
        if compared[key]:
            yield f"  {len(compared[key])} layers only in {name}, such as {compared[key][0]}"
    yield from _format_cosines(one, other, compared["cosine_by_block"])


def _format_cosines(one: LoraFacts, other: LoraFacts, cosines: Mapping[str, float]) -> Iterator[str]:
    if one.file.family != other.file.family:
        yield f"  the updates cannot be compared: {one.file.family} and {other.file.family}"
        return
    norms = one.sum_by_block(), other.sum_by_block()
    yield "  cosine of the updates (1 equal, 0 unrelated), and update norms:"
    for name, cosine in cosines.items():
        if name not in norms[0]:
            yield f"    {name:<28} {cosine:7.4f}"
        elif not is_text_encoder(name):
            yield f"    {name:<28} {cosine:7.4f}  {norms[0][name]:10.4g} {norms[1].get(name, 0.0):10.4g}"


def _cut(value: str | None) -> str:
    if value is None:
        return "-"
    return value if len(value) <= 60 else f"{value[:60]}..."
