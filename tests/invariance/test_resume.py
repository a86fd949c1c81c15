"""A resumed run equals the uninterrupted one: bitwise equal weights, equal metrics, the same files."""

import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rank_processes import run_on_ranks
from resumed_runs import STEPS, build_flags, copy_as_killed, dataset, read_metrics, uninterrupted_run
from safetensors.torch import load
from training_runs import train

from library.config import parse_config
from library.config.schema_output import StateConfig
from library.errors import ConfigError, UserError
from library.training import checkpoint_dir, save_weights
from library.training.resume import find_changes, select_checkpoint, serialize_settings

__all__ = ["dataset", "uninterrupted_run"]  # fixtures


def assert_equal_files(one: Path, other: Path, count: int = 8) -> None:
    names = sorted(path.name for path in one.glob("*.safetensors"))
    assert names == sorted(path.name for path in other.glob("*.safetensors")) and len(names) == count
    for name in names:
        first, second = read_tensors(one / name), read_tensors(other / name)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first), name


def count_logged_steps(folder: Path) -> int:
    return sum("loss/current" in line for line in read_metrics(folder))


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a file that a later run replaces, which systems that map it would refuse."""
    return load(path.read_bytes())


def rename_ema_as_in_version_0_1(path: Path) -> None:
    metadata = checkpoint_dir.read_checkpoint_info(path).metadata
    tensors = read_tensors(path / "tensors.safetensors")
    text = json.dumps(metadata["tree"].pop("ema"))
    metadata["tree"]["average"] = json.loads(text.replace('"ema/', '"average/'))
    assert "average/" in str(metadata["tree"])
    renamed = {re.sub("^ema/", "average/", name): tensor for name, tensor in tensors.items()}
    checkpoint_dir.write_checkpoint(path, metadata, renamed)


@pytest.mark.quick
@pytest.mark.parametrize(("step", "is_old"), [pytest.param(3, True, marks=pytest.mark.slow), (9, False)])
def test_resume_gives_equal_weights_ema_and_metrics(uninterrupted_run, dataset, tmp_path, step, is_old):
    folder = copy_as_killed(uninterrupted_run, tmp_path / "cut", step)
    if is_old:
        rename_ema_as_in_version_0_1(folder / f"lora-step{step:08d}-state")
    run_on_ranks(1, train, *build_flags(dataset, folder, "--auto_resume"))

    assert_equal_files(uninterrupted_run, folder)
    assert read_metrics(folder) == read_metrics(uninterrupted_run)
    assert count_logged_steps(uninterrupted_run) == STEPS


@pytest.mark.daily
@pytest.mark.parametrize("family", ["flux2_klein", "chroma"])
def test_resume_of_transformers_gives_equal_weights_ema_and_metrics(dataset, tmp_path, family):
    model = ("--pretrained_model_name_or_path", f"random:{family}:tiny", "--max_train_steps", "6")
    run_on_ranks(1, train, *build_flags(dataset, tmp_path / "whole", *model))
    folder = copy_as_killed(tmp_path / "whole", tmp_path / "cut", 3)
    assert not (folder / "lora.safetensors").exists()
    run_on_ranks(1, train, *build_flags(dataset, folder, *model, "--auto_resume"))

    assert_equal_files(tmp_path / "whole", folder, count=4)
    assert read_metrics(folder) == read_metrics(tmp_path / "whole")
    assert count_logged_steps(folder) == 6


def test_a_lora_file_that_could_not_be_saved_is_saved_after_resume(uninterrupted_run, dataset, tmp_path):
    run_on_ranks(1, train_with_failing_first_save, *build_flags(dataset, tmp_path, "--auto_resume"))
    assert_equal_files(uninterrupted_run, tmp_path)


def train_with_failing_first_save(*flags: str) -> None:
    """Train with a full disk for the first LoRA file, then resume."""
    from library.training.save_adapter import SaveAdapter

    def raise_disk_full(*_):
        raise UserError("disk full")

    save_file, SaveAdapter._save_file = SaveAdapter._save_file, raise_disk_full
    try:
        train(*flags)
    except UserError as error:
        assert "disk full" in str(error) and "lora-step00000003-state" in str(error)
    SaveAdapter._save_file = save_file
    train(*flags)


def test_repeated_resume_on_two_ranks_gives_equal_weights(uninterrupted_run, dataset, tmp_path):
    """Two ranks without accumulation train the same samples per step as one rank with two micro-batches."""
    run_on_ranks(2, train, *build_flags(dataset, tmp_path, "--gradient_accumulation_steps", "1", "--save_state"))
    expected = read_tensors(tmp_path / "lora.safetensors")
    for step in (9, 6, 3):
        for name in (f"lora-step{step + 3:08d}-state", "lora-state"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        run_on_ranks(2, train, *build_flags(dataset, tmp_path, "--gradient_accumulation_steps", "1", "--auto_resume"))
        actual = read_tensors(tmp_path / "lora.safetensors")
        assert all(torch.equal(expected[key], actual[key]) for key in expected)


OPTIMIZERS = [
    ("SGD", "momentum=0.9"),
    ("Adafactor", "relative_step=False"),
    ("AdamWScheduleFree", ""),
    ("Prodigy", ""),
    ("Lion", ""),
    ("CAME", ""),
    ("DAdaptAdam", ""),
]


@pytest.mark.parametrize(("name", "argument"), OPTIMIZERS)
def test_resume_with_every_kind_of_optimizer_gives_equal_weights(dataset, tmp_path, name, argument):
    pytest.importorskip("pytorch_optimizer")
    options = [
        "--optimizer_type",
        name,
        *"--max_train_steps 6 --lr_scheduler constant --lr_warmup_steps 0".split(),
        *(["--optimizer_args", argument] if argument else []),
    ]
    options += ["--learning_rate", "1"] if name in ("Prodigy", "DAdaptAdam") else []
    run_on_ranks(1, train, *build_flags(dataset, tmp_path, *options))
    expected = read_tensors(tmp_path / "lora.safetensors")
    shutil.rmtree(tmp_path / "lora-state")
    (tmp_path / "lora.safetensors").unlink()
    run_on_ranks(1, train, *build_flags(dataset, tmp_path, *options, "--resume", "latest"))
    actual = read_tensors(tmp_path / "lora.safetensors")
    assert all(torch.equal(expected[key], actual[key]) for key in expected)


def test_auto_resume_of_a_complete_run_ends_and_more_steps_extend_it(uninterrupted_run, dataset, tmp_path):
    folder = copy_as_killed(uninterrupted_run, tmp_path / "cut", STEPS)
    shutil.copytree(uninterrupted_run / "lora-state", folder / "lora-state")
    files = sorted(path.name for path in folder.iterdir())
    log = run_on_ranks(1, train_and_read_log, *build_flags(dataset, folder, "--auto_resume"))[0]
    assert "training is complete: 12 of 12 steps" in log and "loading" not in log
    assert sorted(path.name for path in folder.iterdir()) == sorted([*files, "log"])

    log = run_on_ranks(
        1, train_and_read_log, *build_flags(dataset, folder, "--auto_resume", "--max_train_steps", "14")
    )[0]
    assert "changed since the checkpoint was saved: max_train_steps: 12 -> 14" in log
    assert "resuming after step 12" in log
    assert count_logged_steps(folder) == 14 and (folder / "lora-state").is_dir()


def train_and_read_log(*flags: str) -> str:
    """Train and return the log."""
    from library.log import configure_logging

    path = Path(flags[flags.index("--output_dir") + 1]) / "log"
    configure_logging(simple=True, file=str(path))
    train(*flags)
    return path.read_text("utf-8")


def test_settings_that_change_the_result_need_force_resume(uninterrupted_run, dataset, tmp_path):
    folder = copy_as_killed(uninterrupted_run, tmp_path / "cut", 3)
    with pytest.raises(
        AssertionError, match=r"images per step: \[2\] -> \[4\]; this changes the result(.|\n)*seed: 3 -> 4"
    ):
        run_on_ranks(
            1, train, *build_flags(dataset, folder, "--resume", "latest", "--seed", "4", "--train_batch_size", "2")
        )
    run_on_ranks(1, train, *build_flags(dataset, folder, "--resume", "latest", "--seed", "4", "--force_resume"))
    assert count_logged_steps(folder) == STEPS


def test_a_learning_rate_without_effect_that_an_older_checkpoint_recorded_is_not_compared(
    uninterrupted_run, dataset, tmp_path
):
    folder = copy_as_killed(uninterrupted_run, tmp_path / "cut", 9)
    path = folder / "lora-step00000009-state"
    metadata, tensors = checkpoint_dir.read_checkpoint_info(path).metadata, read_tensors(path / "tensors.safetensors")
    metadata["settings"] |= {"learning_rate": 3e-3, "unet_lr": 1e-2}
    checkpoint_dir.write_checkpoint(path, metadata, tensors)
    flags = build_flags(dataset, folder, "--unet_lr", "1e-2", "--learning_rate", "3e-3", "--auto_resume")
    run_on_ranks(1, train, *flags)
    assert_equal_files(uninterrupted_run, folder)


def test_ema_and_loraplus_can_be_enabled_on_resume(uninterrupted_run, dataset, tmp_path):
    """With a learning rate of almost 0 after resume, the new EMA equals the adapter of the checkpoint."""
    folder = copy_as_killed(uninterrupted_run, tmp_path / "cut", 9)
    tensors = read_tensors(folder / "lora-step00000009-state" / "tensors.safetensors")
    keys_without_ema = [key for key in tensors if not key.startswith("ema/")]
    metadata = checkpoint_dir.read_checkpoint_info(folder / "lora-step00000009-state").metadata
    metadata["tree"]["ema"] = {"dict": []}
    checkpoint_dir.write_checkpoint(
        folder / "lora-step00000009-state", metadata, {key: tensors[key] for key in keys_without_ema}
    )
    run_on_ranks(
        1,
        train,
        *build_flags(
            dataset,
            folder,
            *"--auto_resume --force_resume --learning_rate 1e-30 --network_args loraplus_lr_ratio=4".split(),
        ),
    )
    ema, adapter = (read_tensors(folder / name) for name in ("lora-ema.safetensors", "lora-step00000009.safetensors"))
    assert all(torch.allclose(ema[key], adapter[key], atol=1e-6) for key in adapter)


def test_an_adapter_of_another_rank_is_refused(uninterrupted_run, dataset, tmp_path):
    folder = copy_as_killed(uninterrupted_run, tmp_path / "cut", 3)
    with pytest.raises(AssertionError, match=r"96 of 96 adapter weights differ from the checkpoint"):
        run_on_ranks(
            1, train, *build_flags(dataset, folder, "--resume", "latest", "--network_dim", "3", "--force_resume")
        )


def test_damaged_checkpoints_are_reported_and_skipped(uninterrupted_run, dataset, tmp_path):
    folder = copy_as_killed(uninterrupted_run, tmp_path / "cut", 9)
    damaged = folder / "lora-step00000009-state" / "tensors.safetensors"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    (folder / "lora-step00000006-state" / "state.json").unlink()
    (folder / ".lora-step00000012-state.new").mkdir()

    log = run_on_ranks(1, train_and_read_log, *build_flags(dataset, folder, "--auto_resume"))[0]
    assert "lora-step00000009-state: tensors.safetensors is damaged" in log
    assert "lora-step00000006-state: state.json is missing" in log
    assert "resuming after step 3" in log
    assert_equal_files(uninterrupted_run, folder)
    assert not list(folder.glob(".lora*"))
    with pytest.raises(
        AssertionError, match=r"is not a complete checkpoint: files\.json is missing; checkpoints in .*: lora-state, "
    ):
        run_on_ranks(1, train, *build_flags(dataset, folder, "--resume", str(tmp_path)))
    # The folder that contains the checkpoints instead of a checkpoint:
    with pytest.raises(UserError, match=r"is not a complete checkpoint: .* checkpoints in .*: lora-state, "):
        select_checkpoint(StateConfig(resume=str(folder)), tmp_path / "another", "lora")


def test_a_restarted_run_resumes_from_its_own_checkpoints(uninterrupted_run, dataset, tmp_path):
    """The later checkpoints of the earlier run are ignored."""
    folder = tmp_path / "restarted"
    shutil.copytree(uninterrupted_run, folder)
    log = run_on_ranks(
        1,
        train_and_read_log,
        *build_flags(
            dataset, folder, "--seed", "4", "--max_train_steps", "3", "--no-save_state", "--save_state_on_train_end"
        ),
    )[0]
    assert "has checkpoints of an earlier run, but this run starts from scratch" in log
    log = run_on_ranks(
        1, train_and_read_log, *build_flags(dataset, folder, "--seed", "4", "--max_train_steps", "4", "--auto_resume")
    )[0]
    assert "resuming after step 3" in log


def test_resume_latest_fails_without_a_checkpoint_and_auto_resume_starts_a_run(dataset, tmp_path):
    with pytest.raises(AssertionError, match=r"no checkpoint lora\*-state in"):
        run_on_ranks(1, train, *build_flags(dataset, tmp_path, "--resume", "latest"))
    log = run_on_ranks(
        1, train_and_read_log, *build_flags(dataset, tmp_path, "--auto_resume", "--max_train_steps", "3")
    )[0]
    assert "no checkpoint in" in log


def test_save_last_n_steps_state_deletes_old_checkpoints(dataset, tmp_path):
    run_on_ranks(1, train, *build_flags(dataset, tmp_path, "--save_last_n_steps_state", "3"))
    assert sorted(path.name for path in tmp_path.glob("*-state")) == ["lora-state", "lora-step00000009-state"]


def test_save_last_n_steps_deletes_old_lora_files_after_resume(dataset, tmp_path):
    options = ("--save_last_n_steps", "3", "--ema_decay", "0.5")
    run_on_ranks(1, train, *build_flags(dataset, tmp_path, *options, "--max_train_steps", "7"))
    run_on_ranks(1, train, *build_flags(dataset, tmp_path, *options, "--auto_resume"))
    assert {path.name.removesuffix(".safetensors").removesuffix("-ema") for path in tmp_path.glob("*-step*.saf*")} == {
        "lora-step00000006",
        "lora-step00000009",
    }


def test_a_checkpoint_is_replaced_atomically(tmp_path):
    path = tmp_path / "a-state"
    for number in (1, 2):
        checkpoint_dir.write_checkpoint(path, {"step": number, "tree": {}}, {"x": torch.full((3,), float(number))})
        checkpoint = checkpoint_dir.read_checkpoint_info(path)
        assert (
            checkpoint.step == number
            and checkpoint_dir.load_checkpoint_tensors(checkpoint)["x"].tolist() == [number] * 3
        )
    path.rename(tmp_path / ".a-state.old")  # killed between two renames
    assert [
        checkpoint_dir.read_checkpoint_info(checkpoint_folder).step
        for checkpoint_folder in checkpoint_dir.find_checkpoints(tmp_path, "a")
    ] == [2]
    assert list(checkpoint_dir.find_checkpoints(tmp_path, "b")) == []


def test_checkpoints_of_other_output_names_are_ignored(tmp_path):
    for name in ("mika-state", "mika-000002-state", "mika-step00000010-state", "mika-red-state", "mika"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoint_dir.find_checkpoints(tmp_path, "mika")] == [
        "mika-000002-state",
        "mika-state",
        "mika-step00000010-state",
    ]


def test_leftover_files_of_this_output_name_only_are_removed(tmp_path):
    """Another run may be writing its checkpoint in the same folder."""
    incomplete = [
        f".{name}.77.new" for name in ("mika-state", "mika-step00000010-state", "mika2-state", "mika-red-state")
    ]
    for name in incomplete:
        (tmp_path / name).mkdir()
    for name in ("mika", "mika-ema", "mika-step00000010-ema", "mika-000001", "mika2", "mika-red"):
        (tmp_path / f".{name}.safetensors.77.part").touch()
    checkpoint_dir.remove_leftover_files(tmp_path, "mika")
    assert (
        sorted(path.name for path in tmp_path.iterdir())
        == ".mika-red-state.77.new .mika-red.safetensors.77.part .mika2-state.77.new .mika2.safetensors.77.part".split()
    )


def test_changes_of_output_dir_and_memory_options_do_not_change_the_result():
    def build_metadata(*flags: str) -> dict:
        return {
            "settings": serialize_settings(parse_config(["--dataset_config", "x", *flags]).config),
            "model": "a",
            "data": "b",
            "batch": [4],
        }

    changed = build_metadata(
        *"--output_dir elsewhere --gradient_checkpointing --mixed_precision no --network_dim 8 --resume latest".split()
    )
    changes = {str(change): change.changes_result for change in find_changes(build_metadata(), changed)}
    assert changes == {
        "output_dir: output -> elsewhere": False,
        "gradient_checkpointing: false -> true": False,
        "mixed_precision: not set -> no": False,
        "network_dim: 4 -> 8": True,
    }
    (change,) = find_changes(build_metadata(), {**build_metadata(), "data": "other"})
    assert change.changes_result and str(change) == "the images, captions or their settings changed"
    # Older states have no training adapter.
    (change,) = find_changes(build_metadata(), {**build_metadata(), "training_adapter": "a hash"})
    assert change.changes_result and str(change) == "the training adapter changed"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--resume", "latest", "--auto_resume"], "cannot be combined with auto_resume"),
        (["--resume", "nowhere"], "no such folder"),
        (["--resume", ""], "no such folder: ''; give"),
    ],
)
def test_contradicting_resume_options_are_refused(flags, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(["--dataset_config", __file__, *flags]).require_valid()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "No space left"),
        (RuntimeError("unexpected"), "RuntimeError: unexpected"),
    ],
)
def test_a_failed_checkpoint_is_reported_and_training_continues(dataset, tmp_path, error, message):
    (log,) = run_on_ranks(1, train_with_failing_checkpoint, error, *build_flags(dataset, tmp_path))
    assert log.count(f"the checkpoint cannot be saved: {message}") == 1 and "training continues" in log
    assert (tmp_path / "lora-state").is_dir() and (tmp_path / "lora.safetensors").is_file()
    assert not (tmp_path / "lora-step00000003-state").exists() and not list(tmp_path.glob(".lora*"))


def train_with_failing_checkpoint(error: Exception, *flags: str) -> str:
    """Train with a failing save of the first checkpoint; return the log."""
    from library.training import checkpoint_dir

    save_file, calls = checkpoint_dir.save_file, []

    def save(tensors, path):
        calls.append(path)
        if len(calls) == 1:
            raise error
        return save_file(tensors, path)

    checkpoint_dir.save_file = save
    return train_and_read_log(*flags)


def train_on_a_disk_that_fills_up(num_files: int, *flags: str) -> str:
    """Train with a disk that has no room for checkpoints once there are so many LoRA files."""

    def get_disk_usage(folder: Path) -> SimpleNamespace:
        is_full = len(list(folder.glob("*.safetensors"))) >= num_files
        return SimpleNamespace(free=2**20 if is_full else 2**40)

    save_weights.shutil.disk_usage = get_disk_usage
    return train(*flags)


def test_on_a_full_disk_checkpoints_come_before_lora_files(dataset, uninterrupted_run, tmp_path):
    flags = build_flags(dataset, tmp_path)
    with pytest.raises(AssertionError, match=r"not written, as checkpoints would not fit any more: 1\.05 MB free"):
        run_on_ranks(1, train_on_a_disk_that_fills_up, 2, *flags)
    (checkpoint,) = [path for path in tmp_path.glob("*-state") if not path.with_suffix(".safetensors").exists()][-1:]
    assert isinstance(checkpoint_dir.read_checkpoint_info(checkpoint).step, int)
    assert len(list(tmp_path.glob("*.safetensors"))) == 2 and not list(tmp_path.glob(".lora*"))
    run_on_ranks(1, train, *flags, "--auto_resume")
    assert_equal_files(uninterrupted_run, tmp_path)


@pytest.mark.quick
@pytest.mark.parametrize(("has_ema", "name", "num_files"), [(False, "a", 1), (True, "a", 2), (True, "a-ema", 1)])
def test_room_for_averaged_weights_is_reserved_with_the_file_that_is_written_first(
    has_ema, name, num_files, tmp_path, monkeypatch
):
    guard = SimpleNamespace(count_snapshot_bytes=lambda run: 0)
    config = SimpleNamespace(state=SimpleNamespace(save_state=False))
    run = SimpleNamespace(ema=object() if has_ema else None, config=config, nan_guard=guard)
    needed = num_files * 10**9 + save_weights.MIN_FREE_BYTES
    for free, fits in ((needed, True), (needed - 1, False)):
        monkeypatch.setattr(save_weights.shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        with nullcontext() if fits else pytest.raises(UserError, match="would not fit any more"):
            save_weights.reserve_disk_space(tmp_path / f"{name}.safetensors", 10**9, run)


def test_resume_on_another_number_of_ranks_gives_equal_weights_up_to_rounding(dataset, tmp_path):
    """Two, one and four ranks with the same number of images per step differ only in the rounding of sums."""
    options = (
        "--optimizer_type SGD --lr_scheduler constant --lr_warmup_steps 0 --learning_rate 0.5 "
        "--gradient_accumulation_steps 1"
    ).split()
    run_on_ranks(2, train, *build_flags(dataset, tmp_path / "2", *options, "--train_batch_size", "2"))
    folder = tmp_path / "2"
    for ranks, batch, step in ((1, "4", 3), (4, "1", 6)):
        folder = copy_as_killed(folder, tmp_path / str(ranks), step)
        run_on_ranks(
            ranks, train, *build_flags(dataset, folder, *options, "--train_batch_size", batch, "--auto_resume")
        )
    expected, actual = (read_tensors(path / "lora.safetensors") for path in (tmp_path / "2", folder))
    relative_error = sum(float((expected[key] - actual[key]).square().sum()) for key in expected) / sum(
        float(tensor.square().sum()) for tensor in expected.values()
    )
    assert relative_error**0.5 < 1e-6
    assert [line["epoch"] for line in read_metrics(folder) if "epoch" in line] == [
        line["epoch"] for line in read_metrics(tmp_path / "2") if "epoch" in line
    ]


@pytest.mark.parametrize(("accumulated", "is_reported"), [("2", False), ("1", True)])
def test_a_change_of_the_data_order_on_resume_is_reported(
    uninterrupted_run, dataset, tmp_path, accumulated, is_reported
):
    """With two micro-batches per step the last images of both buckets share a step; with one each has its own."""
    batch = ("--train_batch_size", "2" if is_reported else "1", "--gradient_accumulation_steps", accumulated)
    folder = copy_as_killed(uninterrupted_run, tmp_path / "cut", 9)
    log = run_on_ranks(
        1, train_and_read_log, *build_flags(dataset, folder, *batch, "--max_train_steps", "9", "--auto_resume")
    )[0]
    assert ("are trained twice or not at all" in log) is is_reported


def test_a_checkpoint_of_version_0_1_is_read_with_its_old_keys(tmp_path):
    names = ["SameWeights", "Validation", "Preview", "Learnt", "Export", "Report", "KeepState"]
    old_metadata = {
        "step": 3,
        "has_learnt": True,
        "bad_steps": [[1, "nan", "1.0"]],
        "bad_pictures": {"a": "b"},
        "owed": names,
    }
    checkpoint_dir.write_checkpoint(tmp_path / "a-state", old_metadata, {"x": torch.zeros(1)})
    metadata = checkpoint_dir.read_checkpoint_info(tmp_path / "a-state").metadata
    assert metadata["has_trained"] is True and metadata["skipped_steps"] == [[1, "nan", "1.0"]]
    assert metadata["bad_samples"] == {"a": "b"} and not old_metadata.keys() & metadata.keys() - {"step"}
    assert metadata["pending"] == [
        *("weight_sync_check", "validation", "preview", "update_norms"),
        *("save_adapter", "save_report", "save_checkpoint"),
    ]
