"""``python -m library plan`` prints the plan of a run as text, as JSON and as a contact sheet."""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from library.config import parse_config
from library.dataloader.contact_sheet import overlay_mask
from library.dataloader.images import resize_and_crop
from library.dataloader.prepare import prepare_data
from library.dataloader.run_plan import RunPlan
from library.dataset.image_decoding import load_rgb_image
from library.models.detect import detect_model

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = Path(__file__).resolve().parents[2] / "data" / "dataset_configs"


class PlanResult(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def run_plan(*words, cwd=ROOT) -> PlanResult:
    """Run the tool in this process, in a folder."""
    from library.cli import run_tool

    before = Path.cwd()
    os.chdir(cwd)
    try:
        with redirect_stdout(io.StringIO()) as answer, redirect_stderr(io.StringIO()) as messages:
            code = run_tool(["plan", *map(str, words)])
    finally:
        os.chdir(before)
    return PlanResult(code, answer.getvalue(), messages.getvalue())


def run_plan_as_json(*words):
    result = run_plan(*words, "--json")
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture
def dataset(tmp_path) -> list[str]:
    """Options of a run with two datasets of images of many sizes, one rotated by EXIF, and repeats."""
    draw = np.random.default_rng(3)
    shapes = {
        "a": [(200, 90), (80, 80), (70, 160), (90, 90), (120, 80), (64, 64), (130, 60)],
        "b": [(99, 70), (70, 99)],
    }
    for folder, sizes in shapes.items():
        (tmp_path / folder).mkdir()
        for number, (width, height) in enumerate(sizes):
            exif = Image.Exif()
            if (folder, number) == ("a", 0):
                exif[0x0112] = 6
            image = Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8))
            image.save(tmp_path / folder / f"{number}.png", exif=exif)
            (tmp_path / folder / f"{number}.txt").write_text(f"{folder} {number} 猫", encoding="utf-8")
    (tmp_path / "set.toml").write_text(
        "[general]\nenable_bucket = true\nmin_bucket_reso = 32\nbucket_reso_steps = 16\ncaption_extension = '.txt'\n"
        f"[[datasets]]\nresolution = 64\nbatch_size = 2\n[[datasets.subsets]]\nimage_dir = '{tmp_path}/a'\n"
        f"num_repeats = 3\n[[datasets]]\nresolution = [64, 96]\n[[datasets.subsets]]\nimage_dir = '{tmp_path}/b'\n"
        "random_crop = true\n",
        encoding="utf-8",
    )
    return ["--dataset_config", str(tmp_path / "set.toml")]


def prepare_run(options: list[str], world_size: int):
    """Prepare dataset and plan as training does."""
    config = parse_config(options).require_valid()
    prepared = prepare_data(config.data, detect_model(None).size_multiple)
    batch_plan = prepared.build_batch_plan(world_size, config.train)
    return prepared, RunPlan.from_config(batch_plan, config.train, config.optim)


@pytest.mark.parametrize("golden", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_resolve_only_prints_the_values_of_sd_scripts_without_any_folder(golden: Path, tmp_path):
    expected = json.loads(golden.read_text(encoding="utf-8"))
    words = ["--dataset_config", golden.with_suffix(".toml"), *expected["cli"]]
    result = run_plan("--resolve_only", "--json", *words, cwd=tmp_path)
    if not expected["ok"]:
        assert result.returncode == 2 and result.stdout == "" and f"{golden.stem}.toml:" in result.stderr
        return
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == {"datasets": [{"resolved": dataset} for dataset in expected["resolved"]]}


@pytest.mark.slow
def test_without_a_model_sizes_that_published_models_reject_are_named(dataset, tmp_path):
    need = "is not a multiple of what these models need:"
    check = "give --pretrained_model_name_or_path to check yours"
    note = run_plan_as_json(*dataset)["notes"][0]
    assert note.startswith(f"{tmp_path}/set.toml:4: bucket_reso_steps: 16 {need} Stable Diffusion 1 (64), ")
    assert note.endswith(f"; {check}")
    assert {"Stable Diffusion XL (32)", "Sana (32)", "LTX-Video (32)"} < set(note.split(f"{need} ")[1].split(", "))
    text = (tmp_path / "set.toml").read_text()
    steps_of_64 = text.replace("reso_steps = 16", "reso_steps = 64").replace("reso = 32", "reso = 64")
    (tmp_path / "set.toml").write_text(steps_of_64)
    assert not any(need in note for note in run_plan_as_json(*dataset)["notes"])
    (tmp_path / "set.toml").write_text(text.replace("reso_steps = 16", "reso_steps = 8"))
    _, _, messages = run_plan(*dataset)
    assert "8 is not a multiple of 16, which the built-in demo model needs; set 16" in messages
    (tmp_path / "set.toml").write_text(text)
    (tmp_path / "run.toml").write_text("seed = 'x'\nbucket_reso_steps = 16\nenable_bucket = true\nresolution = 64\n")
    options = ["--config_file", tmp_path / "run.toml", "--pretrained_model_name_or_path", "random:sd1"]
    _, _, messages = run_plan(*dataset, *options)
    assert "set.toml:4: bucket_reso_steps: 16 is not a multiple of 64, which this model needs; set 64" in messages
    assert "run.toml:1: seed: expected an integer" in messages


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("length", [["--max_train_epochs", "5"], ["--max_train_steps", "17"]])
def test_the_steps_are_those_of_a_run_on_as_many_processes(dataset, ranks, length):
    options = [*dataset, *length, "--gradient_accumulation_steps", "2", "--seed", "5"]
    plan_json = run_plan_as_json(*options, "--world_size", ranks)
    _, run = prepare_run(options, ranks)
    assert plan_json["ranks"] == ranks == run.batch_plan.dp_size and plan_json["gradient_accumulation_steps"] == 2
    assert (plan_json["steps"], plan_json["epochs"]) == (run.steps, run.num_epochs)
    assert plan_json["steps_per_epoch"] == run.batch_plan.steps_per_epoch
    assert plan_json["micro_batches_per_epoch"] == run.batch_plan.micro_batches_per_epoch
    assert plan_json["samples_per_epoch"] == 7 * 3 + 2 and plan_json["images_per_epoch"] == 9
    batches = [run.batch_plan.get_micro_batch(position) for position in range(run.batch_plan.micro_batches_per_epoch)]
    assert plan_json["padding_per_epoch"] == sum(batch.is_real.count(False) for batch in batches)
    buckets = [bucket for dataset in plan_json["datasets"] for bucket in dataset["buckets"]]
    for index, bucket in enumerate(buckets):
        bucket_batches = [batch for batch in batches if batch.bucket_index == index]
        assert bucket["size"] == list(run.batch_plan.buckets[index].resolution)
        assert bucket["micro_batches"] == len(bucket_batches)
        assert bucket["samples"] == sum(sum(batch.is_real) for batch in bucket_batches)
        assert bucket["padding"] == sum(batch.is_real.count(False) for batch in bucket_batches)
        assert bucket["remainder"] == bucket["samples"] % (bucket["batch_size"] * ranks * 2)


def test_every_image_is_listed_as_it_is_trained(dataset):
    plan_json = run_plan_as_json(*dataset)
    prepared, _ = prepare_run(dataset, 1)
    listed = [sample for dataset in plan_json["datasets"] for sample in dataset["samples"]]
    assert len(listed) == 9
    for sample, placement, item in zip(prepared.manifest.samples, prepared.assignments, listed, strict=True):
        assert item["image"] == str(sample.image) and item["caption"] == sample.caption
        assert item["repeats"] == (3, 1)[sample.dataset_index]
        assert (item["bucket"], item["resized"]) == (list(placement.bucket_resolution), list(placement.resized_size))
        assert item["crop"] == (None if sample.dataset_index == 1 else list(placement.crop_left_top))
    assert listed[0]["size"] == [90, 200] and listed[0]["caption"] == "a 0 猫"  # rotated by EXIF
    first = plan_json["datasets"][0]
    assert first["resolved"]["params"]["resolution"] == [64, 64] and first["bucket_mode"] == "kohya"
    for bucket in first["buckets"]:
        members = [sample for sample in first["samples"] if sample["bucket"] == bucket["size"]]
        losses = {sample["image"]: sample["crop_loss"] for sample in members}
        assert bucket["images"] == len(members)
        assert bucket["crop_loss"]["worst"] == max(losses.values()) == losses[bucket["crop_loss"]["worst_image"]]
        assert bucket["crop_loss"]["mean"] == pytest.approx(sum(losses.values()) / len(losses))


def test_problems_of_tool_and_training_options_are_reported_together(tmp_path):
    result = run_plan(
        *(
            "--jsn --resolve-only --world_size 0 --network_dimm 4 --preveiw x.png --json=1 --preview_limit 3 "
            "--ip_noise_gamma_random_strengthh --learning_rate fast"
        ).split()
    )
    assert result.returncode == 2 and result.stdout == ""
    assert [line.strip().partition(";")[0] for line in result.stderr.splitlines()[1:]] == [
        "--json: takes no value, got '1'",
        "--jsn: unknown option",
        "--resolve-only: unknown option",
        "--world_size: must be at least 1, got 0",
        "--preveiw: unknown option",
        "--network_dimm: unknown option",
        "--ip_noise_gamma_random_strengthh: unknown option",
        "--learning_rate: expected a number, got 'fast'",
        "--dataset_config: missing",
    ]
    for right in ("--json?", "--resolve_only?", "--preview?", "--network_dim?"):
        assert f"did you mean {right}" in result.stderr


def test_problems_of_the_dataset_file_are_reported_with_those_of_options(dataset, tmp_path):
    text = (tmp_path / "set.toml").read_text(encoding="utf-8").replace("batch_size = 2", "batch_sise = 2")
    (tmp_path / "set.toml").write_text(text.replace("/b'", "/c'"), encoding="utf-8")
    result = run_plan(*dataset, "--network_dim", "0", "--world_size", "two")
    assert [line.strip().partition(";")[0] for line in result.stderr.splitlines()[1:]] == [
        "--world_size: expected an integer, got 'two'",
        "--network_dim: must be at least 1, got 0",
        f"{tmp_path}/set.toml:8: batch_sise: unknown key",
        f"{tmp_path}/set.toml:15: image_dir: '{tmp_path}/c' not found",
    ]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--resolve_only"], "--resolve_only: prints JSON only; add --json"),
        (["--resolve_only", "--json", "--preview", "x.png"], "--preview: needs the images"),
        (["--preview", "x.tiff"], "--preview: x.tiff: expected a file name ending in .png"),
        (["--preview", "nowhere/x.png"], "nowhere: no such folder"),
        (["--preview", "a/x.png"], "--preview: a/x.png is in an image folder"),
        (["--preview", "deep/s/x.png"], "--preview: deep/s/x.png is in an image folder"),
        (["--preview"], "--preview: expects a value"),
        (["--pretrained_model_name_or_path", "nowhere.safetensors"], "nowhere.safetensors"),
    ],
)
@pytest.mark.slow
def test_contradicting_options_are_rejected_before_images_are_scanned(dataset, tmp_path, words, problem):
    (tmp_path / "a" / "0.png").write_bytes(b"would be reported, too")
    (tmp_path / "deep" / "s").mkdir(parents=True)
    with (tmp_path / "set.toml").open("a", encoding="utf-8") as file:
        file.write(f"[[datasets.subsets]]\nimage_dir = '{tmp_path}/deep'\nrecursive = true\n")
    result = run_plan(*dataset, *words, cwd=tmp_path)
    assert result.returncode == 2 and problem.format(folder=tmp_path) in result.stderr, result.stderr
    assert "0.png" not in result.stderr


def test_file_names_that_are_not_utf8_are_printed_escaped(tmp_path):
    (tmp_path / "a").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "a" / "猫.png")
    (tmp_path / "a" / "猫.png").rename(os.fsdecode(os.fsencode(tmp_path / "a") + b"/\xff.png"))
    (tmp_path / "set.toml").write_text("[[datasets]]\nresolution = 64\n[[datasets.subsets]]\nimage_dir = 'a'\n")
    words = [sys.executable, "-m", "library", "plan", "--dataset_config", str(tmp_path / "set.toml")]
    environment = os.environ | {"PYTHONIOENCODING": "utf-8:strict"}
    result = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0 and "using an empty caption: \\udcff.png" in result.stdout, result.stderr


def test_keys_that_sd_scripts_lacks_are_listed_separately(dataset, tmp_path):
    text = (tmp_path / "set.toml").read_text(encoding="utf-8").replace("[general]\n", "[general]\nweight = 1\n")
    (tmp_path / "set.toml").write_text(text + "recursive = true\n", encoding="utf-8")
    words = ["--resolve_only", "--json", *dataset]
    first, second = json.loads(run_plan(*words).stdout)["datasets"]
    assert first["other_keys"] == {"weight": 1.0} and second["other_keys"]["subsets"] == [{"recursive": True}]
    assert "weight" not in first["resolved"]["params"] and "recursive" not in second["resolved"]["subsets"][0]
    plan_json = run_plan_as_json(*dataset)
    assert [dataset["other_keys"] for dataset in plan_json["datasets"]] == [first["other_keys"], second["other_keys"]]
    assert {sample["repeats"] for sample in plan_json["datasets"][1]["samples"]} == {7 * 3 / 2}
    assert plan_json["samples_per_epoch"] == 2 * 7 * 3


def test_help_names_the_options_of_the_tool():
    result = run_plan("--help")
    assert result.returncode == 0
    for name in ("--world_size", "--json", "--resolve_only", "--preview", "--preview_limit"):
        assert name in result.stdout


def test_resolve_only_imports_neither_torch_nor_pillow():
    script = (
        "import sys; from library.tools import TOOLS; TOOLS['plan'][1](sys.argv[1:]);"
        "print([name for name in ('torch', 'PIL', 'diffusers', 'accelerate') if name in sys.modules])"
    )
    words = ["--resolve_only", "--json", "--dataset_config", str(GOLDEN / "basic.toml")]
    result = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "[]", result.stderr


def test_planning_does_not_import_torch(dataset, tmp_path):
    script = (
        "import sys; from library.tools import TOOLS; TOOLS['plan'][1](sys.argv[1:]); print('torch' in sys.modules)"
    )
    words = [*dataset, "--json", "--preview", str(tmp_path / "x.png")]
    result = subprocess.run(
        [sys.executable, "-c", script, *words], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.strip() == "False", result.stderr


def test_the_contact_sheet_shows_each_image_as_it_is_trained(dataset, tmp_path):
    result = run_plan(*dataset, "--preview", tmp_path / "sheet.png")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == f"contact sheet: {tmp_path}/sheet.png, 9 of 9 images"
    sheet = np.asarray(Image.open(tmp_path / "sheet.png"))
    prepared, _ = prepare_run(dataset, 1)
    for sample, placement in zip(prepared.manifest.samples, prepared.assignments, strict=True):
        pixels = resize_and_crop(load_rgb_image(sample.image), placement, placement.crop_left_top, None)
        scale = 2 if placement.bucket_resolution[0] * placement.bucket_resolution[1] > 4600 else 3
        expected = pixels.repeat(scale, axis=0).repeat(scale, axis=1)
        assert contains_image(sheet, expected), (sample.key, placement)


def test_masks_are_listed_counted_and_drawn(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    mask = np.zeros((64, 64), np.uint8)
    mask[:16] = 255
    for folder, image in {"p": pixels, "m": mask}.items():
        (tmp_path / folder).mkdir()
        Image.fromarray(image).save(tmp_path / folder / "1.png")
    text = f"image_dir = '{tmp_path}/p'\nconditioning_data_dir = '{tmp_path}/m'\n"
    (tmp_path / "set.toml").write_text(f"[[datasets]]\nresolution = 64\n[[datasets.subsets]]\n{text}")
    words = ["--dataset_config", tmp_path / "set.toml", "--masked_loss"]
    (sample,) = run_plan_as_json(*words)["datasets"][0]["samples"]
    assert sample["mask"] == {"image": f"{tmp_path}/m/1.png", "is_alpha": False, "coverage": 0.25}
    result = run_plan(*words, "--preview", tmp_path / "sheet.png")
    assert f"dataset 1, {tmp_path}/p: 1 image x 1 repeat = 1 per epoch" in result.stdout
    assert ", masks 1/1" in result.stdout
    expected = overlay_mask(pixels, mask).repeat(3, axis=0).repeat(3, axis=1)
    assert contains_image(np.asarray(Image.open(tmp_path / "sheet.png")), expected)
    without = run_plan("--dataset_config", tmp_path / "set.toml")
    assert without.returncode == 2 and "if these are masks, set --masked_loss" in without.stderr


def contains_image(sheet: np.ndarray, image: np.ndarray) -> bool:
    height, width = image.shape[:2]
    corners = np.argwhere((sheet[:-height, :-width] == image[0, 0]).all(axis=-1))
    return any(np.array_equal(sheet[y : y + height, x : x + width], image) for y, x in corners)


@pytest.mark.slow
def test_log_messages_go_to_stderr(dataset, tmp_path):
    (tmp_path / "a" / ".cache-lorikeet" / "scan").mkdir(parents=True)
    (tmp_path / "a" / ".cache-lorikeet" / "scan" / "images.json").write_text("torn")
    result = run_plan(*dataset, "--json")
    assert f"{tmp_path}/a/.cache-lorikeet/scan/images.json is damaged" in result.stderr
    assert len(json.loads(result.stdout)["datasets"]) == 2
    assert run_plan(*dataset, "--json").stderr == ""


@pytest.mark.slow
def test_layouts_that_fit_are_listed_fastest_first_and_others_with_the_memory_they_lack(dataset):
    devices = [*dataset, "--world_size", "2", "--gpu_memory"]
    code, answer, messages = run_plan(*devices, "24GB", "--json")
    assert code == 0, messages
    plan_json = json.loads(answer)
    assert plan_json["gpu_memory"] == 24 * 2**30 and "suggestion" not in plan_json
    assert "estimating memory: a step on the meta device (DDP 2, 1 of 2)" in messages
    assert {layout["layout"]: layout["options"] for layout in plan_json["layouts"]}["FSDP 2"] == "--fsdp"
    speeds = [layout["relative_speed"] for layout in plan_json["layouts"]]
    assert speeds == sorted(speeds, reverse=True) and speeds[0] == 1
    for layout in plan_json["layouts"]:
        assert layout["fits"] and layout["bytes"].pop("total") == sum(layout["bytes"].values())

    _, answer, _ = run_plan(*devices, "24GB", "--device_map", "auto", "--json")
    plan_json = json.loads(answer)
    assert [layout["layout"] for layout in plan_json["layouts"]] == ["device map 2"] and plan_json["ranks"] == 1

    code, answer, messages = run_plan(*devices, "700MB")
    assert code == 0, messages
    lines = answer.splitlines()
    assert "2 x 0.6836 GB, mixed_precision no, largest micro-batch 2 x 64x64" in lines
    assert lines[-2].startswith("layouts that do not fit, and GB over the limit: ") and "DDP 2 +0.3" in lines[-2]
    assert lines[-1].startswith("nothing fits, and no option would change that")


def test_sizes_and_speeds_of_devices_are_read_and_belong_together(dataset):
    result = run_plan(*dataset, "--gpu_memory", "lots", "--link_speed", "0")
    assert "--gpu_memory: expected a memory size, such as 24GB or 512MB" in result.stderr
    assert "--link_speed: must be at least 0.001, got 0.0" in result.stderr
    result = run_plan(*dataset, "--link_speed", "50")
    assert result.returncode == 0 and "--link_speed (gpu_memory is not set)" in result.stderr


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ("--cp_size", "2"),
            "--cp_size 2: Stable Diffusion 1 has convolutions, which cannot be split by tokens; use --tp_size 2",
        ),
        (
            ("--world_size", "3", "--pp_size", "2"),
            "--pp_size 2: the world size 3 is not a multiple of 2; start 4",
        ),
        pytest.param(
            ("--optimizer_type", "torch.optim.LBFGS", "--gpu_memory", "24GB"),
            "its step() requires closure: it evaluates",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(("--gpu_memory", "24GB", "--tp_size", "2"), "--tp_size 2: the world size 1 is not a multiple of 2"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--gpu_memory", "24GB", "--world_size", "2", "--device_map", '{"": 0, "nowhere": 2}'),
            "--device_map: there is no device 2; this process sees devices 0 to 1 --device_map: 'nowhere' is no module",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ("--gpu_memory", "24GB", "--world_size", "2", "--fsdp", "--blocks_to_swap", "1"),
            "--blocks_to_swap: not available in runs that shard the frozen weights over processes",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_settings_that_training_rejects_are_not_planned(dataset, words, problem):
    code, _, messages = run_plan(*dataset, *words)
    assert code == 2 and problem in " ".join(messages.split())
