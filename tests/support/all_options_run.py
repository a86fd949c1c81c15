"""Options of a run that use everything which reads all weights or communicates between ranks."""

import json
from pathlib import Path

from training_runs import write_images

PROMPTS = """\
a red circle --w 64 --h 96 --d 1 --s 3 --l 3
a blue triangle --n red --w 96 --h 64 --d 2 --s 2 --l 3
a green square --w 64 --h 64 --d 3 --s 2 --l 1
"""


def build_flags(folder: Path) -> tuple[str, ...]:
    """Previews, EMA, max norm, Prodigy, and validation with three batches."""
    data = write_images(folder, {(96, 64): 7, (64, 96): 3})
    data.write_text(data.read_text().replace("[[datasets]]", "[[datasets]]\nvalidation_split = 0.5"))
    (folder / "prompts.txt").write_text(PROMPTS)
    return (
        "--dataset_config",
        str(data),
        *(
            "--train_batch_size 1 --max_train_steps 4 --optimizer_type Prodigy --learning_rate 1.0 "
            "--scale_weight_norms 0.05 --ema_decay 0.9"
        ).split(),
        "--sample_prompts",
        str(folder / "prompts.txt"),
        *"--sample_at_first --sample_every_n_steps 4 --validate_every_n_steps 2".split(),
    )


def read_validation_losses(folder: Path) -> list[dict[str, float]]:
    """The losses of each validation by timestep and of the base model."""
    lines = [json.loads(line) for line in (folder / "lora.metrics.jsonl").read_text("utf-8").splitlines()]
    losses = [
        {name: value for name, value in line.items() if name.startswith(("validation/timestep/", "validation/base"))}
        for line in lines
    ]
    return [line for line in losses if line]
