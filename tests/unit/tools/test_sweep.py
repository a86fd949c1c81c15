"""``python -m library sweep``: problems at once, what is hopeless, and a sweep that is stopped and goes on."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from data_paths import ROOT

from library.cli import run_tool
from library.evaluation.file_metrics import COPYING, DRIFT, LIKENESS, MetricStatistic
from library.evaluation.recorded_steps import RecordedStep
from library.evaluation.seed_bootstrap import MeanStatistic, Resampler
from library.tools.sweeps.check_runs import check_sweep
from library.tools.sweeps.early_stopping import Measurements, ValidatedStep, find_hopeless_reason
from library.tools.sweeps.run_queue import FINISHED, RunState, SweepState, hold_sweep_lock, read_cause
from library.tools.sweeps.sweep_file import read_sweep

DATASET = str(ROOT / "dataset_configs" / "demo_evaluate.toml")


def sweep(capsys, *words: object) -> tuple[int, str, str]:
    code = run_tool(["sweep", *map(str, words)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_all_problems_of_the_form_of_a_file_are_reported_at_once(tmp_path, capsys):
    path = tmp_path / "bad.toml"
    path.write_text(
        'config_file = "no.toml"\noutput_dirr = "x"\nnum_processes = "2"\n[settings]\noutput_name = "x"\n'
        '[axes]\nlearning_rate = 6e-3\nnetwork_dim = [4, 4]\n[[runs]]\nname = "a b"\n'
    )

    code, _, error = sweep(capsys, path)

    assert code == 2
    assert [line.strip().removeprefix(f"{path}:") for line in error.splitlines()[1:]] == [
        "2: output_dirr: unknown key; did you mean output_dir?",
        "3: num_processes: expected a whole number, got '2'",
        "1: config_file: no.toml: no such file",
        "5: settings.output_name: is set by the sweep for every run; remove it",
        "7: axes.learning_rate: expected a list of values, got 0.006; learning_rate = [1, 2]",
        "8: axes.network_dim: has a value twice; remove one",
        "10: runs.name: expected a text of letters, digits, points, - and _, got 'a b'",
    ]


def test_problems_of_options_name_key_and_line_and_the_run_that_has_them(tmp_path, capsys):
    path = tmp_path / "bad.toml"
    path.write_text(
        f"[settings]\ndataset_config = '{DATASET}'\nnetwork_train_unet_only = true\nnetwork_dimm = 3\n"
        f"output_dir = 'x'\n"
    )
    path.write_text(path.read_text().replace("output_dir = 'x'\n", "") + "[axes]\nlearning_rate = [1e-3, 'x']\n")
    path.write_text(path.read_text() + "text_encoder_lr = [1e-4, 2e-4]\n")

    code, _, error = sweep(capsys, path)

    assert code == 2
    lines = [line.strip() for line in error.splitlines()[1:]]
    assert f"{path}:4: settings.network_dimm: unknown option; did you mean --network_dim?" in lines
    assert any(line.startswith(f"{path}:7: axes.text_encoder_lr: has no effect: text enc") for line in lines)
    assert any(line.endswith(f"{path}:6: axes.learning_rate: expected a number, got 'x'") for line in lines)
    assert len(lines) == 3


def test_runs_have_names_of_their_own(tmp_path):
    path = tmp_path / "names.toml"
    path.write_text("[axes]\ndataset_config = ['cats/x.toml', 'dogs/x.toml']\nnoise_offset = [-0.1, 0.1, 1e30]\n")

    assert [run.name for run in read_sweep(path).runs] == [
        f"dataset_config-{data}-x.toml_noise_offset-{offset}"
        for data in ("cats", "dogs")
        for offset in ("-0.1", "0.1", "1e30")
    ]


def test_what_would_be_ignored_or_replaced_in_a_file_is_reported(tmp_path, capsys):
    path = tmp_path / "bad.toml"
    path.write_text("[settings]\ndry_run = true\nnetwork_dim = 2\n[axes]\nnetwork_dim = [4, 8]\n")
    assert [line.strip().removeprefix(f"{path}:") for line in sweep(capsys, path)[2].splitlines()[1:]] == [
        "2: settings.dry_run: is set by the sweep for every run; remove it",
        "3: settings.network_dim: has no effect: it is an axis, too; remove it",
    ]
    path.write_text("[[runs]]\nname = 'sweep.json'\n[[runs]]\nname = 'A'\n[[runs]]\nname = 'a'\n")
    assert [line.strip().removeprefix(f"{path}:") for line in sweep(capsys, path)[2].splitlines()[1:]] == [
        "2: runs.name: sweep.json is a file of the sweep; take another name",
        " several runs are named A; give them names",
        " several runs are named a; give them names",
    ]


def test_runs_with_the_same_settings_and_unknown_switches_are_reported(tmp_path, capsys):
    path = tmp_path / "bad.toml"
    text = f"[settings]\ndataset_config = '{DATASET}'\n[axes]\nnetwork_dim = [4, 8]\n"
    path.write_text(f"{text}[[runs]]\nname = 'again'\nnetwork_dim = 4\n")
    assert f"{path}: runs network_dim-4 and again have the same settings; remove one" in sweep(capsys, path)[2]
    path.write_text(f"{text}flip_augg = [true, false]\n")
    lines = [line.strip() for line in sweep(capsys, path)[2].splitlines()[1:]]
    assert len(lines) == 2 and all(f"{path}:5: axes.flip_augg: unknown option" in line for line in lines)


def measure(*balances: float, basis: str = "same") -> Measurements:
    """Plant measurements of steps 100, 200, ... with these balances."""
    pictures = {}
    for number, balance in enumerate(balances, 1):
        generator = np.random.default_rng(number)
        values = {LIKENESS: balance, COPYING: 0.0, DRIFT: 0.0}
        statistics = {
            name: MetricStatistic(MeanStatistic(value + 0.02 * generator.normal(size=(3, 4))), name)
            for name, value in values.items()
        }
        pictures[100 * number] = RecordedStep(100 * number, 0.0, {"pictures": basis}, statistics)
    return Measurements(pictures)


def is_stopped(own: Measurements, other: Measurements, total: int = 600) -> bool:
    return bool(find_hopeless_reason(own, {"other": other}, total, Resampler(num_resamples=300)))


def test_a_run_is_hopeless_only_late_and_where_another_is_clearly_ahead_twice():
    good = measure(0.5, 0.6, 0.7, 0.8, 0.9)

    reason = find_hopeless_reason(measure(0, 0, 0, 0.1), {"other": good}, 600, Resampler(num_resamples=300))
    assert reason.startswith("at step 300 other was ahead in balance by 0.7")
    assert "; at step 400 other was ahead in balance by 0.7" in reason
    assert not is_stopped(measure(0, 0), good)  # before the half
    assert not is_stopped(measure(0, 0, 0), good)  # once
    assert not is_stopped(measure(0, 0, 0, 0.7), good)  # it catches up
    assert not is_stopped(measure(0, 0.5, 0.5, 0.6), good)  # more than chance, but not by much
    assert not is_stopped(measure(0, 0, 0, 0, basis="other"), good)
    assert not is_stopped(good, measure(0, 0, 0, 0.1))
    assert not is_stopped(measure(0, 0, 0, 0.1), good, total=1000)


def test_validation_losses_are_compared_where_runs_measure_no_pictures():
    def validate(gain: float, base: float = 1.0) -> Measurements:
        return Measurements(validation={step: ValidatedStep(gain, 0.1, base) for step in (300, 400)})

    assert is_stopped(validate(0.1), validate(0.5))
    assert not is_stopped(validate(0.35), validate(0.5))
    assert not is_stopped(validate(0.1), validate(0.5, base=2.0))


def write_sweep(folder: Path) -> Path:
    path = folder / "sweep.toml"
    path.write_text(
        f"output_dir = '{folder / 'out'}'\n[settings]\ndataset_config = '{DATASET}'\nmax_train_steps = 4\n"
        "network_train_unet_only = true\nmixed_precision = 'no'\nevaluate_every_n_steps = 2\n"
        "evaluation_captions = 2\nevaluation_pictures = 2\nevaluation_sampling_steps = 1\n"
        f"cache_dir = '{folder / 'cache'}'\n[axes]\nlearning_rate = [1e-3, 1e-2]\n"
    )
    return path


def wait_for(condition) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def plant_finished_run(path: Path) -> Path:
    """Record that the first run of a sweep has finished with the settings that its files have now."""
    sweep_file = read_sweep(path)
    checked = check_sweep(sweep_file)[0]
    folder = sweep_file.get_folder(checked.run)
    folder.mkdir(parents=True)
    SweepState(sweep_file.output_dir).set(checked.run.name, RunState(FINISHED, checked.settings))
    return folder


@pytest.mark.slow
def test_a_finished_run_whose_run_file_has_changed_is_refused_until_its_folder_is_removed(tmp_path, capsys):
    base, path = tmp_path / "base.toml", write_sweep(tmp_path)
    base.write_text("network_dim = 4\nlogging_dir = 'a'\n")
    path.write_text(f"config_file = '{base}'\n{path.read_text()}")
    folder = plant_finished_run(path)

    base.write_text("network_dim = 4\nlogging_dir = 'b'\n")  # which changes no weights
    assert sweep(capsys, path, "--compare_only")[0] == 0
    base.write_text("network_dim = 8\nmax_train_epochs = 2\n")
    path.write_text(path.read_text().replace("max_train_steps = 4\n", ""))
    code, _, error = sweep(capsys, path, "--compare_only")
    assert code == 2
    names = "max_train_epochs, max_train_steps, network_dim"
    assert f"run {folder.name} was finished with another {names}; give another output_dir, or remove" in error
    folder.rmdir()
    assert sweep(capsys, path, "--compare_only")[0] == 0


def test_the_cause_of_a_failed_run_is_what_it_said_last(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("training 3/9\rtrain_lora: stopped.\n  --old: a\n")
    begins = "train_lora: stopped. 2 problems:\n  --network_dim: too large\n  --seed: is negative\n"
    log.write_text(f"{log.read_text()}{begins}(accelerate launch reports below)\nTraceback\n  File x\n")

    assert read_cause(log) == "--network_dim: too large --seed: is negative"
    log.write_text("Killed\n")
    assert read_cause(log) == ""


@pytest.mark.slow
def test_two_sweeps_do_not_train_in_one_folder_at_once(tmp_path, capsys):
    path = write_sweep(tmp_path)
    folder = plant_finished_run(path)

    with hold_sweep_lock(tmp_path / "out"):
        code, _, error = sweep(capsys, path, "--continue_run", folder.name)
        assert code == 2
        assert f"another sweep is training the runs in {tmp_path / 'out'}" in error
        assert sweep(capsys, path, "--compare_only")[0] == 0
    assert "no run" in sweep(capsys, path, "--continue_run", folder.name)[2]
    (tmp_path / "file").write_text("")
    path.write_text(path.read_text().replace(f"{tmp_path / 'out'}", f"{tmp_path / 'file' / 'out'}"))
    assert "cannot write to" in sweep(capsys, path)[2]


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="a signal is sent to the sweep")
def test_a_sweep_that_is_stopped_goes_on_and_is_compared(tmp_path, capsys):
    path, out = write_sweep(tmp_path), tmp_path / "out"
    first, second = (out / f"learning_rate-{rate}" for rate in ("0.001", "0.01"))
    process = subprocess.Popen([sys.executable, "-m", "library", "sweep", str(path)], stdout=subprocess.PIPE, text=True)
    wait_for(lambda: (second / f"{second.name}.run.json").exists() or process.poll() is not None)
    process.send_signal(signal.SIGTERM)

    assert "the same command goes on" in process.communicate()[0]
    assert process.returncode == 128 + signal.SIGTERM
    saved = (first / f"{first.name}.safetensors").stat().st_mtime_ns
    state = json.loads((out / "sweep.json").read_text())["runs"]
    assert [state[folder.name]["status"] for folder in (first, second)] == ["finished", "waiting"]

    code, text, error = sweep(capsys, path)

    found = json.loads((out / "evaluation.json").read_text())
    assert code == 0, error
    assert (first / f"{first.name}.safetensors").stat().st_mtime_ns == saved
    assert [(each["run"], each["step"]) for each in found["steps"]] == [
        (folder.name, step) for folder in (first, second) for step in (2, 4)
    ]
    assert found["verdict"] in text and len(found["comparisons"]) == 1
    assert [each["status"] for each in found["settings"]["runs"]] == ["finished", "finished"]
    assert (out / "evaluation.png").is_file() and list((tmp_path / "cache").rglob("*"))

    path.write_text(path.read_text().replace("max_train_steps = 4", "max_train_steps = 5"))
    code, _, error = sweep(capsys, path)
    assert code == 2
    assert f"run {first.name} was finished with another max_train_steps; give another output_dir" in error
