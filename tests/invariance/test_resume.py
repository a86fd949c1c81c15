"""A run that was ended goes on as if it had not been: the same weights to the bit, the same figures, the same files."""

import shutil
from pathlib import Path

import pytest
import torch
from rank_processes import run_on_ranks
from resumed_runs import STEPS, build_flags, copy_as_killed, dataset, read_metrics, uninterrupted_run
from safetensors.torch import load_file
from training_runs import train

from library.checkpoint import checkpoint_dir
from library.config import parse_config
from library.config.schema_output import StateConfig
from library.errors import ConfigError, UserError
from library.training.resume import find_changes, select_checkpoint, serialize_settings

__all__ = ["dataset", "uninterrupted_run"]  # fixtures


def same_files(one: Path, other: Path) -> None:
    names = sorted(path.name for path in one.glob("*.safetensors"))
    assert names == sorted(path.name for path in other.glob("*.safetensors")) and len(names) == 8
    for name in names:
        first, second = load_file(one / name), load_file(other / name)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first), name


def steps_done(folder: Path) -> int:
    return sum("loss/current" in line for line in read_metrics(folder))


@pytest.mark.quick
@pytest.mark.parametrize("step", [3, 9])
def test_weights_average_and_figures_are_those_of_the_whole_run(uninterrupted_run, dataset, tmp_path, step):
    folder = copy_as_killed(uninterrupted_run, tmp_path / "cut", step)
    run_on_ranks(1, train, *build_flags(dataset, folder, "--auto_resume"))

    same_files(uninterrupted_run, folder)
    assert read_metrics(folder) == read_metrics(uninterrupted_run)
    assert steps_done(uninterrupted_run) == STEPS


def test_a_file_that_could_not_be_written_is_written_by_the_run_that_goes_on(uninterrupted_run, dataset, tmp_path):
    run_on_ranks(1, without_room_at_first, *build_flags(dataset, tmp_path, "--auto_resume"))
    same_files(uninterrupted_run, tmp_path)


def without_room_at_first(*words: str) -> None:
    """A run that finds no room for its first LoRA file, and one that goes on."""
    from library.training.save_adapter import SaveAdapter

    def no_room(*_):
        raise UserError("no room")

    honest, SaveAdapter._save_file = SaveAdapter._save_file, no_room
    try:
        train(*words)
    except UserError as error:
        assert "no room" in str(error) and "lora-step00000003-state" in str(error)
    SaveAdapter._save_file = honest
    train(*words)


def test_after_several_ends_and_on_two_ranks(uninterrupted_run, dataset, tmp_path):
    """Ranks divide the accumulation among them, so the samples of a step stay the same."""
    run_on_ranks(2, train, *build_flags(dataset, tmp_path, "--gradient_accumulation_steps", "1", "--save_state"))
    two = load_file(tmp_path / "lora.safetensors")
    for step in (9, 6, 3):
        for name in (f"lora-step{step + 3:08d}-state", "lora-state"):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
        run_on_ranks(2, train, *build_flags(dataset, tmp_path, "--gradient_accumulation_steps", "1", "--auto_resume"))
        found = load_file(tmp_path / "lora.safetensors")
        assert all(torch.equal(two[key], found[key]) for key in two)


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
def test_every_kind_of_optimizer_goes_on(dataset, tmp_path, name, argument):
    pytest.importorskip("pytorch_optimizer")
    more = [
        "--optimizer_type",
        name,
        "--max_train_steps",
        "6",
        "--lr_scheduler",
        "constant",
        "--lr_warmup_steps",
        "0",
        *(["--optimizer_args", argument] if argument else []),
    ]
    more += ["--learning_rate", "1"] if name in ("Prodigy", "DAdaptAdam") else []
    run_on_ranks(1, train, *build_flags(dataset, tmp_path, *more))
    wanted = load_file(tmp_path / "lora.safetensors")
    shutil.rmtree(tmp_path / "lora-state")
    (tmp_path / "lora.safetensors").unlink()
    run_on_ranks(1, train, *build_flags(dataset, tmp_path, *more, "--resume", "latest"))
    found = load_file(tmp_path / "lora.safetensors")
    assert all(torch.equal(wanted[key], found[key]) for key in wanted)


def test_a_complete_run_says_so_and_a_longer_one_goes_on(uninterrupted_run, dataset, tmp_path):
    folder = copy_as_killed(uninterrupted_run, tmp_path / "cut", STEPS)
    shutil.copytree(uninterrupted_run / "lora-state", folder / "lora-state")
    before = sorted(path.name for path in folder.iterdir())
    text = run_on_ranks(1, told, *build_flags(dataset, folder, "--auto_resume"))[0]
    assert "training is complete: 12 of 12 steps" in text and "loading" not in text
    assert sorted(path.name for path in folder.iterdir()) == sorted([*before, "log"])

    text = run_on_ranks(1, told, *build_flags(dataset, folder, "--auto_resume", "--max_train_steps", "14"))[0]
    assert "changed since the checkpoint was saved: max_train_steps: 12 -> 14" in text
    assert "resuming after step 12" in text
    assert steps_done(folder) == 14 and (folder / "lora-state").is_dir()


def told(*words: str) -> str:
    """The messages of a run."""
    from library.log import configure_logging

    path = Path(words[words.index("--output_dir") + 1]) / "log"
    configure_logging(simple=True, file=str(path))
    train(*words)
    return path.read_text("utf-8")


def test_what_changes_the_result_needs_a_word(uninterrupted_run, dataset, tmp_path):
    folder = copy_as_killed(uninterrupted_run, tmp_path / "cut", 3)
    with pytest.raises(
        AssertionError, match=r"images per step: \[2\] -> \[4\]; this changes the result(.|\n)*seed: 3 -> 4"
    ):
        run_on_ranks(
            1, train, *build_flags(dataset, folder, "--resume", "latest", "--seed", "4", "--train_batch_size", "2")
        )
    run_on_ranks(1, train, *build_flags(dataset, folder, "--resume", "latest", "--seed", "4", "--force_resume"))
    assert steps_done(folder) == STEPS


def test_rates_for_other_parts_and_an_average_may_begin_later(uninterrupted_run, dataset, tmp_path):
    """A run without learning from there on: the average that begins with it is the adapter, as it was."""
    folder = copy_as_killed(uninterrupted_run, tmp_path / "cut", 9)
    state = load_file(folder / "lora-step00000009-state" / "tensors.safetensors")
    without = [key for key in state if not key.startswith("average/")]
    facts = checkpoint_dir.read_checkpoint_info(folder / "lora-step00000009-state").metadata
    facts["tree"]["average"] = {"dict": []}
    checkpoint_dir.write_checkpoint(folder / "lora-step00000009-state", facts, {key: state[key] for key in without})
    run_on_ranks(
        1,
        train,
        *build_flags(
            dataset,
            folder,
            "--auto_resume",
            "--force_resume",
            "--learning_rate",
            "1e-30",
            "--network_args",
            "loraplus_lr_ratio=4",
        ),
    )
    average, before = (load_file(folder / name) for name in ("lora-ema.safetensors", "lora-step00000009.safetensors"))
    assert all(torch.allclose(average[key], before[key], atol=1e-6) for key in before)


def test_an_adapter_of_another_size_is_refused_with_its_name(uninterrupted_run, dataset, tmp_path):
    folder = copy_as_killed(uninterrupted_run, tmp_path / "cut", 3)
    with pytest.raises(AssertionError, match=r"96 of 96 adapter weights differ from the checkpoint"):
        run_on_ranks(
            1, train, *build_flags(dataset, folder, "--resume", "latest", "--network_dim", "3", "--force_resume")
        )


def test_broken_states_are_named_and_passed_over(uninterrupted_run, dataset, tmp_path):
    folder = copy_as_killed(uninterrupted_run, tmp_path / "cut", 9)
    damaged = folder / "lora-step00000009-state" / "tensors.safetensors"
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    (folder / "lora-step00000006-state" / "state.json").unlink()
    (folder / ".lora-step00000012-state.new").mkdir()

    text = run_on_ranks(1, told, *build_flags(dataset, folder, "--auto_resume"))[0]
    assert "lora-step00000009-state: tensors.safetensors is damaged" in text
    assert "lora-step00000006-state: state.json is missing" in text
    assert "resuming after step 3" in text
    same_files(uninterrupted_run, folder)
    assert not list(folder.glob(".lora*"))
    with pytest.raises(
        AssertionError, match=r"is not a complete checkpoint: files\.json is missing; checkpoints in .*: lora-state, "
    ):
        run_on_ranks(1, train, *build_flags(dataset, folder, "--resume", str(tmp_path)))
    # Of the folder that holds the checkpoints:
    with pytest.raises(UserError, match=r"is not a complete checkpoint: .* checkpoints in .*: lora-state, "):
        select_checkpoint(StateConfig(resume=str(folder)), tmp_path / "another", "lora")


def test_a_run_that_began_anew_goes_on_from_its_own_states(uninterrupted_run, dataset, tmp_path):
    """Those of the run before it are of later steps, and are none of its own."""
    folder = tmp_path / "anew"
    shutil.copytree(uninterrupted_run, folder)
    text = run_on_ranks(
        1,
        told,
        *build_flags(
            dataset, folder, "--seed", "4", "--max_train_steps", "3", "--no-save_state", "--save_state_on_train_end"
        ),
    )[0]
    assert "has checkpoints of an earlier run, but this run starts from scratch" in text
    text = run_on_ranks(
        1, told, *build_flags(dataset, folder, "--seed", "4", "--max_train_steps", "4", "--auto_resume")
    )[0]
    assert "resuming after step 3" in text


def test_no_state_is_an_error_for_latest_and_a_beginning_for_auto(dataset, tmp_path):
    with pytest.raises(AssertionError, match=r"no checkpoint lora\*-state in"):
        run_on_ranks(1, train, *build_flags(dataset, tmp_path, "--resume", "latest"))
    text = run_on_ranks(1, told, *build_flags(dataset, tmp_path, "--auto_resume", "--max_train_steps", "3"))[0]
    assert "no checkpoint in" in text


def test_old_states_go(dataset, tmp_path):
    run_on_ranks(1, train, *build_flags(dataset, tmp_path, "--save_last_n_steps_state", "3"))
    assert sorted(path.name for path in tmp_path.glob("*-state")) == ["lora-state", "lora-step00000009-state"]


def test_old_lora_files_go_in_a_run_that_goes_on_as_well(dataset, tmp_path):
    few = ("--save_last_n_steps", "3", "--ema_decay", "0.5")
    run_on_ranks(1, train, *build_flags(dataset, tmp_path, *few, "--max_train_steps", "7"))
    run_on_ranks(1, train, *build_flags(dataset, tmp_path, *few, "--auto_resume"))
    assert {path.name.removesuffix(".safetensors").removesuffix("-ema") for path in tmp_path.glob("*-step*.saf*")} == {
        "lora-step00000006",
        "lora-step00000009",
    }


def test_a_state_is_replaced_whole(tmp_path):
    path = tmp_path / "a-state"
    for number in (1, 2):
        checkpoint_dir.write_checkpoint(path, {"step": number, "tree": {}}, {"x": torch.full((3,), float(number))})
        found = checkpoint_dir.read_checkpoint_info(path)
        assert found.step == number and checkpoint_dir.load_checkpoint_tensors(found)["x"].tolist() == [number] * 3
    path.rename(tmp_path / ".a-state.old")  # killed between two names
    assert [
        checkpoint_dir.read_checkpoint_info(each).step for each in checkpoint_dir.find_checkpoints(tmp_path, "a")
    ] == [2]
    assert list(checkpoint_dir.find_checkpoints(tmp_path, "b")) == []


def test_states_of_a_longer_name_are_not_ours(tmp_path):
    for name in ("mika-state", "mika-000002-state", "mika-step00000010-state", "mika-red-state", "mika"):
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoint_dir.find_checkpoints(tmp_path, "mika")] == [
        "mika-000002-state",
        "mika-state",
        "mika-step00000010-state",
    ]


def test_only_what_runs_of_this_name_had_begun_is_removed(tmp_path):
    """Another run may be writing its state beside this one at the moment."""
    begun = [f".{name}.77.new" for name in ("mika-state", "mika-step00000010-state", "mika2-state", "mika-red-state")]
    for name in begun:
        (tmp_path / name).mkdir()
    for name in ("mika", "mika-ema", "mika-step00000010-ema", "mika-000001", "mika2", "mika-red"):
        (tmp_path / f".{name}.safetensors.77.part").touch()
    checkpoint_dir.remove_leftover_files(tmp_path, "mika")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        ".mika-red-state.77.new",
        ".mika-red.safetensors.77.part",
        ".mika2-state.77.new",
        ".mika2.safetensors.77.part",
    ]


def test_settings_of_how_and_where_may_change():
    def settings(*words: str) -> dict:
        return {
            "settings": serialize_settings(parse_config(["--dataset_config", "x", *words]).config),
            "model": "a",
            "data": "b",
            "batch": [4],
        }

    now = settings(
        "--output_dir",
        "elsewhere",
        "--gradient_checkpointing",
        "--mixed_precision",
        "no",
        "--network_dim",
        "8",
        "--resume",
        "latest",
    )
    found = {str(change): change.changes_result for change in find_changes(settings(), now)}
    assert found == {
        "output_dir: output -> elsewhere": False,
        "gradient_checkpointing: false -> true": False,
        "mixed_precision: not set -> no": False,
        "network_dim: 4 -> 8": True,
    }
    (change,) = find_changes(settings(), {**settings(), "data": "other"})
    assert change.changes_result and str(change) == "the images, captions or their settings changed"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume", "latest", "--auto_resume"], "cannot be combined with auto_resume"),
        (["--resume", "nowhere"], "no such folder"),
        (["--resume", ""], "no such folder: ''; give"),
        (["--force_resume"], "no effect without resume or auto_resume"),
        (["--save_last_n_steps_state", "3"], "set save_state"),
    ],
)
def test_options_that_do_not_fit_are_told(words, said):
    with pytest.raises(ConfigError, match=said):
        parse_config(["--dataset_config", __file__, *words]).require_valid()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device"), "No space left"),
        (RuntimeError("nobody thought of it"), "RuntimeError: nobody thought of it"),
    ],
)
def test_a_state_that_cannot_be_written_is_told_and_the_run_goes_on(dataset, tmp_path, error, said):
    (text,) = run_on_ranks(1, with_a_broken_disk, error, *build_flags(dataset, tmp_path))
    assert text.count(f"the checkpoint cannot be saved: {said}") == 1 and "training continues" in text
    assert (tmp_path / "lora-state").is_dir() and (tmp_path / "lora.safetensors").is_file()
    assert not (tmp_path / "lora-step00000003-state").exists() and not list(tmp_path.glob(".lora*"))


def with_a_broken_disk(error: Exception, *words: str) -> str:
    """The messages of a run whose first state cannot be written."""
    from library.checkpoint import checkpoint_dir

    honest, calls = checkpoint_dir.save_file, []

    def save(tensors, path):
        calls.append(path)
        if len(calls) == 1:
            raise error
        return honest(tensors, path)

    checkpoint_dir.save_file = save
    return told(*words)


def test_other_numbers_of_processes_go_on_with_the_same_pictures(dataset, tmp_path):
    """Two, then one, then four, with as many pictures in a step; sums are rounded in another order, and no more."""
    more = [
        "--optimizer_type",
        "SGD",
        "--lr_scheduler",
        "constant",
        "--lr_warmup_steps",
        "0",
        "--learning_rate",
        "0.5",
        "--gradient_accumulation_steps",
        "1",
    ]
    run_on_ranks(2, train, *build_flags(dataset, tmp_path / "2", *more, "--train_batch_size", "2"))
    folder = tmp_path / "2"
    for ranks, batch, step in ((1, "4", 3), (4, "1", 6)):
        folder = copy_as_killed(folder, tmp_path / str(ranks), step)
        run_on_ranks(ranks, train, *build_flags(dataset, folder, *more, "--train_batch_size", batch, "--auto_resume"))
    one, other = (load_file(path / "lora.safetensors") for path in (tmp_path / "2", folder))
    off = sum(float((one[key] - other[key]).square().sum()) for key in one) / sum(
        float(each.square().sum()) for each in one.values()
    )
    assert off**0.5 < 1e-6
    assert [line["epoch"] for line in read_metrics(folder) if "epoch" in line] == [
        line["epoch"] for line in read_metrics(tmp_path / "2") if "epoch" in line
    ]


@pytest.mark.parametrize(("accumulated", "is_told"), [("2", False), ("1", True)])
def test_it_is_told_when_steps_are_put_together_in_another_way(
    uninterrupted_run, dataset, tmp_path, accumulated, is_told
):
    """With two accumulated the last pictures of each of two sizes make a step; with one they are a step each."""
    batch = ("--train_batch_size", "2" if is_told else "1", "--gradient_accumulation_steps", accumulated)
    folder = copy_as_killed(uninterrupted_run, tmp_path / "cut", 9)
    text = run_on_ranks(1, told, *build_flags(dataset, folder, *batch, "--max_train_steps", "9", "--auto_resume"))[0]
    assert ("are trained twice or not at all" in text) is is_told


def test_a_checkpoint_of_version_0_1_is_read_with_its_names(tmp_path):
    names = ["SameWeights", "Validation", "Preview", "Learnt", "Export", "Report", "KeepState"]
    old = {"step": 3, "has_learnt": True, "bad_steps": [[1, "nan", "1.0"]], "bad_pictures": {"a": "b"}, "owed": names}
    checkpoint_dir.write_checkpoint(tmp_path / "a-state", old, {"x": torch.zeros(1)})
    metadata = checkpoint_dir.read_checkpoint_info(tmp_path / "a-state").metadata
    assert metadata["has_trained"] is True and metadata["skipped_steps"] == [[1, "nan", "1.0"]]
    assert metadata["bad_samples"] == {"a": "b"} and not old.keys() & metadata.keys() - {"step"}
    assert metadata["pending"] == [
        *("weight_sync_check", "validation", "preview", "update_norms"),
        *("save_adapter", "save_report", "save_checkpoint"),
    ]
