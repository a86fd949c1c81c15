"""``python -m library demo [--option value ...]``: train a LoRA on the built-in model, as ``make demo`` does.

It needs neither make nor a checkout: the files of the demo are part of the package's wheel.
"""

import sys
from collections.abc import Generator, Sequence
from pathlib import Path

from ..demo import DEMO_CONFIG_DIR
from ..errors import UserError
from .launch import run_launch

TRAINING_SCRIPT = DEMO_CONFIG_DIR.parent / "train_lora.py"
OUTPUT_DIR, OUTPUT_NAME = "output/demo", "demo"

USAGE = """usage: python -m library demo [--option value ...]

Trains a LoRA on the built-in model, in two minutes on two CPU cores.  All options of training can be given, and
override the settings of dataset_configs/demo_run.toml:

  python -m library demo --max_train_steps 20 --output_dir output/short"""


def run_demo(argv: Sequence[str]) -> Generator[str, None, int]:
    """Train, then say where to look; return the exit code of the training."""
    if set(argv) & {"--help", "-h"}:
        yield USAGE
        return 0
    if missing := find_missing_files():
        raise UserError(
            f"the files of the demo are missing: {', '.join(missing)}; install the package's wheel, or run this in a"
            " checkout"
        )
    _, code = run_launch(build_demo_command(argv))
    if code == 0:
        yield from format_next_steps(argv)
    return code


def find_missing_files() -> list[str]:
    """List the files of the demo that are not where the package is."""
    names = ("demo.toml", "demo_run.toml", "demo_prompts.txt", "demo", "demo_regularisation")
    needed = [*(DEMO_CONFIG_DIR / name for name in names), TRAINING_SCRIPT]
    return [str(path) for path in needed if not path.exists()]


def build_demo_command(argv: Sequence[str]) -> list[str]:
    """Build the command that trains: of one process, in full precision, so that it is the same on every machine."""
    return [
        *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", str(TRAINING_SCRIPT)),
        *("--dataset_config", str(DEMO_CONFIG_DIR / "demo.toml")),
        *("--config_file", str(DEMO_CONFIG_DIR / "demo_run.toml")),
        *("--sample_prompts", str(DEMO_CONFIG_DIR / "demo_prompts.txt"), "--overwrite", *argv),
    ]


def format_next_steps(argv: Sequence[str]) -> Generator[str, None, None]:
    """Say what the demo has made, and how to go on."""
    words = {word.partition("=")[0] for word in argv}
    if words & {"--dry_run", "--output_config"}:
        return
    if not words & {"--output_dir", "--output_name"}:
        sheet = Path(OUTPUT_DIR) / f"{OUTPUT_NAME}.before_after.png"
        yield f"\nOpen {sheet}: the model before, and with the LoRA after more and more steps."
    yield f"Next: other prompts in {DEMO_CONFIG_DIR / 'demo_prompts.txt'},"
    yield f"other settings in {DEMO_CONFIG_DIR / 'demo_run.toml'},"
    yield 'or your own images and a real model: see "Train" in README.md.'
    yield "\nTo look at this run in a browser, with its charts and previews, and to start others:"
    yield "  python -m library web"
    if not words & {"--output_dir", "--output_name"}:
        yield f"then open http://127.0.0.1:7860/runs/0/{OUTPUT_DIR}/{OUTPUT_NAME}"
