"""``--block_lr`` gives each block of SDXL's UNet the learning rate that sdxl_train.py of sd-scripts gives it."""

import re
from pathlib import Path

import pytest
import torch
from problem_lines import format_lines
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from training_runs import even_dataset, train

from library.adapters.original_module_names import map_to_ldm_names
from library.config.network_args import get_weight_block_index
from library.config.schema import ModelConfig
from library.models.detect import detect_model
from library.models.loading import load_components_on_meta
from library.models.own_families import get_family_facts
from library.training.preflight import find_settings_problems, load_settings

__all__ = ["even_dataset"]  # a fixture
FIRST = {"input_blocks": 1, "middle_block": 10, "output_blocks": 13}


def find_kohya_index(key: str) -> int:
    """Find the block of a weight by its name in the original checkpoint."""
    if key.startswith(("time_embed.", "label_emb.")):
        return 0
    if key.startswith("out."):
        return 22
    match = re.match(r"(\w+)\.(\d+)\.", key)
    assert match is not None, key
    return FIRST[match[1]] + int(match[2])


@pytest.mark.quick
def test_each_weight_is_in_the_block_that_its_original_name_says():
    unet = load_components_on_meta(detect_model(ModelConfig("random:sdxl")), ("unet",)).unet
    names, network = (
        map_to_ldm_names(name for name, _ in unet.named_modules()),
        get_family_facts("sdxl").options.network,
    )
    weights = [name for name, _ in unet.named_parameters()]
    expected = {name: find_kohya_index(f"{names[name.rpartition('.')[0]]}.") for name in weights}
    assert {name: get_weight_block_index(name, network) for name in weights} == expected
    assert set(expected.values()) == set(range(23)) and len(weights) == 1680


@pytest.mark.quick
@pytest.mark.parametrize(
    ("model", "rates", "expected"),
    [
        ("sdxl", "1e-5", "1 values for 23 blocks; give 23 values"),
        ("sdxl", ",".join(["0"] * 23), "every learning rate is 0"),
        ("sdxl", "1e-5,x", "expected a learning rate for each block"),
        ("sd1", ",".join(["1e-5"] * 23), "Stable Diffusion 1 has no such blocks"),
        ("sdxl", ",".join(["1e-5"] * 23), ""),
    ],
)
def test_rates_that_do_not_fit_the_blocks_are_refused(model, rates, expected):
    base = ["--pretrained_model_name_or_path", f"random:{model}:tiny", "--train_data_dir", "docs", "--train", "full"]
    lines = format_lines(find_settings_problems(load_settings([*base, "--block_lr", rates])))
    lines = [line for line in lines if "block_lr" in line]
    assert len(lines) == bool(expected) and all(expected in line for line in lines)


@pytest.mark.slow
def test_blocks_are_trained_by_their_rates(even_dataset, tmp_path):
    """SGD moves a weight in proportion to its rate; a block with rate 0 stays, and takes no part in clipping."""

    def run(name: str, *flags: str) -> dict[str, torch.Tensor]:
        base = "--pretrained_model_name_or_path random:sdxl:tiny --train full --max_train_steps 1 --seed 3".split()
        more = "--optimizer_type SGD --max_grad_norm 0 --train_batch_size 4 --dataset_config".split()
        run_on_ranks(1, train, *base, *more, str(even_dataset), "--output_dir", str(tmp_path / name), *flags)
        (path,) = Path(tmp_path / name / "lora" / "unet").glob("*.safetensors")
        return load_file(path)

    rates = [0.0, 0.02, *[0.01] * 20, 0.04]
    even, double = run("even", "--learning_rate", "0.01"), run("double", "--learning_rate", "0.02")
    blocks = run("blocks", "--block_lr", ",".join(map(str, rates)), "--learning_rate", "0.5")
    network = get_family_facts("sdxl").options.network
    for name, value in even.items():
        start = 2 * value - double[name]
        factor = rates[get_weight_block_index(name, network)] / 0.01
        expected = start + factor * (value - start)
        assert torch.allclose(blocks[name], expected, atol=1e-6), name
    assert (even["time_embedding.linear_1.weight"] - double["time_embedding.linear_1.weight"]).abs().max() > 1e-4
