"""Fun-Control with control clips and pictures to refer to: one result on any number of processes, resume, previews."""

from pathlib import Path

import pytest
import torch
from clip_files import write_clip
from killed_runs import train_and_kill
from PIL import Image
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import max_relative_difference, train

pytestmark = pytest.mark.slow
CASES = {
    f"{name}{end}": ("--pretrained_model_name_or_path", f"random:{name}:tiny", *more)
    for name in ("wan_fun_control", "wan_fun_control11", "wan22_fun_control")
    for end, more in (("", ()), ("_from_image", ("--image_to_video",)))
}
SETTINGS = (
    "--network_dim 2 --learning_rate 1e-1 --seed 5 --mixed_precision no --max_train_steps 6 "
    "--optimizer_type SGD --optimizer_args momentum=0.9 weight_decay=0.1"
).split()
WHOLE = (1, ("--gradient_accumulation_steps", "2"))
LAYOUTS = {
    "DDP 2": (2, ()),
    "FSDP 2": (2, ("--fsdp",)),
    "TP 2": (2, ("--tp_size", "2", *WHOLE[1])),
    "PP 2": (2, ("--pp_size", "2", *WHOLE[1])),
    "CP 2": (2, ("--cp_size", "2", *WHOLE[1])),
}
TESTED = [
    ("wan_fun_control_from_image", "TP 2"),
    ("wan_fun_control11", "CP 2"),
    ("wan_fun_control11_from_image", "FSDP 2"),
    ("wan22_fun_control", "PP 2"),
    ("wan22_fun_control_from_image", "CP 2"),
    ("wan22_fun_control_from_image", "DDP 2"),
]
"""What ``make test-slow`` compares; all others have been compared once."""


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_data(tmp_path_factory.mktemp("control"))


def write_data(folder: Path) -> Path:
    """Write clips with a control each, and with a picture in a folder of one image for the models that take one."""
    for number in range(4):
        clip = write_clip(folder / "clips" / f"{number}.mp4", 30, 24, (96, 64), shade=50 * number)
        clip.with_suffix(".txt").write_text(f"clip {number}, moving", encoding="utf-8")
        picture = Image.radial_gradient("L").resize((96, 64)).rotate(40 * number).convert("RGB")
        for controls in (folder / "1", folder / "2"):
            write_clip(controls / f"{number}_0.mp4", 30, 24, (96, 64), shade=250 - 50 * number)
        (folder / "2" / f"{number}_1").mkdir()
        picture.save(folder / "2" / f"{number}_1" / "picture.png")
    (folder / "prompt.txt").write_text(
        f"a walk --w 64 --h 48 --f 5 --s 2 --d 1 --i {folder / '2' / '0_1' / 'picture.png'} "
        f"--cn {folder / '2' / '0_0.mp4'} --cn {folder / '2' / '1_1'}\n",
        encoding="utf-8",
    )
    for name in "12":
        (folder / f"{name}.toml").write_text(
            f"""
[[datasets]]
resolution = 64
batch_size = 2
caption_extension = ".txt"
[[datasets.subsets]]
video_dir = '{folder / "clips"}'
control_directory = '{folder / name}'
target_frames = [1, 9]
"""
        )
    return folder


def build_flags(case: str, data: Path, folder: Path, *more: str) -> tuple[str, ...]:
    num_controls = 1 if case.startswith("wan_fun_control_") or case == "wan_fun_control" else 2
    dataset = ("--dataset_config", str(data / f"{num_controls}.toml"), "--output_dir", str(folder))
    return (*CASES[case], *dataset, *SETTINGS, *more)


def load_adapters(folder: Path) -> dict[str, torch.Tensor]:
    """Load the files of a run, of which two experts have one each."""
    paths = [path for path in sorted(folder.glob("lora*.safetensors")) if "-" not in path.stem]
    return {f"{path.stem}.{key}": value for path in paths for key, value in load_file(path).items()}


def compare_layout(case: str, layout: str, data: Path, folder: Path) -> float:
    """Train in one process and in a layout, and return the largest relative difference of the trained weights."""
    files = []
    for name, (ranks, more) in (("whole", WHOLE), ("split", LAYOUTS[layout])):
        if not (folder / name).exists():
            run_on_ranks(ranks, train, *build_flags(case, data, folder / name, *more))
        files.append({key: each for key, each in load_adapters(folder / name).items() if "lora_up" in key})
    assert all(each.any() for key, each in files[0].items() if "high_noise" not in key)
    return max_relative_difference(*files)


@pytest.mark.parametrize(("case", "layout"), TESTED)
def test_every_layout_trains_the_same(case, layout, data, tmp_path):
    assert compare_layout(case, layout, data, tmp_path) < 1e-5


@pytest.mark.parametrize("case", ["wan_fun_control11_from_image", "wan22_fun_control_from_image"])
def test_a_killed_run_resumes_to_the_same_bits(case, data, tmp_path):
    more = "--save_every_n_steps 1 --save_state --auto_resume --ema_decay 0.9 --cache_latents".split()
    run_on_ranks(1, train, *build_flags(case, data, tmp_path / "whole", *more))
    with pytest.raises(AssertionError):
        run_on_ranks(1, train_and_kill, (0,), 3, *build_flags(case, data, tmp_path / "killed", *more))
    assert not load_adapters(tmp_path / "killed")
    run_on_ranks(1, train, *build_flags(case, data, tmp_path / "killed", *more))
    files = [load_adapters(tmp_path / name) for name in ("whole", "killed")]
    assert files[0].keys() == files[1].keys() and all(torch.equal(files[0][key], files[1][key]) for key in files[0])


@pytest.mark.parametrize("case", ["wan_fun_control11_from_image", "wan22_fun_control_from_image"])
def test_the_picture_of_a_sample_and_of_a_preview_count(case, data, tmp_path):
    """A run with other pictures trains another adapter, and a preview with another picture is another clip."""
    prompt = data / "prompt.txt"
    other = tmp_path / "other.txt"
    other.write_text(prompt.read_text().replace("1_1", "3_1"), encoding="utf-8")
    clips = []
    for path in (prompt, other):
        folder = tmp_path / path.stem
        previews = ("--sample_prompts", str(path), "--sample_at_first", "--max_train_steps", "1")
        run_on_ranks(1, train, *build_flags(case, data, folder, *previews))
        clips.append(sorted(path for path in (folder / "sample").iterdir() if path.suffix == ".mp4")[0].read_bytes())
    assert clips[0] != clips[1]
    run_on_ranks(1, train, *build_flags(case, data, tmp_path / "without", "--dataset_config", str(data / "1.toml")))
    run_on_ranks(1, train, *build_flags(case, data, tmp_path / "with"))
    files = [load_adapters(tmp_path / name) for name in ("without", "with")]
    assert max_relative_difference(*files) > 1e-3
