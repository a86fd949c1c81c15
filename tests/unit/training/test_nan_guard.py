"""A step with NaN changes nothing and is reported with its images; the gradient probe finds dead layers."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from nan_runs import train_and_read_log, train_with_nan_loss
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import train, write_images

from library.errors import UserError
from library.report.metric_series import read_metrics
from library.training import nan_and_oom_handling
from library.training.metrics import MetricsFile
from library.training.nan_and_oom_handling import NanGuard
from library.training.trial_steps import _check_gradients

SETTINGS = ("--max_train_steps", "14", "--network_dim", "2", "--learning_rate", "0.5", "--seed", "5")
NAN_STEP = 12  # two steps after the losses were read


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("health"), {(64, 64): 4})


def are_files_equal(one: str, other: str) -> bool:
    first, second = load_file(one), load_file(other)
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "batch"), [(1, "4"), (2, "2")])
def test_a_nan_step_on_one_rank_is_skipped_on_all(dataset, tmp_path, ranks, batch):
    """With plain SGD this is bitwise equal to a learning rate of 0 in that step."""
    flags = (
        "--dataset_config",
        str(dataset),
        *SETTINGS,
        "--optimizer_type",
        "SGD",
        "--train_batch_size",
        batch,
        "--output_dir",
        str(tmp_path),
    )
    nan_run = run_on_ranks(ranks, train_with_nan_loss, ranks - 1, NAN_STEP, False, *flags, "--output_name", "bad")
    expected = run_on_ranks(
        ranks,
        train,
        *flags,
        *"--output_name expected --lr_scheduler piecewise_constant".split(),
        "--lr_scheduler_args",
        f"step_rules=1:{NAN_STEP},0:{NAN_STEP + 1},1",
    )

    assert are_files_equal(nan_run[0], expected[0])
    reports = [tmp_path / f"bad.nan-step{NAN_STEP + 1:08d}-rank{rank}.json" for rank in range(ranks)]
    assert sorted(tmp_path.glob("bad.nan-*")) == reports
    reports_by_rank = [json.loads(path.read_text("utf-8")) for path in reports]
    assert all(
        report["step"] == NAN_STEP + 1 and report["loss"] == "nan" and report["seed"] == 5 for report in reports_by_rank
    )
    images = [image for report in reports_by_rank for image in report["images"]]
    assert [image["position"] for image in images] == [0, 1, 2, 3] and len({image["image"] for image in images}) == 4
    assert all(0 < image["timestep"] < 1 and image["loss"] > 0 for image in images), (
        "the loss is replaced by NaN after the task computed its losses"
    )
    assert all(image["bucket"] == [64, 64] and image["caption"] for image in images)
    lines = [line for line in read_metrics(tmp_path / "bad.metrics.jsonl") if "loss/current" in line]
    assert [line["step"] for line in lines] == list(range(1, 15))
    assert [line["step"] for line in lines if line["loss/current"] is None] == [NAN_STEP + 1]
    assert not [line["step"] for line in lines if line["loss/average"] is None], "the average of the other steps"


@pytest.mark.slow
def test_rolling_back_gives_the_same_result_as_checking_each_step(dataset, tmp_path):
    """With a stateful optimizer and EMA."""
    flags = (
        "--dataset_config",
        str(dataset),
        *SETTINGS,
        *"--learning_rate 0.01 --train_batch_size 4 --ema_decay 0.9".split(),
        "--output_dir",
        str(tmp_path),
    )
    rolled_back = run_on_ranks(1, train_with_nan_loss, 0, NAN_STEP, False, *flags, "--output_name", "back")
    checked_each_step = run_on_ranks(1, train_with_nan_loss, 0, NAN_STEP, True, *flags, "--output_name", "careful")

    assert are_files_equal(rolled_back[0], checked_each_step[0])
    assert are_files_equal(
        rolled_back[0].replace(".safetensors", "-ema.safetensors"), checked_each_step[0].replace(".saf", "-ema.saf")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (),
        tuple(
            "--optimizer_type Adafactor --optimizer_args relative_step=False --mixed_precision bf16 --full_bf16".split()
        ),
    ],
)
def test_steps_are_rolled_back_as_often_as_needed(options, dataset, tmp_path):
    """The restored optimizer state is a copy of the snapshot, and bitwise equal to it."""
    flags = (
        "--dataset_config",
        str(dataset),
        *SETTINGS,
        *"--learning_rate 0.01 --train_batch_size 1 --max_train_steps 20".split(),
        "--output_dir",
        str(tmp_path),
        *options,
    )
    rolled_back = run_on_ranks(1, train_with_nan_loss, 0, (2, 15), False, *flags, "--output_name", "back")
    checked_each_step = run_on_ranks(1, train_with_nan_loss, 0, (2, 15), True, *flags, "--output_name", "careful")

    assert are_files_equal(rolled_back[0], checked_each_step[0])


def train_with_loss_scaling(*arguments) -> tuple[str, float]:
    """As ``train_with_nan_loss``, but losses are scaled as in fp16, which a CPU has no use for; return the scale too."""
    from accelerate import Accelerator

    init, accelerators = Accelerator.__init__, []

    def init_with_scaler(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.scaler = torch.amp.GradScaler("cpu", 1024.0)
        accelerators.append(self)

    def unscale_gradients(self, optimizer=None):
        for prepared in self._optimizers:
            self.scaler.unscale_(prepared.optimizer)

    Accelerator.__init__, Accelerator.unscale_gradients = init_with_scaler, unscale_gradients
    return train_with_nan_loss(*arguments), accelerators[-1].scaler.get_scale()


@pytest.mark.slow
def test_a_skipped_step_with_loss_scaling_does_not_end_the_run(dataset, tmp_path):
    """GradScaler refuses to unscale twice between two updates; a rollback restores its scale."""
    flags = ("--dataset_config", str(dataset), *SETTINGS, "--optimizer_type", "SGD", "--output_dir", str(tmp_path))
    nan_run, scale = run_on_ranks(1, train_with_loss_scaling, 0, 3, False, *flags, "--output_name", "scaled")[0]
    expected = run_on_ranks(1, train_with_nan_loss, 0, 3, False, *flags, "--output_name", "unscaled")[0]

    assert are_files_equal(nan_run, expected), "scales are powers of two"
    assert scale == 1024.0


@pytest.mark.slow
def test_too_many_nan_steps_end_the_run_with_the_last_good_weights(dataset, tmp_path):
    flags = ("--dataset_config", str(dataset), *SETTINGS, "--train_batch_size", "4", "--output_dir", str(tmp_path))

    with pytest.raises(AssertionError, match="3 steps had a NaN or Inf loss or gradient"):
        run_on_ranks(1, train_with_nan_loss, 0, -6, False, *flags, "--output_name", "stopped", "--max_nan_steps", "3")

    run_on_ranks(1, train, *flags, "--output_name", "good", "--save_every_n_steps", "6")
    assert are_files_equal(
        str(tmp_path / "stopped-step00000008.safetensors"), str(tmp_path / "good-step00000006.safetensors")
    )
    assert [path.name for path in sorted(tmp_path.glob("*.nan-*"))] == [
        f"stopped.nan-step{step:08d}-rank0.json" for step in (7, 8, 9)
    ]


@pytest.mark.slow
def test_a_skipped_step_is_logged_with_its_images_and_report_file(dataset, tmp_path):
    flags = ("--dataset_config", str(dataset), *SETTINGS, "--train_batch_size", "2", "--output_dir", str(tmp_path))
    log = run_on_ranks(1, train_with_nan_loss_and_read_log, tmp_path, *flags)[0]

    (line,) = (line for line in log.splitlines() if "step 3 skipped" in line)
    report = tmp_path / "lora.nan-step00000003-rank0.json"
    images = ", ".join(image["image"] for image in json.loads(report.read_text("utf-8"))["images"])
    assert "step 3 skipped: loss nan, gradient norm nan" in line
    assert log.count("NaN or Inf in steps 2 to 11: rolled back to step 1; these steps are trained again") == 1
    assert "loss nan, gradient norm nan. " in line and images.count(", ") == 1
    assert f"Images on this rank: {images}. Details: {report}" in line


def train_with_nan_loss_and_read_log(folder: Path, *flags: str) -> str:
    return train_and_read_log(folder, *flags, work=partial(train_with_nan_loss, 0, 2, False))


@pytest.mark.slow
def test_a_report_that_cannot_be_written_does_not_end_the_run(dataset, tmp_path):
    (tmp_path / "lora.nan-step00000003-rank0.json").mkdir()
    flags = ("--dataset_config", str(dataset), *SETTINGS, "--train_batch_size", "2", "--output_dir", str(tmp_path))
    assert Path(run_on_ranks(1, train_with_nan_loss, 0, 2, False, *flags)[0]).is_file()


def list_snapshot_steps(max_seconds: float, *flags: str) -> list[int]:
    """Train with at most so many seconds between snapshots; return the steps after which there is one."""
    steps, take_snapshot = [], nan_and_oom_handling.NanGuard.take_snapshot
    nan_and_oom_handling.NanGuard.take_snapshot = lambda guard, run: (
        steps.append(run.state.step),
        take_snapshot(guard, run),
    )[1]
    nan_and_oom_handling.CHECK_INTERVAL_SECONDS = max_seconds
    train(*flags)
    return steps


@pytest.mark.slow
def test_slow_steps_are_each_followed_by_a_snapshot_on_all_ranks(dataset, tmp_path):
    flags = ("--dataset_config", str(dataset), *SETTINGS, "--train_batch_size", "2", "--output_dir", str(tmp_path))
    assert run_on_ranks(2, list_snapshot_steps, 0.0, *flags) == [list(range(14))] * 2
    assert run_on_ranks(2, list_snapshot_steps, 1e9, *flags, "--overwrite") == [[0, 1, 11]] * 2


@pytest.mark.parametrize(("seconds", "interval"), [(0.1, 10), (2.9, 10), (4.0, 7), (29.0, 1), (100.0, 1)])
def test_at_most_half_a_minute_or_one_step_is_between_two_checks(seconds, interval, monkeypatch):
    guard, now = NanGuard(3), iter([0.0, 10 * seconds, 0.0])
    monkeypatch.setattr(nan_and_oom_handling.time, "perf_counter", lambda: next(now))
    guard.restart_timer()
    comm = SimpleNamespace(is_main=True, all_reduce_sum=lambda count: count)
    guard.choose_check_interval(SimpleNamespace(strategy=SimpleNamespace(comm=comm)), 10)
    assert guard.check_interval == interval


@pytest.mark.slow
def test_the_gradient_probe_is_without_dropout(dataset, tmp_path):
    flags = ("--dataset_config", str(dataset), "--max_train_steps", "1", "--output_dir", str(tmp_path), "--quiet")
    dropout = ("--network_args", "module_dropout=0.8", "rank_dropout=0.5")
    (log,) = run_on_ranks(1, train_and_read_log, tmp_path, *flags, *dropout)
    assert "get no gradient" not in log


def test_the_gradient_probe_lists_layers_without_or_with_nan_gradients(caplog):
    finite, zero, infinite = torch.ones(2), torch.zeros(2), torch.tensor([1.0, float("inf")])

    _check_gradients(0.5, {"a": finite, "b": zero, "c": None})
    assert "2 of 3 trainable parameters get no gradient and will not be trained: b, c" in caplog.text
    with pytest.raises(UserError, match=r"1 of 2 gradients hold .*: ?b|b$"):
        _check_gradients(0.5, {"a": finite, "b": infinite})
    with pytest.raises(UserError, match="the loss is nan"):
        _check_gradients(float("nan"), {"a": finite})
    with pytest.raises(UserError, match="no trainable parameter gets a gradient"):
        _check_gradients(0.5, {"a": zero})


def test_the_gradient_probe_says_nothing_of_modules_that_clips_train(caplog):
    """An image gives them no gradient, so that they may also be all that is trained."""
    finite, zero = torch.ones(2), torch.zeros(2)
    _check_gradients(0.5, {"a.add_k_proj.b": zero, "a.to_k.b": finite}, modules_of_clips=("add_k_proj",))
    _check_gradients(0.5, {"a.add_k_proj.b": zero}, modules_of_clips=("add_k_proj",))
    assert not caplog.text
    _check_gradients(0.5, {"a.add_k_proj.b": zero, "a.to_k.b": zero, "c": finite}, modules_of_clips=("add_k_proj",))
    assert "1 of 3 trainable parameters get no gradient and will not be trained: a.to_k.b" in caplog.text


def test_metrics_of_a_resumed_run_are_appended(tmp_path):
    path = tmp_path / "a.metrics.jsonl"
    first = MetricsFile(path, 0)
    for step in (1, 2, 3):
        first.write_step(step, {"loss": float(step), "text": "ü"})
        with path.open("ab") as file:  # lines damaged by a disk error or written by another program
            file.write(b'12\n{"loss": 3}\n\xff\xfe\n')
    with path.open("a") as file:
        file.write('{"step": 4, "lo')  # the run was killed during a write

    resumed = MetricsFile(path, 2)
    resumed.write_step(3, {"loss": float("nan")})

    assert read_metrics(path) == [
        {"step": 1, "loss": 1.0, "text": "ü"},
        {"step": 2, "loss": 2.0, "text": "ü"},
        {"step": 3, "loss": None},
    ]
    assert Path(path).read_text("utf-8").endswith("\n")
