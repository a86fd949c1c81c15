"""Runs with DoRA, LoKr, OFT and every network argument: equal on one and two ranks, with a verified file."""

import pytest
from rank_processes import run_on_ranks
from training_runs import even_dataset, max_relative_difference, train, train_adapter  # noqa: F401

FULL = tuple(
    (
        "--network_dropout 0.1 --scale_weight_norms 0.02 --no-network_train_unet_only --text_encoder_lr 0.3 --network_args "
        "rank_dropout=0.2 module_dropout=0.2 conv_dim=2 loraplus_lr_ratio=2 mid_lr_weight=0.5 network_reg_dims=ff=3"
    ).split()
)
SETTINGS = {
    "every argument": (FULL, "lora_up"),
    "dora": (("--network_args", "use_dora=True"), "dora_scale"),
    "lokr": (("--network_module", "networks.lokr", "--network_args", "factor=4"), "lokr_w1"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_adapter_type_trains_equally_on_one_rank_and_two(name, even_dataset, tmp_path):  # noqa: F811
    flags, key_part = SETTINGS[name]
    one, two = (
        train_adapter(tmp_path, ranks, batch, 1, "--optimizer_type", "SGD", *flags, dataset=even_dataset)
        for ranks, batch in ((1, 4), (2, 2))
    )

    assert max_relative_difference(one, two) < 2e-4
    assert any(key_part in key for key in one)
    if flags is FULL:
        scales = {key.removesuffix(".alpha"): float(one[key]) for key in one if key.endswith(".alpha")}
        factors = {
            name: (one[f"{name}.lora_up.weight"].flatten(1), one[f"{name}.lora_down.weight"].flatten(1))
            for name in scales
        }
        norms = [float((up @ down).norm()) * scales[name] / len(down) for name, (up, down) in factors.items()]
        assert max(norms) == pytest.approx(0.02, rel=1e-3), (
            "the limit of scale_weight_norms holds, and some layers have reached it"
        )


FAMILIES = {
    "sd3": (),
    "flux": ("--network_args", "train_t5xxl=True"),
    "sd3 oft": ("--network_module", "networks.oft"),
    "flux dora": ("--network_args", "use_dora=True"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_file_with_text_encoders_has_the_effect_of_the_model_in_memory(name, even_dataset, tmp_path):  # noqa: F811
    """Saving compares the file with the model in memory, layer by layer."""
    family, *_ = name.split()
    run_on_ranks(
        1,
        train,
        "--pretrained_model_name_or_path",
        f"random:{family}:tiny",
        *"--max_train_steps 2 --no-network_train_unet_only --learning_rate 1e-3".split(),
        "--dataset_config",
        str(even_dataset),
        "--output_dir",
        str(tmp_path),
        *FAMILIES[name],
    )
