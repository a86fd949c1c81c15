"""A run that measures its own pictures trains the same weights, measures the same on any ranks, and after a resume."""

import json
from pathlib import Path

import pytest
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import max_relative_difference, train, write_images

from library.cli import run_tool
from library.evaluation.recorded_steps import read_recorded_steps
from library.evaluation.seed_bootstrap import Resampler

EVALUATED = "--evaluate_every_n_steps 2 --evaluation_captions 2 --evaluation_pictures 2 --evaluation_sampling_steps 2"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data"), {(96, 64): 6, (64, 64): 2})


def build_flags(data: Path, folder: Path, more: str = "") -> list[str]:
    flags = "--max_train_steps 4 --train_batch_size 2 --learning_rate 0.02 --network_dim 4 --save_every_n_steps 2"
    places = ["--dataset_config", str(data), "--output_dir", str(folder)]
    return [*places, *f"{flags} --save_state --ema_decay 0.9 --mixed_precision no {more}".split()]


@pytest.fixture(scope="module")
def evaluated(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    run_on_ranks(1, train, *build_flags(data, folder, EVALUATED))
    return folder


def read_estimates(folder: Path) -> dict[int, dict[str, float]]:
    """Read the values of all metrics by step."""
    steps, resampler = read_recorded_steps(folder / "lora.evaluation.jsonl"), Resampler()
    return {
        each.step: {name: found.value for name, found in each.to_metrics("", "", None).estimate_all(resampler).items()}
        for each in steps
    }


@pytest.mark.slow
def test_an_evaluated_run_trains_the_same_weights_and_resumes_to_the_same_numbers(data, evaluated, tmp_path):
    run_on_ranks(1, train, *build_flags(data, tmp_path / "plain"))
    state = evaluated / "lora-step00000002-state"
    run_on_ranks(1, train, *build_flags(data, tmp_path / "resumed", f"{EVALUATED} --resume {state}"))

    plain, measured, resumed = (
        load_file(folder / "lora.safetensors") for folder in (tmp_path / "plain", evaluated, tmp_path / "resumed")
    )
    assert max_relative_difference(plain, measured) == max_relative_difference(plain, resumed) == 0.0
    whole, rest = (read_recorded_steps(each / "lora.evaluation.jsonl") for each in (evaluated, tmp_path / "resumed"))
    assert [each.step for each in whole] == [2, 4]
    assert [each.export_line() for each in rest] == [whole[1].export_line()]
    assert not (tmp_path / "plain" / "lora.evaluation.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["", "--fsdp"])
def test_two_ranks_measure_what_one_measures(engine, data, evaluated, tmp_path):
    run_on_ranks(2, train, *build_flags(data, tmp_path, f"{EVALUATED} {engine} --train_batch_size 1"))

    alone, together = read_estimates(evaluated), read_estimates(tmp_path)
    assert alone.keys() == together.keys() == {2, 4}
    for step in alone:
        assert together[step] == pytest.approx(alone[step], abs=2e-3)


@pytest.mark.slow
def test_the_files_have_the_numbers_that_the_run_measured_and_both_are_judged_alike(evaluated, capsys):
    flags = "--num_captions 2 --num_seeds 2 --inference_steps 2 --json".split()
    assert run_tool(["evaluate", str(evaluated / "lora"), *flags]) == 0
    files = json.loads(capsys.readouterr().out)
    assert run_tool(["evaluate", str(evaluated / "lora"), "--recorded", "--json"]) == 0
    recorded = json.loads(capsys.readouterr().out)

    assert [each["file"] for each in recorded["steps"]] == ["lora-step00000002.safetensors", "lora.safetensors"]
    for found, own in zip(files["steps"], recorded["steps"], strict=True):
        assert found["metrics"].keys() == own["metrics"].keys() >= {"likeness", "copying", "drift"}
        for name, estimate in found["metrics"].items():
            assert own["metrics"][name] == pytest.approx(estimate, abs=2e-3), name
    assert recorded["verdict"] == files["verdict"]
    assert run_tool(["evaluate", str(evaluated / "lora"), "--recorded", "--num_seeds", "3"]) == 2
    assert "num_seeds: has no effect with --recorded" in capsys.readouterr().err
