"""Write the tables of trained layers into docs/adapters.md: ``python -m scripts.adapter_target_table``."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from library.adapters.component_key_names import build_key_map
from library.adapters.original_module_names import KeyStyle
from library.adapters.targets_rank_alpha import find_target_layers
from library.config.schema import AdapterConfig
from library.config.schema_optim import OptimConfig
from library.models.base import Family
from library.models.detect import detect_model
from library.models.facts import FamilyFacts
from library.models.families import FAMILIES, FAMILY_FACTS
from library.models.loading import load_components_on_meta
from library.training.trainable_modules import select_target_components

from .adapter_target_rules import PROGRAMS, REASONS, list_rules
from .model_table import END

PAGE = Path(__file__).resolve().parents[1] / "docs" / "adapters.md"
START = "<!-- layers: python -m scripts.adapter_target_table -->\n"
TEXT_START = "<!-- text encoder layers: python -m scripts.adapter_target_table -->\n"
KINDS = {
    "refiners": r"refiner|text_fusion|text_transformer_blocks",
    "modulation": r"norm\w*\.linear|_mod\.|modulation|adaln|time_mod",
    "feed-forward": r"\.(ff\w*|\w*mlp|feed_forward|ffn|proj_mlp)(\.|$)|single_transformer_blocks\.\d+\.proj_out$",
    "attention": r"\.(self_|cross_)?(attn\d?|attentions?)\.",
    "others": "",
}
"""Kinds of layers, and patterns of their names in diffusers; the first that matches counts."""
CLIP_LAYERS = r"\.(self_attn|mlp)\."
"""The layers of CLIP encoders that sd-scripts adapts, used or not."""


@dataclass(frozen=True)
class FamilyTargets:
    """The layers of a denoiser, and those that each trainer adapts by default; the first is this program."""

    layers: tuple[str, ...]
    """All linear layers and 1x1 convolutions, by their names in diffusers."""
    unused: frozenset[str]
    """Layers that get no gradient, which have no adapter here."""
    trained: dict[str, frozenset[str]]

    @property
    def ours(self) -> frozenset[str]:
        return self.trained[""]

    def list_equal_programs(self) -> list[str]:
        """List the trainers that adapt the same layers, not counting those that get no gradient."""
        return [name for name, layers in self.trained.items() if name and layers - self.unused == self.ours]

    def format_cell(self, program: str) -> str:
        """Format the number of layers, and their kinds."""
        if program not in self.trained:
            return ""
        trained, kinds = self.trained[program], []
        for kind in KINDS:
            every = {name for name in self.layers if classify_layer(name) == kind}
            count = len(every & trained)
            if count:
                kinds.append(kind if count == len(every) else f"{count} of {len(every)} {kind}")
        return f"{len(trained)}: {', '.join(kinds)}"


def classify_layer(name: str) -> str:
    """Return the kind of a layer."""
    return next(kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE))


def list_layers(model: nn.Module) -> tuple[str, ...]:
    """List the layers that a LoRA of linear layers can adapt."""
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1))
    )


def find_targets(name: str) -> FamilyTargets:
    """Find the layers that each trainer adapts in a family's model of published size, on the meta device."""
    family, pipe = load_on_meta(name, (FAMILY_FACTS[name].denoiser_name,))
    component = select_target_components(AdapterConfig(network_train_unet_only=True), OptimConfig(), family, pipe)[0]
    layers = list_layers(component.model)
    originals = map_original_names(layers, component.model, component.key_style)
    ours = frozenset(layer.module for layer in find_target_layers(component) if not layer.is_optional)
    trained = {"": ours}
    for program, rule in list_rules(name):
        trained[program] = frozenset(layer for layer in layers if rule.match(layer, originals[layer]))
    return FamilyTargets(layers, frozenset(component.unused_layers), trained)


def load_on_meta(name: str, components: Sequence[str]) -> tuple[Family, Any]:
    """Build these components in the size of the family's first bundled configuration."""
    return FAMILIES.get(name)(), load_components_on_meta(detect_model(f"random:{name}"), components)


def map_original_names(layers: Sequence[str], model: nn.Module, style: KeyStyle) -> dict[str, str]:
    """Map layers to their names in the original model; layers that its LoRA files do not know keep theirs."""
    key_map = build_key_map((name for name, _ in model.named_modules()), style)
    known = key_map.filter_known_modules(layers) if key_map.layout else layers
    groups = key_map.group_modules(known)
    return dict(zip(layers, layers, strict=True)) | {
        module: group.name for group in groups for module in group.modules if module is not None
    }


def format_denoiser_table() -> str:
    """Format the table of denoisers; families with equal cells share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for name, facts in FAMILY_FACTS.items():
        if list_rules(name):
            targets = find_targets(name)
            cells = (*map(targets.format_cell, ("", *PROGRAMS)), REASONS.get(name, ""))
            rows.setdefault(cells, []).append(facts.title)
    header = f"| model | here | {' | '.join(PROGRAMS)} | why |\n|{'---|' * (len(PROGRAMS) + 3)}"
    return "\n".join([header, *(f"| {', '.join(titles)} | {' | '.join(cells)} |" for cells, titles in rows.items())])


def format_text_table() -> str:
    """Format the table of text encoders that are trained by default."""
    rows: dict[str, list[str]] = {}
    for name, facts in FAMILY_FACTS.items():
        if facts.lora.text_encoders and list_rules(name):
            rows.setdefault(" | ".join(_iter_text_cells(name, facts)), []).append(facts.title)
    lines = [f"| {', '.join(titles)} | {cells} |" for cells, titles in rows.items()]
    return "\n".join(["| model | here | layers of these encoders |", "|---|---|---|", *lines])


def _iter_text_cells(name: str, facts: FamilyFacts) -> Iterator[str]:
    encoders = [part for part in facts.lora.text_encoders if part != facts.text.t5_encoder]
    family, pipe = load_on_meta(name, (facts.denoiser_name, *encoders))
    parts = [
        part for part in select_target_components(AdapterConfig(), OptimConfig(), family, pipe) if part.is_text_encoder
    ]
    yield " + ".join(f"{len(find_target_layers(part))} of `{part.name}`" for part in parts)
    counts = [sum(re.search(CLIP_LAYERS, layer) is not None for layer in list_layers(part.model)) for part in parts]
    yield " + ".join(map(str, counts))


def insert_tables(page: str) -> str:
    """Replace what is between the marks."""
    for start, table in ((START, format_denoiser_table()), (TEXT_START, format_text_table())):
        before, _, rest = page.partition(start)
        page = f"{before}{start}{table}\n{END}{rest.partition(END)[2]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(insert_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
