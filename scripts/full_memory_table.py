"""Write the table of full training's memory into docs/full_finetuning.md: ``python -m scripts.full_memory_table``.

Each cell is an estimate as that of ``plan --gpu_memory`` for one image of 1024 x 1024, by steps on the meta device.
"""

from collections.abc import Iterator
from pathlib import Path

from library.config import parse_config
from library.estimate.layout_search import estimate_layouts
from library.estimate.memory_estimate import MemoryEstimate
from library.estimate.meta_run import LargestBatch
from library.estimate.meta_run_cache import MetaRuns
from library.estimate.parallel_layouts import LayoutFinder
from library.estimate.step_time import Devices
from library.models.detect import detect_model

PAGE = Path(__file__).resolve().parents[1] / "docs" / "full_finetuning.md"
START, END = "<!-- memory: python -m scripts.full_memory_table -->\n", "<!-- end of memory -->"
MODELS = {"SDXL": "random:sdxl", "FLUX.1": "random:flux"}
GB = 2**30
CAPTION = "a lorikeet sits on a branch in the rain, seen from the side"
SETTINGS = (
    "--train full --resolution 1024 --train_batch_size 1 --mixed_precision bf16 --cache_latents"
    " --cache_text_encoder_outputs"
)
CHECKPOINTED, FUSED, BF16 = "--gradient_checkpointing", "--fused_backward_pass", "--full_bf16"
ADAFACTOR = "--optimizer_type Adafactor --optimizer_args relative_step=False scale_parameter=False"
ROWS = {
    "AdamW": "",
    "AdamW, gradient checkpointing": CHECKPOINTED,
    "+ fused backward pass": f"{CHECKPOINTED} {FUSED}",
    "AdamW8bit": f"{CHECKPOINTED} {FUSED} --optimizer_type AdamW8bit",
    "Lion": f"{CHECKPOINTED} {FUSED} --optimizer_type Lion",
    "Adafactor": f"{CHECKPOINTED} {FUSED} {ADAFACTOR}",
    "SGD": f"{CHECKPOINTED} {FUSED} --optimizer_type SGD",
    "AdamW, `full_bf16`": f"{CHECKPOINTED} {BF16}",
    "AdamW, `full_bf16`, fused backward pass": f"{CHECKPOINTED} {BF16} {FUSED}",
    "AdamW8bit, `full_bf16`, fused backward pass": f"{CHECKPOINTED} {BF16} {FUSED} --optimizer_type AdamW8bit",
    "Adafactor, `full_bf16`, fused backward pass": f"{CHECKPOINTED} {BF16} {FUSED} {ADAFACTOR}",
    "+ 20 blocks swapped": f"{CHECKPOINTED} {BF16} {FUSED} {ADAFACTOR} --blocks_to_swap 20",
    "AdamW8bit, `full_bf16`, fused backward pass, 50 blocks swapped": (
        f"{CHECKPOINTED} {BF16} {FUSED} --optimizer_type AdamW8bit --blocks_to_swap 50"
    ),
    "AdamW, FSDP on 2 GPUs": f"{CHECKPOINTED} --fsdp 2",
    "AdamW, FSDP on 8 GPUs": f"{CHECKPOINTED} --fsdp 8",
}
"""The options of each row; the number after ``--fsdp`` is that of the GPUs."""


def estimate_row(source: str, flags: str, runs: dict[str, MetaRuns]) -> MemoryEstimate:
    """Estimate a model with these options; rows whose steps are equal share them."""
    words = flags.split()
    num_devices = int(words.pop(words.index("--fsdp") + 1)) if "--fsdp" in words else 1
    parsed = parse_config(["--pretrained_model_name_or_path", source, *SETTINGS.split(), *words])
    model = detect_model(source)
    layouts, _ = LayoutFinder(parsed.config, frozenset(parsed.locations), model, num_devices).find_layouts()
    batch = LargestBatch((1024, 1024), (CAPTION,))
    shared = runs.setdefault(source, MetaRuns(model, batch))
    return estimate_layouts(layouts[:1], model, batch, Devices(num_devices, 2**40), runs=shared)[0].memory


def format_memory(memory: MemoryEstimate) -> str:
    """Format the peak and its largest parts, in GB."""
    parts = (memory.adapters, memory.gradients, memory.optimizer, memory.activations + memory.gathered)
    return f"**{memory.total / GB:.1f}** ({' + '.join(f'{part / GB:.1f}' for part in parts)})"


def list_lines() -> Iterator[str]:
    """Yield the lines of the table, each when its estimates are there."""
    yield f"| options | {' | '.join(MODELS)} |"
    yield f"|---|{'---|' * len(MODELS)}"
    runs = dict[str, MetaRuns]()
    for title, flags in ROWS.items():
        cells = [format_memory(estimate_row(source, flags, runs)) for source in MODELS.values()]
        yield f"| {title} | {' | '.join(cells)} |"


def insert_table(page: str, lines: Iterator[str]) -> str:
    """Replace the table on the page."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}" + "\n".join(lines) + f"\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(insert_table(PAGE.read_text(encoding="utf-8"), list_lines()), encoding="utf-8")
