"""The checks of a family in training: a dry run, two steps with previews, and a run that resumes after its first step.

They run the training program on a few pictures of their own.
"""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from PIL import Image

from ...adapters.file_reader import read_adapter_file
from ...config import parse_config
from ...estimate.dry_run import build_dry_run
from ...models.base import Family
from ...training.checkpoint_dir import find_checkpoints
from ...training.run import run_training
from .cases import CheckFailedError, CheckSkippedError, TinyCase, ensure

NUM_STEPS = 2
SETTINGS = (
    "--network_dim 4 --network_alpha 2 --learning_rate 1e-2 --save_every_n_steps 1 --save_state --seed 3 --quiet "
    "--network_train_unet_only --cache_latents --cache_text_encoder_outputs --max_data_loader_n_workers 0"
).split()
NAME = "lora"


def write_dataset(folder: Path, case: TinyCase) -> Path:
    """Write three pictures of two shapes with captions, control images where the family needs some, and their file."""
    height, width = case.size
    for number, (w, h) in enumerate(((width, height), (height, width), (width, height)), 1):
        image = Image.radial_gradient("L").resize((w, h)).convert("RGB")
        image.putpixel((number, 1), (255, 10 * number, 0))
        for name in ("images", "controls"):
            (folder / name).mkdir(parents=True, exist_ok=True)
            image.save(folder / name / f"{number}.png")
        (folder / "images" / f"{number}.txt").write_text(f"picture {number} of a circle", encoding="utf-8")
    if len(case.controls) > 1:
        raise CheckSkippedError("the pictures of this check have one control image at most")
    controls = f"conditioning_data_dir = '{folder / 'controls'}'\n" if case.controls else ""
    path = folder / "dataset.toml"
    path.write_text(
        "[general]\nenable_bucket = true\ncaption_extension = '.txt'\n"
        f"[[datasets]]\nresolution = [{width}, {height}]\nmin_bucket_reso = {height}\nmax_bucket_reso = {2 * width}\n"
        f"bucket_reso_steps = {case.detect().size_multiple}\n"
        f"[[datasets.subsets]]\nimage_dir = '{folder / 'images'}'\n{controls}",
        encoding="utf-8",
    )
    return path


def list_flags(case: TinyCase, folder: Path, output: str, *more: str) -> list[str]:
    """List the options of a run."""
    dataset = folder / "dataset.toml"
    if not dataset.is_file():
        write_dataset(folder, case)
    model = ["--pretrained_model_name_or_path", case.source, "--family", case.family]
    files = ["--dataset_config", str(dataset), "--output_dir", str(folder / output), "--output_name", NAME]
    return [*model, *files, "--max_train_steps", str(NUM_STEPS), *SETTINGS, *more]


def train_case(case: TinyCase, folder: Path, output: str, *more: str) -> Path:
    """Train; return the path of the LoRA file."""
    run_training(parse_config(list_flags(case, folder, output, *more)).require_valid())
    return folder / output / f"{NAME}.safetensors"


def check_dry_run(family: Family, case: TinyCase, folder: Path) -> None:
    """Plan a run and estimate its memory."""
    config = parse_config(list_flags(case, folder, "plan")).require_valid()
    text = build_dry_run(config, 1).format_summary()
    ensure(family.facts.title in text or case.family in text, "the plan does not name the family")


def check_training(family: Family, case: TinyCase, folder: Path) -> None:
    """Train two steps with a preview; the LoRA file has a nonzero update and the family's architecture."""
    height, width = case.size
    prompts = folder / "prompts.txt"
    prompts.write_text(f"a red circle --w {width} --h {height} --s 2 --d 1\n", encoding="utf-8")
    previews = () if case.controls else ("--sample_prompts", str(prompts), "--sample_every_n_steps", str(NUM_STEPS))
    tensors, metadata = read_adapter_file(train_case(case, folder, "trained", *previews))
    ensure(any(bool(tensor.any()) for key, tensor in tensors.items() if "alpha" not in key), "nothing was trained")
    info = family.get_base_model_info(case.pipe)
    expected = {"ss_base_model_version": info.base_model_version, "modelspec.architecture": f"{info.architecture}/lora"}
    for key, value in expected.items():
        ensure(metadata.get(key) == value, f"the LoRA file has {key} {metadata.get(key)!r} instead of {value!r}")
    if previews:
        ensure(bool([*(folder / "trained").rglob("*.png")]), "no preview was written")


def check_resume(family: Family, case: TinyCase, folder: Path) -> None:
    """Resume after the first step; the LoRA file is that of the run without a stop."""
    whole = folder / "trained" / f"{NAME}.safetensors"
    if not whole.is_file():
        train_case(case, folder, "trained")
    checkpoints = find_checkpoints(folder / "trained", NAME)
    first = next((path for path in checkpoints if "step00000001" in path.name), None)
    if first is None:
        raise CheckFailedError("the run has saved no checkpoint after its first step")
    (folder / "resumed").mkdir(exist_ok=True)
    shutil.copytree(first, folder / "resumed" / first.name, dirs_exist_ok=True)
    resumed = train_case(case, folder, "resumed", "--resume", str(folder / "resumed" / first.name))
    (expected, _), (actual, _) = read_adapter_file(whole), read_adapter_file(resumed)
    differing = [key for key in expected if key not in actual or not torch.equal(expected[key], actual[key])]
    ensure(not differing and expected.keys() == actual.keys(), f"a resumed run has another LoRA: {differing[:1]}")


TRAINING_CHECKS: Mapping[str, Callable[[Family, TinyCase, Path], None]] = {
    "a run can be planned": check_dry_run,
    "two training steps, previews and metadata": check_training,
    "a resumed run ends with the same LoRA": check_resume,
}
"""The checks by the sentence that they prove; each gets a folder, which they share."""
