"""Which checkpoints are kept, as in sd-scripts."""

import pytest

from library.config.schema import SaveConfig, StateConfig
from library.training import checkpoint_retention
from library.training.checkpoint_retention import delete_old_checkpoints

EPOCHS = [f"a-{epoch:06d}-state" for epoch in (2, 4, 6, 8, 10)]
STEPS = [f"a-step{step:08d}-state" for step in (10, 20, 30, 40, 50)]


def list_kept(folder, names, save, state):
    for name in (*names, "a-state", "ab-000002-state"):
        (folder / name).mkdir()
    config = SaveConfig(output_dir=str(folder), output_name="a", **save)
    delete_old_checkpoints(config, StateConfig(**state), step=50, num_epochs=10)
    kept = {path.name for path in folder.iterdir()}
    assert {"a-state", "ab-000002-state"} <= kept
    return [name for name in names if name in kept]


@pytest.mark.parametrize(
    ("save", "state", "kept"),
    [
        ({}, {}, EPOCHS),
        ({"save_every_n_epochs": 2}, {"save_last_n_epochs_state": 3}, EPOCHS[2:]),
        ({"save_every_n_epochs": 2, "save_last_n_epochs": 2}, {}, EPOCHS[3:]),
        ({"save_every_n_epochs": 2, "save_last_n_epochs": 2}, {"save_last_n_epochs_state": 4}, EPOCHS[1:]),
        ({"save_every_n_steps": 10, "save_last_n_steps": 30}, {}, EPOCHS),
    ],
)
def test_the_checkpoints_of_the_last_epochs_are_kept(tmp_path, save, state, kept):
    assert list_kept(tmp_path, EPOCHS, save, state) == kept


@pytest.mark.parametrize(
    ("save", "state", "kept"),
    [
        ({"save_every_n_steps": 10, "save_last_n_steps": 30}, {}, STEPS[1:]),
        ({"save_every_n_steps": 10}, {"save_last_n_steps_state": 10}, STEPS[3:]),
        ({"save_every_n_steps": 10, "save_last_n_steps": 10}, {"save_last_n_steps_state": 30}, STEPS[1:]),
    ],
)
def test_the_checkpoints_of_the_last_steps_are_kept(tmp_path, save, state, kept):
    assert list_kept(tmp_path, STEPS, save, state) == kept


def test_a_checkpoint_that_cannot_be_removed_is_named(tmp_path, monkeypatch, caplog):
    def refuse(path, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(checkpoint_retention.shutil, "rmtree", refuse)
    save = {"save_every_n_steps": 10, "save_last_n_steps": 40}
    assert list_kept(tmp_path, STEPS[:1], save, {}) == STEPS[:1]
    save = {"save_every_n_steps": 10, "save_last_n_steps": 30}
    config = SaveConfig(output_dir=str(tmp_path), output_name="a", **save)
    delete_old_checkpoints(config, StateConfig(), step=50, num_epochs=10)
    assert f"{STEPS[0]}: cannot be removed: Permission denied" in caplog.text
