"""``python -m library evaluate``: problems before a model is loaded, and an evaluation of the demo model."""

import json
import shutil

import pytest
import torch
from data_paths import ROOT
from PIL import Image
from safetensors.torch import load_file, save_file

from library.cli import run_tool
from library.config import parse_config
from library.demo import BUILT_IN_MODEL_DIR
from library.report.page import RunSummary
from library.tools.evaluate import _Arguments
from library.tools.evaluated_runs import find_runs, label_runs, read_run_settings
from library.tools.evaluation_plan import plan_evaluation
from library.tools.evaluation_run import _load_pipeline
from library.training.preflight import load_settings

DATASET = str(ROOT / "dataset_configs" / "demo_evaluate.toml")
LAYER = "lora_unet_down_blocks_1_attentions_0_transformer_blocks_0_attn1_to_q"


def write_lora(path, scale: float, step: int = 0, **metadata: str) -> None:
    """Write a LoRA file of one layer of the demo model."""
    weights = load_file(BUILT_IN_MODEL_DIR / "unet" / "diffusion_pytorch_model.safetensors")
    shape = weights["down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q.weight"].shape
    generator = torch.Generator().manual_seed(1)
    tensors = {
        f"{LAYER}.lora_down.weight": torch.randn(4, shape[1], generator=generator),
        f"{LAYER}.lora_up.weight": scale * torch.randn(shape[0], 4, generator=generator),
        f"{LAYER}.alpha": torch.tensor(4.0),
    }
    save_file(tensors, path, {"ss_steps": str(step), **metadata})


def write_summary(folder, name: str, **settings) -> None:
    values = {"dataset_config": DATASET, **settings}
    RunSummary(name, 20, "", {}, 0.0, 1, "no", all_settings=values).write(folder / f"{name}.run.json")


def evaluate(capsys, *words: object) -> tuple[int, str, str]:
    code = run_tool(["evaluate", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_documented_command_for_recorded_runs_names_runs(capsys, tmp_path, monkeypatch):
    text = (ROOT / "docs" / "evaluate.md").read_text("utf-8")
    (command,) = (line for line in text.splitlines() if line.startswith("    ") and "--recorded" in line)
    monkeypatch.chdir(tmp_path)

    code, _, error = evaluate(capsys, *command.partition(" evaluate ")[2].split())

    assert code == 2
    assert all(f"  output/{name}: " in error for name in ("rank8", "rank16"))
    assert len(error.splitlines()) == 3  # and no other problem


def test_all_problems_are_reported_at_once_before_a_model_is_loaded(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("library.models.base.Family.load", lambda *_, **__: pytest.fail("a model was loaded"))
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    write_lora(tmp_path / "good.safetensors", 1.0)
    (tmp_path / "prompts.txt").write_text("a cat --d 3\na dog --x 1\n")
    (tmp_path / "one.txt").write_text("a cat\n")

    code, _, error = evaluate(
        capsys,
        *(tmp_path / "broken.safetensors", tmp_path / "good.safetensors", tmp_path / "godo", "--num_seeds", 0),
        *("--composing_prompts", tmp_path / "prompts.txt", "--unrelated_prompts", tmp_path / "one.txt"),
        *("--text_model", tmp_path / "no_model", "--network_dimm", 3),
    )

    lines = error.splitlines()
    assert code == 2
    for text in (
        "num_seeds: must be at least 1, got 0",
        "--network_dimm: unknown option",
        f"{tmp_path / 'godo'}: no such run or LoRA file; did you mean good?",
        "dataset_config: missing; the files belong to no run",
        "prompts.txt:2: --x: unknown option",
        "unrelated_prompts: one caption",
        f"text_model {tmp_path / 'no_model'}: no such folder",
        "broken.safetensors: ",
    ):
        assert sum(text in line for line in lines) == 1, text
    assert "Traceback" not in error


def evaluate_unrelated(capsys, folder, prompts: str) -> tuple[int, str]:
    """Evaluate a file with unrelated prompts of the user's own; return the exit code and the errors."""
    write_lora(folder / "good.safetensors", 1.0)
    (folder / "prompts.txt").write_text(prompts)
    file, own = folder / "good.safetensors", folder / "prompts.txt"
    code, _, error = evaluate(capsys, file, "--dataset_config", DATASET, "--unrelated_prompts", own)
    return code, error


def test_seeds_and_strengths_of_prompts_are_refused_since_an_evaluation_has_its_own(tmp_path, capsys):
    code, error = evaluate_unrelated(capsys, tmp_path, "a cat --d 3\na lorikeet --am 0.5\n")

    assert code == 2
    assert "prompts.txt:1: --d: the pictures of a caption have several seeds" in error
    assert (
        "prompts.txt:2: --am: all pictures have the same strength of the LoRA; remove it, and set --lora_strength"
    ) in error


def test_a_caption_with_the_subject_is_no_unrelated_one(tmp_path, capsys):
    code, error = evaluate_unrelated(capsys, tmp_path, "a cat\na blue lorikeet\n")

    assert code == 2
    assert "--unrelated_prompts: 'a blue lorikeet' names the subject 'lorikeet'" in error


def test_runs_that_differ_in_model_or_pictures_are_not_compared(tmp_path, capsys):
    for name, settings in (("one", {}), ("two", {"dataset_config": str(ROOT / "dataset_configs" / "demo.toml")})):
        write_summary(tmp_path, name, **settings)
        write_lora(tmp_path / f"{name}.safetensors", 1.0)

    code, _, error = evaluate(capsys, tmp_path)

    assert code == 2
    assert "dataset_config: differs between the runs (one: " in error


def test_a_slider_has_no_pictures_to_compare_with(tmp_path, capsys):
    settings = {"slider_prompts": str(ROOT / "dataset_configs" / "demo_slider.toml")}
    RunSummary("one", 20, "", {}, 0.0, 1, "no", all_settings=settings).write(tmp_path / "one.run.json")
    write_lora(tmp_path / "one.safetensors", 1.0)

    code, _, error = evaluate(capsys, tmp_path)

    assert code == 2
    assert [line for line in error.splitlines() if line.startswith("  ")] == [
        "  --dataset_config: one was trained from texts alone (slider_prompts), without pictures to compare with; give a"
        " dataset file of pictures"
    ]


def test_the_files_of_a_run_are_those_of_its_steps_in_order(tmp_path):
    write_summary(tmp_path, "bird")
    for name, step in (
        ("bird", 300),
        ("bird-step00000100", 100),
        ("bird-000007", 200),
        ("bird-ema", 300),
        ("birds", 1),
    ):
        write_lora(tmp_path / f"{name}.safetensors", 1.0, step)
    problems = []

    (run,) = find_runs([str(tmp_path / "bird")], problems)

    assert problems == []
    assert [(file.path.stem, file.step) for file in run.files] == [
        ("bird-step00000100", 100),
        ("bird-000007", 200),
        ("bird", 300),
    ]
    assert read_run_settings(run)[0] == {"dataset_config": DATASET}


def test_a_file_belongs_to_the_run_beside_it_and_runs_of_one_name_have_their_folders(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_summary(tmp_path / folder, "bird")
        write_lora(tmp_path / folder / "bird-step00000100.safetensors", 1.0)

    runs = find_runs([str(tmp_path / f"{folder}/bird-step00000100.safetensors") for folder in "ab"], [])

    assert [run.summary.name for run in runs] == ["bird", "bird"]
    assert list(label_runs(runs).values()) == ["a/bird", "b/bird"]
    assert [file.step for run in runs for file in run.files] == [100, 100]


def test_labels_of_runs_have_as_many_folders_as_tell_them_apart(tmp_path):
    folders = ["exp1/output", "exp2/output", "other", "exp1"]
    names = ["mine", "mine", "Mine", "output_mine"]
    for folder, name in zip(folders, names, strict=True):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        write_summary(tmp_path / folder, name)
        write_lora(tmp_path / folder / f"{name}.safetensors", 1.0)
    words = [str(tmp_path / folder / name) for folder, name in zip(folders, names, strict=True)]
    again = str(tmp_path / "exp2" / ".." / "exp1" / "output" / "mine")

    labels = list(label_runs(find_runs([*words, again], [])).values())

    assert labels == ["exp1/output/mine", "exp2/output/mine", "other/Mine", "output_mine"]


def test_files_of_the_ema_have_the_summary_of_their_run_and_are_a_run_of_their_own(tmp_path):
    write_summary(tmp_path, "bird", ema_decay=0.9)
    for name, step in (("bird-ema", 300), ("bird-step00000100-ema", 100), ("bird", 300)):
        write_lora(tmp_path / f"{name}.safetensors", 1.0, step)
    losses = {"step": 10, "validation/loss": 0.5, "validation/without_ema/loss": 0.7}
    (tmp_path / "bird.metrics.jsonl").write_text(json.dumps(losses))
    problems = []

    words = [str(tmp_path / f"{name}.safetensors") for name in ("bird-ema", "bird", "bird-step00000100-ema")]
    averaged, trained = find_runs(words, problems)

    assert problems == []
    assert [file.path.stem for file in averaged.files] == ["bird-step00000100-ema", "bird-ema"]
    assert (averaged.name, trained.name) == ("bird-ema", "bird")
    assert read_run_settings(averaged) == read_run_settings(trained)
    assert read_run_settings(trained) == ({"dataset_config": DATASET, "ema_decay": 0.9}, [])
    assert (averaged.find_validation_loss(300), trained.find_validation_loss(300)) == (0.5, 0.7)


def test_files_without_steps_are_in_the_order_of_their_epochs(tmp_path):
    stems = ["bird", "bird-000010", "bird-000002"]
    for stem in stems:
        write_lora(tmp_path / f"{stem}.safetensors", 1.0)
        save_file(load_file(tmp_path / f"{stem}.safetensors"), tmp_path / f"{stem}.safetensors")

    (run,) = find_runs([str(tmp_path / f"{stem}.safetensors") for stem in stems], [])

    assert [file.path.stem for file in run.files] == ["bird-000002", "bird-000010", "bird"]


def plan_runs(folder, *flags: str):
    """Plan an evaluation of a run of the demo model, as the tool does."""
    own, training = parse_config([], _Arguments), load_settings(list(flags))
    return plan_evaluation([str(folder)], own.config.evaluate, own, training)


def test_pictures_are_made_with_the_scheduler_that_the_run_trained(tmp_path):
    write_summary(tmp_path, "one", v_parameterization=False)  # the demo model predicts v
    write_lora(tmp_path / "one.safetensors", 1.0)

    config = _load_pipeline(plan_runs(tmp_path)).scheduler.config
    given = _load_pipeline(plan_runs(tmp_path, "--v_parameterization", "--zero_terminal_snr")).scheduler.config

    assert (config.prediction_type, config.rescale_betas_zero_snr) == ("epsilon", False)
    assert (given.prediction_type, given.rescale_betas_zero_snr) == ("v_prediction", True)


def test_scheduler_options_that_differ_or_do_not_fit_are_problems(tmp_path, capsys):
    for name, value in (("one", True), ("two", False)):
        write_summary(tmp_path, name, v_parameterization=value)
        write_lora(tmp_path / f"{name}.safetensors", 1.0)

    code, _, error = evaluate(capsys, tmp_path)
    other, _, unfit = evaluate(capsys, tmp_path, "--no-v_parameterization", "--zero_terminal_snr")

    assert (code, other) == (2, 2)
    assert "v_parameterization: differs between the runs (one: True, two: False)" in error
    assert "zero_terminal_snr: needs a model that predicts v" in unfit


def test_the_loss_beside_a_step_is_the_last_one_that_was_recorded(tmp_path):
    write_summary(tmp_path, "bird")
    write_lora(tmp_path / "bird.safetensors", 1.0, 30)
    lines = [
        {"step": 10, "validation/loss": 0.5},
        {"step": 20, "validation/loss": 0.4},
        {"step": 40, "validation/loss": 9},
    ]
    (tmp_path / "bird.metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))

    (run,) = find_runs([str(tmp_path / "bird")], [])

    assert (run.find_validation_loss(30), run.find_validation_loss(5)) == (0.4, None)


@pytest.mark.slow
def test_an_evaluation_of_the_demo_model(tmp_path, capsys):
    write_summary(tmp_path, "weak")
    write_lora(tmp_path / "weak-step00000010.safetensors", 0.0, 10)
    write_lora(tmp_path / "weak.safetensors", 0.05, 20)
    flags = "--num_captions 2 --num_seeds 2 --inference_steps 2".split()

    code, out, error = evaluate(capsys, tmp_path / "weak", *flags)

    folder = tmp_path / "weak.evaluation"
    found = json.loads((folder / "evaluation.json").read_text())
    none, some = (step["metrics"] for step in found["steps"])
    assert code == 0, error
    assert none["drift"] == {"value": 0, "low": 0, "high": 0}  # a LoRA without effect changes no picture
    assert none["likeness"]["value"] == 0
    assert some["drift"]["low"] > 0
    assert found["verdict"] in out
    assert "prompt following" in out  # is not measured
    assert Image.open(folder / "evaluation.png").width == 1240
    pictures = folder / "pictures"
    names = sorted(path.name for path in (pictures / "base").iterdir())
    assert len(names) == 4 * 2 * 2
    for name in names:
        same = (pictures / "base" / name).read_bytes()
        assert (pictures / "weak weak-step00000010" / name).read_bytes() == same
        assert (pictures / "weak weak" / name).read_bytes() != same

    shutil.rmtree(pictures)
    code, out, _ = evaluate(capsys, tmp_path / "weak", *flags, "--json")
    repeated = json.loads(out)
    assert code == 0
    assert repeated["steps"] == found["steps"]  # also after other weights were merged and taken out again
