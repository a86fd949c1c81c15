"""``network_args`` of sd-scripts: parsing, validation, and their effect on target layers, ranks and learning rates."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from data_paths import DATA
from problem_lines import format_lines, format_texts, format_unused
from torch import nn

from library.adapters import injection
from library.adapters.targets_rank_alpha import assign_ranks
from library.adapters.validate_targets import validate_ranks
from library.config import parse_config
from library.config.network_args import (
    NetworkArgs,
    compute_block_lr_weights,
    find_block_lr_weight_lengths,
    get_network_args,
    get_unet_block_index,
    parse_network_args,
)
from library.config.schema import AdapterConfig, RunConfig
from library.config.schema_optim import OptimConfig
from library.errors import ConfigError
from library.models.detect import DetectedModel
from library.models.families import FAMILIES, FAMILY_FACTS
from library.models.loading import load_components_on_meta
from library.training.param_groups import _get_layer_lr, _get_loraplus_ratio
from library.training.preflight import load_settings
from library.training.trainable_modules import build_trainable_modules, select_target_components

GOLDEN = Path(__file__).resolve().parents[2] / "data"


def build_config(*words, **options):
    options = {"network_dim": 16, "network_alpha": 8, "network_train_unet_only": False, **options}
    return RunConfig(adapter=AdapterConfig(network_args=words, **options))


def build_model(name):
    return DetectedModel(name, "", 8, "", False, "random", "", bundled_config=name)


def match_sites(name, config):
    family = FAMILIES.get(name)()
    names = (
        family.facts.denoiser_name,
        *(part for part in family.facts.lora.text_encoders if part != family.facts.text.t5_encoder),
    )
    return select_target_components(
        config.adapter, config.optim, family, load_components_on_meta(build_model(name), names)
    )


@pytest.fixture(scope="module")
def sites():
    """The layers of models of published size, including convolutions and layers outside of blocks."""
    more = {
        "sd1": ["conv_dim=1"],
        "sdxl": ["conv_dim=1"],
        "flux": ["in_dims=0,0,0,0,0"],
        "sd3": ["emb_dims=0,0,0,0,0,0"],
        "lumina2": [],
    }
    return {
        name: injection.select_target_layers(
            match_sites(name, build_config(*words)), build_config(*words).adapter, FAMILY_FACTS[name].options.network
        )[0]
        for name, words in more.items()
    }


def get_ranks(sites, name, *words, **options):
    config = build_config(*words, **options).adapter
    ranks = assign_ranks(sites[name], config, FAMILY_FACTS[name].options.network)
    if problems := [*validate_ranks(sites[name], ranks, config)]:
        raise ConfigError(problems)
    return ranks


def get_ranks_by_original_name(sites, name, *words, **options):
    """Original name -> (rank, alpha)."""
    actual = get_ranks(sites, name, *words, **options)
    return {
        site.kohya_name: (actual[site.name].rank, actual[site.name].alpha)
        for site in sites[name]
        if site.name in actual
    }


def load_golden_ranks(name):
    keys = json.loads((GOLDEN / f"kohya_keys_{name}.json").read_text())
    return {key.split(".")[0]: shape[0] for key, shape in keys.items() if key.endswith("lora_down.weight")}


UNUSED_LAYERS = {
    "sdxl": "lora_te1_text_model_encoder_layers_11_",
    "sd3": "nothing",
    "flux": "nothing",
    "sd1": "nothing",
}
"""Layers that sd-scripts trains although the model does not use their output; their update stays zero."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file"), [("sd1", "sd15_conv"), ("sdxl", "sdxl_conv")])
def test_modules_and_ranks_with_conv_dim_equal_those_of_sd_scripts(sites, name, file):
    ours = get_ranks_by_original_name(sites, name, "conv_dim=8", "conv_alpha=4")
    theirs = {
        module: rank for module, rank in load_golden_ranks(file).items() if not module.startswith(UNUSED_LAYERS[name])
    }
    assert {module: rank for module, (rank, _) in ours.items()} == theirs
    assert {size for size in ours.values()} == {(16, 8.0), (8, 4.0)}


@pytest.mark.parametrize(("name", "file"), [("sd1", "sd15"), ("sdxl", "sdxl"), ("sd3", "sd3_medium"), ("flux", "flux")])
def test_modules_without_conv_dim_equal_those_of_sd_scripts(name, file):
    actual = {
        site.kohya_name
        for site in injection.select_target_layers(
            match_sites(name, build_config()), build_config().adapter, FAMILY_FACTS[name].options.network
        )[0]
    }
    assert actual == {module for module in load_golden_ranks(file) if not module.startswith(UNUSED_LAYERS[name])}


def test_blocks_are_numbered_as_in_sd_scripts(sites):
    numbers = {
        name: {
            site.kohya_name: get_unet_block_index(site.kohya_name, FAMILY_FACTS[name].options.network)
            for site in sites[name]
            if not site.is_text_encoder
        }
        for name in ("sd1", "sdxl")
    }
    assert set(numbers["sd1"].values()) == set(range(1, 25))
    assert set(numbers["sdxl"].values()) == set(range(2, 22))
    expected = {
        "lora_unet_down_blocks_0_resnets_0_conv1": 1,
        "lora_unet_down_blocks_0_attentions_1_proj_in": 2,
        "lora_unet_down_blocks_0_downsamplers_0_conv": 3,
        "lora_unet_down_blocks_3_resnets_1_conv2": 11,
        "lora_unet_mid_block_attentions_0_proj_in": 12,
        "lora_unet_up_blocks_0_resnets_0_conv1": 13,
        "lora_unet_up_blocks_0_upsamplers_0_conv": 15,
        "lora_unet_up_blocks_3_attentions_2_proj_in": 24,
    }
    assert {module: numbers["sd1"][module] for module in expected} == expected
    expected = {
        "lora_unet_input_blocks_4_1_proj_in": 5,
        "lora_unet_middle_block_1_proj_in": 11,
        "lora_unet_output_blocks_5_1_proj_in": 18,
    }
    assert {module: numbers["sdxl"][module] for module in expected} == expected


def test_block_dims_set_rank_and_alpha_of_each_block_and_0_excludes_it(sites):
    dims = ",".join(str(number) for number in range(25))
    actual = get_ranks_by_original_name(
        sites, "sd1", f"block_dims={dims}", f"block_alphas={dims}", "conv_dim=3", "conv_alpha=2"
    )
    assert actual["lora_unet_down_blocks_0_attentions_0_proj_in"] == (1, 1.0)
    assert actual["lora_unet_up_blocks_3_attentions_2_proj_in"] == (24, 24.0)
    assert actual["lora_unet_up_blocks_3_resnets_2_conv1"] == (3, 2.0)
    assert actual["lora_te_text_model_encoder_layers_3_mlp_fc1"] == (16, 8.0)
    only = "0," * 12 + "4," + "0," * 11 + "0"
    left = get_ranks_by_original_name(sites, "sd1", f"block_dims={only}", "conv_dim=1", f"conv_block_dims={only}")
    assert all("mid_block" in module for module in left if "unet" in module)


def test_block_lr_weights_multiply_the_learning_rate_and_0_excludes_a_block(sites):
    words = (
        "down_lr_weight=" + ",".join(["0.5"] * 12),
        "mid_lr_weight=2",
        "up_lr_weight=zeros+0.1",
        "block_lr_zero_threshold=0.2",
    )
    arguments, problems = parse_network_args(words)
    assert problems == []
    actual = get_ranks(sites, "sd1", *words)
    trained_sites = [site for site in sites["sd1"] if site.name in actual]
    assert not any("up_blocks" in site.name for site in trained_sites)
    rates = {
        site.name.split(".")[1] if not site.is_text_encoder else "text": _get_layer_lr(
            site, OptimConfig(learning_rate=1e-3, text_encoder_lr=(7e-5,)), arguments, FAMILY_FACTS["sd1"]
        )[1]
        for site in trained_sites
    }
    assert rates == pytest.approx({"down_blocks": 5e-4, "mid_block": 2e-3, "text": 7e-5})


def test_block_lr_weight_curves_have_the_expected_end_values():
    def weights(**weights):
        return compute_block_lr_weights(NetworkArgs(**weights), FAMILY_FACTS["sdxl"].options.network)

    assert weights() is None
    assert weights(down_lr_weight="linear")[1:10] == pytest.approx([number / 8 for number in range(9)])
    assert weights(up_lr_weight="reverse_linear+.5")[13:22] == pytest.approx([1.5 - number / 8 for number in range(9)])
    assert weights(down_lr_weight="sine")[9] == pytest.approx(1) and weights(down_lr_weight="cosine")[1] == 1
    assert len(weights(mid_lr_weight=(1.0, 2.0, 3.0))) == 23


def test_block_lr_weights_for_another_number_of_blocks_are_cut_or_filled_with_1_as_in_sd_scripts():
    """SDXL has 9, 3 and 9 blocks; GUIs write the 12 values of Stable Diffusion 1."""
    values = tuple(number / 10 for number in range(1, 13))
    network, arguments = FAMILY_FACTS["sdxl"].options.network, NetworkArgs(down_lr_weight=values, mid_lr_weight=(0.5,))
    expected = [1.0, *values[:9], 0.5, 1.0, 1.0, *[1.0] * 9, 1.0]
    assert compute_block_lr_weights(arguments, network) == expected
    assert list(find_block_lr_weight_lengths(arguments, network)) == [
        "down_lr_weight: 12 values for 9 blocks; the first 9 are used",
        "mid_lr_weight: 1 value for 3 blocks; the others are 1",
    ]


def test_layer_type_and_block_ranks_of_flux(sites):
    actual = get_ranks_by_original_name(
        sites,
        *"flux img_attn_dim=3 single_dim=0 train_double_block_indices=0,3-5 in_dims=2,0,0,0,7".split(),
        network_train_unet_only=True,
    )
    assert actual["lora_unet_double_blocks_3_img_attn_qkv"][0] == 3
    assert actual["lora_unet_double_blocks_0_txt_attn_qkv"][0] == 16
    assert {module.split("_")[4] for module in actual if "double" in module} == {"0", "3", "4", "5"}
    assert {module.split("_", 5)[5] for module in actual if "single" in module} == {"modulation_lin"}
    assert (actual["lora_unet_img_in"][0], actual["lora_unet_txt_in"][0]) == (2, 7)
    assert "lora_unet_time_in_in_layer" not in actual
    singles = get_ranks_by_original_name(sites, "flux", "train_blocks=single", network_train_unet_only=True)
    assert {module.split("_")[2] for module in singles if "unet" in module} == {"single"}


def test_layer_type_ranks_of_lumina(sites):
    words = "attn_dim=3 mod_dim=5 refiner_dim=7".split()
    actual = get_ranks_by_original_name(sites, "lumina2", *words, network_train_unet_only=True)
    ranks = {name.removeprefix("lora_unet_"): rank for name, (rank, _) in actual.items()}
    assert ranks["layers_0_attention_qkv"] == ranks["noise_refiner_0_attention_out"] == 3
    assert ranks["layers_1_adaLN_modulation_1"] == ranks["final_layer_adaLN_modulation_1"] == 5
    assert ranks["noise_refiner_1_adaLN_modulation_1"] == 5, "sd-scripts takes the first of the arguments that match"
    assert ranks["context_refiner_0_feed_forward_w1"] == 7
    assert ranks["layers_0_feed_forward_w1"] == ranks["final_layer_linear"] == 16
    assert "adaLN" not in " ".join(get_ranks_by_original_name(sites, "lumina2", "mod_dim=0"))


def test_arguments_of_sd_scripts_that_change_no_layer_are_named():
    words = ["verbose=True", "mlp_dim=4", "attn_dim=2"]
    model = ["--pretrained_model_name_or_path", "random:lumina2:tiny", "--network_module", "networks.lora_lumina"]
    loaded = load_settings([*DATA, *model, "--network_args", *words])
    assert format_lines(loaded.problems) == [] and loaded.config.adapter.network_args == ("attn_dim=2",)
    unused = dict(format_unused(loaded.unused))
    assert [name.rpartition(" ")[2] for name in unused] == ["verbose", "mlp_dim"]
    (problem,) = parse_network_args(["embedder_dims=[4,4,4]"])[1]
    assert problem.text == "embedder_dims: not supported: the embedders of Lumina get no adapter; leave it out"


def test_layer_type_and_block_ranks_of_sd3(sites):
    actual = get_ranks_by_original_name(
        sites,
        *"sd3 context_mlp_dim=5 x_mod_dim=0 train_block_indices=23 emb_dims=1,2,3,4,5,6".split(),
        network_train_unet_only=True,
    )
    inner = {module.split("_", 5)[5]: rank for module, (rank, _) in actual.items() if "joint" in module}
    assert inner["x_block_attn_qkv"] == 16 and not any("x_block_adaLN" in module for module in inner)
    assert {module.split("_")[4] for module in actual if "joint" in module} == {"23"}
    outer = {module: rank for module, (rank, _) in actual.items() if "unet" in module and "joint" not in module}
    assert outer["lora_unet_context_embedder"] == 1 and outer["lora_unet_final_layer_linear"] == 6
    assert outer["lora_unet_x_embedder_proj"] == 3 and outer["lora_unet_y_embedder_mlp_2"] == 4


@pytest.mark.parametrize(
    ("family", "words", "problem"),
    [
        (
            "flux",
            ["train_double_block_indices=0,4-19"],
            "double_block_indices: there is no block 19; the last one is 18",
        ),
        (
            "flux",
            ["train_single_block_indices=38"],
            "train_single_block_indices: there is no block 38; the last one is 37",
        ),
        ("sd3", ["train_block_indices=24"], "train_block_indices: there is no block 24; the last one is 23"),
    ],
)
def test_an_unknown_block_index_is_an_error(sites, family, words, problem):
    with pytest.raises(ConfigError) as caught:
        get_ranks(sites, family, *words)
    assert problem in str(caught.value)
    get_ranks(sites, family, words[0].partition("=")[0] + "=all")


def test_patterns_select_modules_ranks_and_learning_rates(sites):
    actual = get_ranks_by_original_name(
        sites,
        "sd1",
        "exclude_patterns=['.*ff.*', '.*proj.*']",
        "include_patterns=['.*mid_block.*']",
        "network_reg_dims=attn2=4,te_text=2",
        "network_reg_lrs=mid_block=5e-3",
    )
    assert not any(("_ff_" in module or "proj" in module) and "mid_block" not in module for module in actual)
    assert {rank for module, (rank, _) in actual.items() if "attn2" in module} == {4}
    assert {rank for module, (rank, _) in actual.items() if "lora_te" in module} == {2}
    arguments, _ = parse_network_args(["network_reg_lrs=mid_block=5e-3"])
    rate = {
        site.kohya_name: _get_layer_lr(site, OptimConfig(), arguments, FAMILY_FACTS["sd1"])[1] for site in sites["sd1"]
    }
    assert {rate[module] for module in rate if "mid_block" in module} == {5e-3}
    assert {rate[module] for module in rate if "mid_block" not in module} == {1e-4}


def test_lora_plus_multiplies_the_learning_rate_of_up_matrices(sites):
    text, image = (next(site for site in sites["sd1"] if site.is_text_encoder == is_text) for is_text in (True, False))
    both, _ = parse_network_args(["loraplus_lr_ratio=4", "loraplus_text_encoder_lr_ratio=2"])
    assert (
        _get_loraplus_ratio(image, both),
        _get_loraplus_ratio(text, both),
        _get_loraplus_ratio(text, NetworkArgs()),
    ) == (4, 2, None)


def test_lora_up_matrices_have_their_own_param_group():
    from library.training.param_groups import build_param_groups

    config = build_config("loraplus_lr_ratio=4", network_dim=2, network_train_unet_only=True)
    family = FAMILIES.get("sd1")()
    model, adapter = build_trainable_modules(config, family, family.load("random:sd1:tiny", torch.float32))
    groups = {
        group.name: group for group in build_param_groups(model, adapter, config.adapter, config.optim, family.facts)
    }
    assert {name: group.lr for name, group in groups.items()} == {"unet": 1e-4, "unet_plus": 4e-4}
    ups = {id(weight) for name, weight in injection.iter_adapter_parameters(model) if "lora_B" in name}
    assert {id(weight) for weight in groups["unet_plus"].parameters} == ups


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["network_reg_dims=nowhere=4"], "network_reg_dims: 'nowhere' matches no module, for example unet.down_blocks"),
        (["exclude_patterns=['ff']"], "exclude_patterns: 'ff' matches no full module name"),
        (["exclude_patterns=['.*']"], "no layer is left to train"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error(sites, words, problem):
    with pytest.raises(ConfigError, match="--network_args: ") as caught:
        get_ranks(sites, "sd1", *words)
    assert problem in str(caught.value)


def test_parts_of_a_fused_module_cannot_have_two_ranks(sites):
    with pytest.raises(ConfigError, match=r"attn_qkv is one module in sd-scripts, but its parts have ranks 3 and"):
        get_ranks(sites, "flux", r"network_reg_dims=transformer_blocks\.0\.attn\.to_q=3")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("conv_dm=4", "--network_args: conv_dm: unknown argument; did you mean conv_dim?"),
        ("conv_dim", "--network_args: 'conv_dim': expected name=value"),
        ("conv_dim=4.5", "--network_args: conv_dim: expected an integer, got '4.5'"),
        ("rank_dropout=1", "--network_args: rank_dropout: expected 0 to 0.999, got '1'"),
        ("use_dora=maybe", "--network_args: use_dora: expected True or False, got 'maybe'"),
        ("split_qkv=True", "--network_args: split_qkv: not supported: q, k and v share one down matrix"),
        ("factor=0", "--network_args: factor: expected 1 or more, or -1 for the most even factorization"),
        ("factor=4", "--network_args: factor: not supported for lora, only for lokr"),
        (
            "train_t5xxl=True",
            "--network_args: train_t5xxl: text encoders are not trained; remove network_train_unet_only",
        ),
        ("algo=loha", "--network_args: algo: only for network_module lycoris.kohya"),
        ("exclude_patterns=['(']", "--network_args: exclude_patterns: expected a list of regular expressions"),
        ("train_blocks=some", "--network_args: train_blocks: expected one of all, double, single, got 'some'"),
    ],
)
def test_problems_are_reported_when_options_are_parsed(words, problem):
    (actual,) = format_lines(parse_config([*DATA, "--network_train_unet_only", "--network_args", words]).problems)
    assert actual.startswith(problem)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (
            "networks.dylora",
            "DyLoRA is not supported: each step trains another rank, which peft has not; use networks.lora",
        ),
        (
            "networks.lora_fa",
            "LoRA-FA is not supported: its down matrices are frozen, not so here; use networks.lora",
        ),
        ("networks.lra", "unknown network module 'networks.lra'; did you mean networks.lora?"),
    ],
)
def test_an_unsupported_network_module_is_refused_with_a_reason(name, problem):
    assert format_lines(parse_config([*DATA, "--network_module", name]).problems) == [f"--network_module: {problem}"]


@pytest.mark.parametrize(
    ("name", "words", "problem"),
    [
        ("sdxl", ["img_attn_dim=4"], "img_attn_dim: not applicable to Stable Diffusion XL; remove it"),
        ("flux", ["conv_dim=4"], "conv_dim: not applicable to FLUX.1; remove it"),
        ("sdxl", ["block_dims=4,4"], "block_dims: 2 values, expected 23 (one per block)"),
    ],
)
def test_arguments_that_do_not_apply_to_a_family_are_reported(name, words, problem):
    from library.config.validate_adapter import validate_adapter_for_model

    facts = FAMILY_FACTS[name]
    adapter, optim = build_config(*words).adapter, OptimConfig()
    encoders, t5 = tuple(facts.lora.text_encoders), facts.text.t5_encoder
    found = validate_adapter_for_model(adapter, optim, facts.options.network, facts.title, encoders, t5)
    assert format_texts(found) == [problem]


def test_network_modules_of_other_families_are_refused_and_those_of_lycoris_are_known():
    facts = FAMILY_FACTS["sdxl"]
    from library.config.network_args import get_adapter_type
    from library.config.validate_adapter import validate_adapter_for_model

    config = build_config(network_module="networks.lora_flux")
    encoders, t5 = tuple(facts.lora.text_encoders), facts.text.t5_encoder
    found = validate_adapter_for_model(config.adapter, config.optim, facts.options.network, facts.title, encoders, t5)
    assert format_texts(found) == ["networks.lora_flux does not support Stable Diffusion XL; use networks.lora"]
    for algorithm, kind in {"locon": "lora", "diag-oft": "oft", "boft": "boft", "lokr": "lokr"}.items():
        assert (
            get_adapter_type(AdapterConfig(network_module="lycoris.kohya", network_args=(f"algo={algorithm}",))) == kind
        )
    assert get_adapter_type(AdapterConfig(network_args=("dora_wd=True",))) == "dora"


def test_train_t5xxl_trains_t5():
    config = build_config("train_t5xxl=True", network_dim=2)
    family = FAMILIES.get("flux")()
    model, adapter = build_trainable_modules(config, family, family.load("random:flux:tiny", torch.float32))
    assert {site.component for site in adapter.target_layers} == {"transformer", "text_encoder", "text_encoder_2"}
    names = {
        site.kohya_name.split("_block_0_")[-1] for site in adapter.target_layers if site.component == "text_encoder_2"
    }
    assert {"layer_0_SelfAttention_q", "layer_1_DenseReluDense_wi_0", "layer_1_DenseReluDense_wo"} <= names
    assert all(module.p == 0 for module in model.text_encoder_2.modules() if isinstance(module, nn.Dropout))


LYCORIS_CASES = {
    "attn-mlp": {"attentions"},
    "attn-only": {"attentions"},
    "full-lin": {"attentions", "resnets", "time_embedding"},
    "full": {"attentions", "resnets", "samplers", "conv_in", "conv_out", "time_embedding"},
    "unet-convblock-only": {"resnets", "samplers", "conv_in", "conv_out"},
}


@pytest.mark.parametrize("preset", LYCORIS_CASES)
def test_presets_of_lycoris_choose_its_layers(preset):
    """By https://github.com/KohakuBlueleaf/LyCORIS, config.py: module classes and names of each preset."""
    words = ["--network_module", "lycoris.kohya", "--network_args", f"preset={preset}", "--network_dim", "2"]
    config = parse_config([*DATA, *words]).require_valid()
    family = FAMILIES.get("sd1")()
    _, adapter = build_trainable_modules(config, family, family.load("random:sd1:tiny", torch.float32))

    layers = [layer for layer in adapter.target_layers if layer.name in adapter.rank_alphas]
    parts = {
        next(part for part in sorted(LYCORIS_CASES["full"]) if part in layer.module)
        for layer in layers
        if not layer.is_text_encoder
    }
    assert parts == LYCORIS_CASES[preset]
    assert any(layer.is_spatial_conv for layer in layers) == (preset in ("full", "unet-convblock-only"))
    assert any(layer.is_text_encoder for layer in layers) == (preset != "unet-convblock-only")
    if preset == "attn-only":
        assert all(".attn" in layer.module or "self_attn" in layer.module for layer in layers)


def test_without_a_preset_lycoris_trains_all_layers_with_the_rank_of_convolutions():
    adapter = AdapterConfig(network_module="lycoris.kohya", network_dim=6, network_alpha=3)
    assert (get_network_args(adapter).conv_dim, get_network_args(adapter).conv_alpha) == (6, 3)
    adapter = dataclasses.replace(adapter, network_args=("preset=attn-mlp",))
    assert get_network_args(adapter).conv_dim is None


@pytest.mark.parametrize(
    ("module", "words", "kept"),
    [
        ("lycoris.kohya", "algo=lora rank_dropout_scale=True dropout=0.1 bypass_mode=False", "algo bypass_mode"),
        ("lycoris.kohya", "algo=LoCon constrain=1e-4 rescaled=True block_size=4 train_on_input=True", "algo"),
        ("lycoris.kohya", "algo=lora full_matrix=True factor=8 decompose_both=True unbalanced_factorization=1", "algo"),
        ("lycoris.kohya", "preset=attn-mlp conv_dim=8 conv_alpha=4 use_tucker=True wd_on_output=False", "preset"),
        ("lycoris.kohya", "conv_dim=0 use_conv_cp=True conv_alpha=2", "conv_dim conv_alpha"),
        ("lycoris.kohya", "algo=loha constraint=0 wd_on_output=False", "algo constraint"),
        ("lycoris.kohya", "algo=diag-oft use_scalar=True use_cp=True dora_wd=True rs_lora=True", "algo"),
        (
            "lycoris.kohya",
            "algo=loha use_tucker=True conv_dim=2 use_scalar=False",
            "algo use_tucker conv_dim use_scalar",
        ),
        ("networks.lora", "algo=lora conv_alpha=4 dropout=0.1 use_tucker=True train_norm=True", ""),
        ("networks.loha", "conv_dim=4 use_tucker=True use_scalar=True", "conv_dim use_tucker"),
        ("networks.lora", "conv_dim=4 conv_alpha=2 use_scalar=True rank_dropout_scale=1", "conv_dim conv_alpha"),
    ],
)
def test_arguments_of_lycoris_without_effect_are_named_and_removed(module, words, kept):
    """By https://github.com/KohakuBlueleaf/LyCORIS, kohya.py and modules/: what each algorithm reads."""
    dropout = () if module == "networks.loha" else ("--network_dropout", "0.1")
    argv = [*DATA, "--network_module", module, *dropout, "--network_args", *words.split()]
    parsed = parse_config(argv)
    unused = {location.removeprefix("--network_args ") for location, _ in format_unused(parsed.unused)}
    names = [word.partition("=")[0] for word in words.split()]
    assert format_lines(parsed.problems) == []
    assert [arg.partition("=")[0] for arg in parsed.config.adapter.network_args] == kept.split()
    assert unused - {"--network_dropout"} == set(names) - set(kept.split())
    assert ("--network_dropout" in unused) == (module == "lycoris.kohya"), "LyCORIS drops nothing"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("use_tucker=True", "use_tucker: only for algo loha and lokr; convolutions of lora are not decomposed"),
        ("algo=lokr train_norm=True", "train_norm: not supported: norms are not trained; leave it out"),
        ("algo=lokr use_scalar=True", "use_scalar: not supported: there is no trained scalar; leave it out"),
        (
            "algo=lokr full_matrix=True",
            "full_matrix: not supported: network_dim=100000 has the same effect; leave it out",
        ),
        ("algo=boft constraint=1e-4", "constraint: not supported: rotations are not constrained; leave it out"),
        ("algo=diag-oft rescaled=True", "rescaled: not supported: rotations are not rescaled; leave it out"),
        ("dora_wd=True wd_on_output=False", "wd_on_output: not supported: DoRA has a magnitude for each output; leave"),
        ("dora_wd=True bypass_mode=True", "bypass_mode: not supported: DoRA needs the merged weight; leave it out"),
        ("bypass_mode=True dropout=0.1", "bypass_mode: drops other values than here; remove it or the dropout"),
        ("preset=ia3", "preset: expected one of full, full-lin, attn-mlp"),
        ("disable_conv_cp=True", "disable_conv_cp: LyCORIS reads it as use_tucker"),
    ],
)
def test_arguments_of_lycoris_that_change_the_result_are_refused(words, problem):
    words = ["--network_module", "lycoris.kohya", "--network_args", *words.split()]
    (actual,) = format_lines(parse_config([*DATA, *words]).problems)
    assert actual.startswith(f"--network_args: {problem}")


def test_arguments_of_convolutions_have_no_effect_on_models_without_them():
    argv = [*DATA, *"--pretrained_model_name_or_path random:flux:tiny --network_args conv_dim=4 conv_alpha=1".split()]
    loaded = load_settings([*argv, "loraplus_lr_ratio=2"])
    assert loaded.config.adapter.network_args == ("loraplus_lr_ratio=2",)
    assert dict(format_unused(loaded.unused)) == {
        "--network_args conv_dim": "FLUX.1 has no convolutions",
        "--network_args conv_alpha": "FLUX.1 has no convolutions",
    }


def test_a_conv_dim_of_0_trains_the_small_convolutions_as_in_sd_scripts(sites):
    config = build_config("conv_dim=0")
    layers, _ = injection.select_target_layers(
        match_sites("sd1", config), config.adapter, FAMILY_FACTS["sd1"].options.network
    )
    assert [layer.name for layer in layers] == [layer.name for layer in sites["sd1"]], (
        "those between the blocks as well"
    )
    assert set(get_ranks(sites, "sd1", "conv_dim=0")) == {layer.name for layer in layers if not layer.is_spatial_conv}
    lycoris = AdapterConfig(network_module="lycoris.kohya", network_args=("conv_dim=0",))
    assert get_network_args(lycoris).conv_dim == 0


@pytest.mark.parametrize("algo", ["loha", "lokr"])
def test_use_tucker_decomposes_spatial_convolutions(algo):
    words = ["--network_module", "lycoris.kohya", "--network_args", f"algo={algo}", "use_tucker=True", "factor=2"]
    config = parse_config([*DATA, "--network_dim", "2", *words]).require_valid()
    family = FAMILIES.get("sd1")()
    model, adapter = build_trainable_modules(config, family, family.load("random:sd1:tiny", torch.float32))
    tucker = {name for name, size in adapter.rank_alphas.items() if size.is_tucker}
    assert tucker == {layer.name for layer in adapter.target_layers if layer.is_spatial_conv} and tucker
    cores = {name: weight for name, weight in model.named_parameters() if "_t" in name.split(".")[-2]}
    assert cores and all(weight.ndim == 4 and bool(weight.any()) for weight in cores.values())
    assert {name.split(".hada")[0].split(".lokr")[0] for name in cores} <= tucker


def test_arguments_may_be_repeated_as_guis_do_and_those_that_are_off_need_no_support():
    arguments, problems = parse_network_args(["use_tucker=False", "conv_dim=4", "use_tucker=False", "split_qkv=False"])
    assert (arguments.use_tucker, arguments.conv_dim, problems) == (False, 4, [])
    assert format_texts(parse_network_args(["conv_dim=4", "conv_dim=8"])[1]) == ["conv_dim: duplicate argument"]


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        (
            "algo=IA3",
            "algo: (IA)^3 is not supported: few programs read its files; the nearest is algo=lora with a small network_dim",
        ),
        ("preset=layers.toml", "preset: files are not supported; use include_patterns"),
        ("split_qkv=True", "split_qkv: not supported: q, k and v share one down matrix (it crashes in sd-scripts)"),
        (
            "train_llm_adapter=True",
            "train_llm_adapter: not supported: Anima's adapter is part of the encoding of captions",
        ),
    ],
)
def test_what_is_not_supported_names_the_nearest(argument, problem):
    assert format_texts(parse_network_args([argument])[1]) == [problem]


def test_oft_of_sd_scripts_trains_no_text_encoder():
    parsed = parse_config(["--network_module", "networks.oft", "--text_encoder_lr", "1e-5"])

    assert parsed.config.adapter.network_train_unet_only
    assert ("--text_encoder_lr", "text encoders are not trained") in format_unused(parsed.unused)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module", "count"), [("sd1", "networks.oft", 128), ("flux", "networks.oft_flux", 152)]
)
def test_oft_of_sd_scripts_trains_attention_layers_unless_enable_all_linear_is_set(sites, name, module, count):
    """Of FLUX.1 those of the double blocks: q, k and v are one layer there and three here."""
    options = {"network_module": module, "network_train_unet_only": True}
    denoiser = [site for site in sites[name] if not site.is_text_encoder]
    ranks = get_ranks(sites, name, **options)
    names = [site.name for site in denoiser if site.name in ranks]
    assert len(names) == count and all(".attn" in each and ".single_" not in each for each in names)
    everything = get_ranks(sites, name, "enable_all_linear=True", **options)
    assert len([site for site in denoiser if site.name in everything and not site.is_spatial_conv]) > count


def test_oft_of_lycoris_has_no_alpha_and_no_convolutions():
    flags = ["--network_module", "lycoris.kohya", "--network_alpha", "4", "--network_args", "algo=diag-oft"]
    assert ("--network_alpha", "diag-oft has no alpha") in format_unused(parse_config(flags).unused)
    (problem,) = [each for each in format_lines(parse_config([*flags, "conv_dim=2"]).problems) if "conv_dim" in each]
    assert "oft is for linear layers only; remove it and write preset=full-lin" in problem
