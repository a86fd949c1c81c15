"""``--train full`` trains what ``fine_tune.py`` and ``sdxl_train.py`` of sd-scripts train with the same command.

``tests/data/kohya_full_training.safetensors`` has the losses of ten steps and the weights after them, as sd-scripts
computed them from the same images, captions, noise and timesteps.  To record them, with the environment of sd-scripts:

    python tests/golden/test_kohya_full_training.py FOLDER_OF_SD_SCRIPTS PYTHON
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [] if __name__ != "__main__" else [str(ROOT), str(ROOT / "tests" / "support")]

from kohya_full_runs import (  # noqa: E402
    CASES,
    STEPS,
    FullCase,
    draw_noise,
    draw_timesteps,
    hash_names,
    summarize_weights,
    write_case,
)
from safetensors.torch import load_file, save_file  # noqa: E402

GOLDEN = ROOT / "tests" / "data" / "kohya_full_training.safetensors"
DRIVER = ROOT / "tests" / "interop" / "sd_scripts_full.py"


def train_with_noise_of_case(case: FullCase, *flags: str) -> None:
    """Train in this process with the noise that sd-scripts was given, and the mean of what the VAE returns."""
    from training_runs import train

    from library.dataloader.batch import Moments
    from library.diffusion.objective import Objective
    from library.training.task import DiffusionTask

    current: list[Any] = []  # captions and step of the batch whose noise is drawn next
    encode = DiffusionTask.encode

    def encode_and_note(task: DiffusionTask, batch: Any, step: int) -> Any:
        current[:] = [batch.captions, step]
        return encode(task, batch, step)

    def add_noise(objective: Objective, latents: Tensor, *_: Any) -> Any:
        captions, step = current
        noise, timesteps = draw_noise(step, captions, latents.shape), draw_timesteps(step, captions)
        return objective.add_noise_at(latents, noise, timesteps.float())

    with (
        mock.patch.object(Moments, "sample", lambda moments, _: moments.mean_and_std.float().unbind(1)[0]),
        mock.patch.object(DiffusionTask, "encode", encode_and_note),
        mock.patch.object(Objective, "add_noise", add_noise),
    ):
        train(*flags, "--train", "full")


def read_weights(model: Path, case: FullCase) -> dict[str, Tensor]:
    """Read the weights of UNet and text encoders by the names that published files have."""
    found = {}
    for component in ("unet", *case.encoders):
        for path in (model / component).glob("*.safetensors"):
            tensors = load_file(path)
            start = "text_model." if component == "text_encoder" and "text_model." not in min(tensors) else ""
            found |= {f"{component}.{start}{name}": tensor for name, tensor in tensors.items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_same_command_trains_the_same_weights(name, tmp_path):
    from rank_processes import run_on_ranks
    from resumed_runs import read_metrics

    case, golden = CASES[name], load_file(GOLDEN)
    write_case(case, tmp_path)
    run_on_ranks(1, train_with_noise_of_case, case, *case.build_flags(tmp_path))

    losses = [line["loss/current"] for line in read_metrics(tmp_path / "output") if "loss/current" in line]
    theirs = golden[f"{name}.losses"].view(STEPS, -1).mean(1)
    assert losses == pytest.approx(theirs.tolist(), rel=1e-5)
    before, after = read_weights(tmp_path / "model", case), read_weights(tmp_path / "output" / "lora", case)
    assert hash_names(after) == golden[f"{name}.names"] == hash_names(before)
    difference = (summarize_weights(after) - golden[f"{name}.weights"]).abs()
    scale = torch.tensor([float(after[each].abs().max()) for each in sorted(after)])
    largest = float((difference / scale[:, None]).max())
    assert largest < 1e-5
    moved = {each for each in after if not torch.equal(after[each], before[each])}
    assert {each.partition(".")[0] for each in moved} == {"unet", *(case.encoders if "text" in name else ())}


def record(folder: str, python: str) -> None:
    """Run all cases in sd-scripts."""
    recorded = dict[str, Tensor]()
    with tempfile.TemporaryDirectory() as work:
        for name, case in CASES.items():
            path, file = Path(work, name), Path(work, f"{name}.safetensors")
            write_case(case, path)
            command = [python, str(DRIVER), folder, name, str(path), str(file)]
            subprocess.run(command, check=True, env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""})
            recorded |= {f"{name}.{key}": tensor for key, tensor in load_file(file).items()}
    save_file(recorded, GOLDEN)


if __name__ == "__main__":
    record(*sys.argv[1:])
