"""EMA weights, the averaged weights of schedule-free optimizers, and the learning rate of Prodigy."""

import itertools

import pytest
import torch
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import train, write_images

SETTINGS = tuple("--train_batch_size 2 --max_train_steps 5 --network_dim 2 --seed 3 --save_every_n_steps 1".split())


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("average"), {(64, 64): 4})


def test_ema_weights_are_saved_with_each_adapter(dataset, tmp_path):
    decay = 0.15  # below the warmup cap of the decay from step 2 on
    run_on_ranks(
        1,
        train,
        "--dataset_config",
        str(dataset),
        *SETTINGS,
        *"--optimizer_type SGD --learning_rate 0.5".split(),
        "--ema_decay",
        str(decay),
        "--output_dir",
        str(tmp_path),
        "--output_name",
        "a",
    )

    names = [f"a-step{step:08d}" for step in range(1, 5)] + ["a"]
    for previous, name in itertools.pairwise(names):
        previous_ema, current = (
            load_file(tmp_path / f"{previous}-ema.safetensors"),
            load_file(tmp_path / f"{name}.safetensors"),
        )
        ema = load_file(tmp_path / f"{name}-ema.safetensors")
        assert ema.keys() == current.keys()
        for key in ema:
            if not key.endswith("alpha"):
                expected = decay * previous_ema[key] + (1 - decay) * current[key]
                assert torch.allclose(ema[key], expected, rtol=1e-5, atol=1e-9), (name, key)
    assert any(not torch.equal(ema[key], current[key]) for key in ema)


def test_saving_does_not_change_a_schedule_free_run(dataset, tmp_path):
    """Saving switches to the averaged weights, and then restores the trained ones."""
    flags = (
        "--dataset_config",
        str(dataset),
        *SETTINGS,
        *"--optimizer_type AdamWScheduleFree --learning_rate 0.01".split(),
        "--output_dir",
        str(tmp_path),
    )
    often = load_file(run_on_ranks(1, train, *flags, "--output_name", "often")[0])
    once = load_file(run_on_ranks(1, train, *flags, "--output_name", "once", "--save_every_n_steps", "100")[0])

    assert once.keys() == often.keys()
    for key in once:
        assert torch.allclose(once[key], often[key], rtol=1e-4, atol=1e-7), key


def test_prodigy_adapts_its_learning_rate_from_1(dataset, tmp_path):
    flags = (
        "--dataset_config",
        str(dataset),
        *SETTINGS,
        *"--optimizer_type Prodigy --learning_rate 1.0 --lr_scheduler rex".split(),
        "--output_dir",
        str(tmp_path),
        "--output_name",
        "p",
    )
    tensors = load_file(run_on_ranks(1, train, *flags)[0])

    assert all(torch.isfinite(tensor.float()).all() for tensor in tensors.values())
    assert any(tensor.abs().max() > 0 for key, tensor in tensors.items() if "lora_up" in key)
