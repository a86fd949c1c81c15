"""Write the table of what fits on a GPU into docs/video.md: ``python -m scripts.video_memory_table [FAMILY ...]``.

Each cell is what ``plan --gpu_memory`` advises for one clip, by steps on the meta device; without arguments all
models of videos are searched, which takes some minutes of one processor, otherwise only the rows of these families.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from library.config import parse_config
from library.dataset.clip_windows import FrameRule
from library.estimate.advice import MARGIN, GridSearch, LayoutEstimate
from library.estimate.meta_run import LargestBatch
from library.estimate.meta_run_cache import MetaRuns
from library.estimate.parallel_layouts import LayoutFinder
from library.estimate.step_time import Devices
from library.models.detect import detect_model
from library.models.families import FAMILY_FACTS
from library.models.model_configs import list_family_configs, load_bundled_config

PAGE = Path(__file__).resolve().parents[1] / "docs" / "video.md"
START, END = "<!-- memory: python -m scripts.video_memory_table -->\n", "<!-- end of memory -->"
SIZES, GB = (12, 16, 24, 48, 80), 2**30
WIDTH, HEIGHT, FRAMES = 832, 480, 49
CAPTION = "a lorikeet walks over the snow, lifts its head and flies away, seen from the side, in the evening sun"
SETTINGS = "--mixed_precision bf16 --network_dim 16 --optimizer_type AdamW --cache_latents --cache_text_encoder_outputs"
HEADER = f"| model | clip | {' | '.join(f'{size} GB' for size in SIZES)} |\n|---|---|{'---|' * len(SIZES)}"


def list_video_models() -> list[str]:
    """List the published models of each family of videos, of equal ones the first, as ``random:`` names them."""
    names, seen = [], set[str]()
    for family, facts in FAMILY_FACTS.items():
        if facts.pipeline.frames is None:
            continue
        for config in list_family_configs(family):
            sizes = dict(load_bundled_config(config)[f"{facts.denoiser_name}/config.json"])
            shape = json.dumps({key: value for key, value in sizes.items() if key != "target_size"}, sort_keys=True)
            if not config.endswith("_tiny") and f"{family} {shape}" not in seen:
                seen.add(f"{family} {shape}")
                names.append(config.replace(f"{family}_", f"{family}:", 1))
    return names


def fit_clip(size_multiple: int, rule: FrameRule) -> tuple[int, int, int]:
    """The largest clip of at most 832 x 480 pixels and 49 frames that a model takes."""
    width, height = (side - side % size_multiple for side in (WIDTH, HEIGHT))
    return width, height, rule.round_down(FRAMES)


def build_search(source: str) -> tuple[GridSearch, tuple[int, int, int]]:
    """Build the search for a model with random weights."""
    model = detect_model(source)
    rule = FAMILY_FACTS[model.family].pipeline.frames
    assert rule is not None
    clip = fit_clip(model.size_multiple, rule)
    parsed = parse_config(["--pretrained_model_name_or_path", source, *SETTINGS.split()])
    finder = LayoutFinder(parsed.config, frozenset(parsed.locations), model, 1)
    rule = model.frame_rule or rule
    sides = [rule.get_control_side(number) for number in range(FAMILY_FACTS[model.family].control.num_images[0])]
    controls = tuple((side, side) if side else clip[:2] for side in sides)
    batch = LargestBatch(clip[:2], (CAPTION,), control_sizes=controls, can_be_split=True, num_frames=clip[2])
    # Without FSDP and DeepSpeed: one process trains.
    return GridSearch(finder, MetaRuns(model, batch), Devices(1, 2**40), lambda layout: not layout.options), clip


def build_row(name: str) -> str:
    """Build the row of a model."""
    search, (width, height, frames) = build_search(f"random:{name}")
    family, _, variant = name.partition(":")
    title = f"{FAMILY_FACTS[family].title} {variant}".strip()
    cells = [format_advice(search.advise((1 - MARGIN) * size * GB)) for size in SIZES]
    return f"| {title} | {width}x{height}x{frames} | {' | '.join(cells)} |"


def format_advice(advice: Sequence[LayoutEstimate]) -> str:
    """Format what is advised first, without what all rows have."""
    if not advice:
        return "does not fit"
    first = advice[0]
    return f"{format_options(first.options)}: {first.memory.total / GB:.1f}"


def format_options(options: Mapping[str, Any]) -> str:
    """Name the options by few words."""
    words: Mapping[str, Callable[[Any], str]] = {
        "gradient_checkpointing": lambda value: "checkpointing",
        "gradient_checkpointing_every": lambda value: f"every {value}",
        "activation_memory_budget": lambda value: f"budget {value:g}",
        "cpu_offload_checkpointing": lambda value: "offloaded",
        "quantize_base": str,
        "blocks_to_swap": lambda value: f"swap {value}",
    }
    return ", ".join(word(options[name]) for name, word in words.items() if options.get(name)) or "nothing"


def insert_rows(page: str, rows: Mapping[str, str]) -> str:
    """Replace the rows of these models, by their first cell; others stay, in the order of the families."""
    before, _, rest = page.partition(START)
    table, _, after = rest.partition(END)
    known = {line.split(" | ")[0]: line for line in table.splitlines() if line.startswith("| ")}
    known |= {row.split(" | ")[0]: row for row in rows.values()}
    titles = [
        f"| {FAMILY_FACTS[name.partition(':')[0]].title} {name.partition(':')[2]}".strip()
        for name in list_video_models()
    ]
    lines = [known[title] for title in titles if title in known]
    return f"{before}{START}{HEADER}\n" + "\n".join(lines) + f"\n{END}{after}"


def main(argv: Sequence[str]) -> None:
    """Search the models of these families, and write each row as soon as it is there."""
    for name in list_video_models():
        if not argv or name.partition(":")[0] in argv:
            row = build_row(name)
            PAGE.write_text(insert_rows(PAGE.read_text(encoding="utf-8"), {name: row}), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
