"""Training on sd-scripts' folders: the run of a dataset file with the same values, also in copies of the folders."""

import json
import shutil
from pathlib import Path

import pytest
from kohya_cases import CASES, write_kohya_folders
from rank_processes import run_on_ranks
from safetensors import safe_open
from safetensors.torch import load_file
from training_runs import train

from library.config import parse_config

CASE = CASES[0]
SETTINGS = ("--max_train_steps", "4", "--network_dim", "2", "--learning_rate", "0.1", "--bucket_reso_steps", "16")
CAPTIONS = ("--caption_extension", ".caption", ".txt")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(write_kohya_folders(tmp_path, CASE["folder"]))
    return tmp_path


def write_dataset_file(folder: Path) -> str:
    """Write the dataset file that says what the names of the folders say."""
    text = "[[datasets]]\n"
    used = {subset["image_dir"] for subset in CASE["subsets"]}
    for subset in CASE["resolved"][0]["subsets"]:
        if subset["image_dir"] in used:
            keys = ("image_dir", "num_repeats", "class_tokens", "is_reg")
            text += "[[datasets.subsets]]\n" + "".join(f"{key} = {json.dumps(subset[key])}\n" for key in keys)
    (folder / "set.toml").write_text(text, encoding="utf-8")
    return "set.toml"


def strip_data_options(words: list[str]) -> list[str]:
    """Leave out the options that say where the images are."""
    start = words.index("--train_batch_size")
    return words[start:]


def test_a_run_on_folders_is_that_of_a_dataset_file_with_the_same_values(folder):
    options = [*strip_data_options(CASE["cli"]), *CAPTIONS, *SETTINGS]
    data = CASE["cli"][: CASE["cli"].index("--train_batch_size")]
    (file,) = run_on_ranks(1, train, *data, *options, "--output_dir", "folders")
    (reference,) = run_on_ranks(
        1, train, "--dataset_config", write_dataset_file(folder), *options, "--output_dir", "file"
    )
    found, expected = load_file(file), load_file(reference)
    assert found.keys() == expected.keys() and all(bool((found[key] == expected[key]).all()) for key in found)
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    train_dirs = {"10_mika dog": 4, "1_two_words_": 1, "2_cat": 2, "3": 1}
    assert json.loads(metadata["ss_dataset_dirs"]) == {
        name: {"n_repeats": int(name.partition("_")[0]), "img_count": count} for name, count in train_dirs.items()
    }
    assert json.loads(metadata["ss_reg_dataset_dirs"]).keys() == {"1_dog", "2_animal"}
    assert metadata["ss_num_train_images"] == metadata["ss_num_reg_images"] == str(CASE["num_train_images"])
    assert not any(str(folder) in value for value in metadata.values())


def train_on_copies(*words: str) -> str:
    """Train with each rank on its own copy of the folders."""
    import os

    rank = os.environ["RANK"]
    return train("--train_data_dir", f"copy{rank}", *words)


def test_ranks_and_resumed_runs_may_have_copies_under_other_names(folder, capfd):
    for name in ("copy0", "copy1", "moved"):
        shutil.copytree("train", name)
    options = [*strip_data_options(CASE["cli"]), *SETTINGS, "--save_state", "--output_dir", "out"]
    run_on_ranks(2, train_on_copies, *options)
    (state,) = Path("out").glob("*-state")
    more = [*options, "--max_train_steps", "6", "--resume", str(state)]
    run_on_ranks(2, train, "--train_data_dir", "moved", *more)
    Path("moved/10_mika dog/1.png").write_bytes(Path("moved/2_cat/1.png").read_bytes())
    with pytest.raises(AssertionError, match="the images, captions or their settings changed"):
        run_on_ranks(2, train, "--train_data_dir", "moved", *more, "--output_name", "other")


def test_a_checkpoint_of_the_last_release_is_resumed(folder):
    """Its fingerprint depends on the names of folders."""
    from library.dataloader.prepare import prepare_data

    words = [*CASE["cli"], *SETTINGS, "--save_state", "--output_dir", "out"]
    run_on_ranks(1, train, *words)
    (path,) = Path("out").glob("*-state/state.json")
    (path.parent / "files.json").write_text("{}")  # the hashes of both files
    state = json.loads(path.read_text())
    manifest = prepare_data(parse_config(words).config.data, 8).manifest
    assert state["data"] == manifest.compute_fingerprint() != manifest.compute_former_fingerprint()
    resume = [*words, "--max_train_steps", "5", "--resume", str(path.parent)]
    path.write_text(json.dumps({**state, "data": "another"}))
    with pytest.raises(AssertionError, match="the images, captions or their settings changed"):
        run_on_ranks(1, train, *resume)
    digests = state["sample_digests"][:8] + "0" * 8 + state["sample_digests"][16:]
    path.write_text(json.dumps({**state, "data": "another", "sample_digests": digests}))
    with pytest.raises(AssertionError, match=f"the first that differs is {manifest.samples[1].image}, image 2;"):
        run_on_ranks(1, train, *resume)
    path.write_text(json.dumps({**state, "data": manifest.compute_former_fingerprint()}))
    run_on_ranks(1, train, *resume)
