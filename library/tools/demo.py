"""``python -m library demo [--video] [--option value ...]``: train a LoRA on a built-in model, as ``make demo`` does.

It needs neither make nor a checkout: the files of the demo are part of the package's wheel.
"""

import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..demo import BUILT_IN_VIDEO_MODEL_DIR, DEMO_CONFIG_DIR
from ..errors import UserError
from .launch import run_launch

TRAINING_SCRIPT = DEMO_CONFIG_DIR.parent / "train_lora.py"


@dataclass(frozen=True)
class Demo:
    """What one of the demos trains: its files are named after it."""

    name: str
    model: Path | None = None
    """``None``: the model that is used without one."""

    @property
    def output_dir(self) -> str:
        """The folder of its results, as its run file says."""
        return f"output/{self.name}"

    def list_files(self) -> list[Path]:
        """List the files and folders that it needs."""
        names = [f"{self.name}{rest}" for rest in (".toml", "_run.toml", "_prompts.txt", "", "_regularisation")]
        own = [DEMO_CONFIG_DIR / f"{self.name}_frames", self.model] if self.model else []
        return [*(DEMO_CONFIG_DIR / name for name in names), *own, TRAINING_SCRIPT]


IMAGE_DEMO = Demo("demo")
VIDEO_DEMO = Demo("demo_video", BUILT_IN_VIDEO_MODEL_DIR)
VIDEO_FLAG = "--video"

USAGE = """usage: python -m library demo [--video] [--option value ...]

Trains a LoRA on the built-in model, in two minutes on two CPU cores; with --video, a motion from clips on the built-in
model of videos, in three.  All options of training can be given, and override the settings of
dataset_configs/demo_run.toml, or of demo_video_run.toml:

  python -m library demo --max_train_steps 20 --output_dir output/short"""


def run_demo(argv: Sequence[str]) -> Generator[str, None, int]:
    """Train, then say where to look; return the exit code of the training."""
    if set(argv) & {"--help", "-h"}:
        yield USAGE
        return 0
    demo, argv = choose_demo(argv)
    if missing := find_missing_files(demo):
        raise UserError(
            f"the files of the demo are missing: {', '.join(missing)}; install the package's wheel, or run this in a"
            " checkout"
        )
    _, code = run_launch(build_demo_command(argv, demo))
    if code == 0:
        yield from format_next_steps(argv, demo)
    return code


def choose_demo(argv: Sequence[str]) -> tuple[Demo, list[str]]:
    """Return the demo that is wanted, and the options of training."""
    return VIDEO_DEMO if VIDEO_FLAG in argv else IMAGE_DEMO, [word for word in argv if word != VIDEO_FLAG]


def find_missing_files(demo: Demo = IMAGE_DEMO) -> list[str]:
    """List the files of the demo that are not where the package is."""
    return [str(path) for path in demo.list_files() if not path.exists()]


def build_demo_command(argv: Sequence[str], demo: Demo = IMAGE_DEMO) -> list[str]:
    """Build the command that trains: of one process, in full precision, so that it is the same on every machine."""
    return [
        *(sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "1", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", str(TRAINING_SCRIPT)),
        *("--dataset_config", str(DEMO_CONFIG_DIR / f"{demo.name}.toml")),
        *("--config_file", str(DEMO_CONFIG_DIR / f"{demo.name}_run.toml")),
        *(("--pretrained_model_name_or_path", str(demo.model)) if demo.model else ()),
        *("--sample_prompts", str(DEMO_CONFIG_DIR / f"{demo.name}_prompts.txt"), "--overwrite", *argv),
    ]


def format_next_steps(argv: Sequence[str], demo: Demo = IMAGE_DEMO) -> Generator[str, None, None]:
    """Say what the demo has made, and how to go on."""
    words = {word.partition("=")[0] for word in argv}
    if words & {"--dry_run", "--output_config"}:
        return
    if not words & {"--output_dir", "--output_name"}:
        sheet = Path(demo.output_dir) / f"{demo.name}.before_after.png"
        yield f"\nOpen {sheet}: the model before, and with the LoRA after more and more steps."
        if demo is VIDEO_DEMO:
            yield f"The clips themselves are .mp4 and .webp files in {Path(demo.output_dir) / 'sample'}."
    yield f"Next: other prompts in {DEMO_CONFIG_DIR / f'{demo.name}_prompts.txt'},"
    yield f"other settings in {DEMO_CONFIG_DIR / f'{demo.name}_run.toml'},"
    yield 'or your own images and a real model: see "Train" in README.md.'
    yield "\nTo look at this run in a browser, with its charts and previews, and to start others:"
    yield "  python -m library web"
    if not words & {"--output_dir", "--output_name"}:
        yield f"then open http://127.0.0.1:7860/runs/0/{demo.output_dir}/{demo.name}"
