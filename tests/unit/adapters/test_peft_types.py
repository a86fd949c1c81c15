"""Every adapter type of peft: zero update at the start, training, state dict, dropout and norms."""

import pytest
import torch
from text_encoder_runs import build_trainable_case, compute_loss
from torch import nn

from library.adapters import injection
from library.adapters.lora_dropout import LoraDropout, hash_to_uniform
from library.adapters.update_norms import MaxNormRegularizer, compute_layer_update_norms, compute_lora_norm
from library.config.schema import AdapterConfig
from library.errors import ConfigError
from library.training.trainable_modules import build_lora_dropout

KINDS = {
    "lora": ("--network_args", "conv_dim=2", "conv_alpha=3"),
    "rslora": ("--network_args", "use_rslora=True"),
    "dora": ("--network_args", "use_dora=True", "conv_dim=2"),
    "loha": ("--network_module", "networks.loha", "--network_args", "conv_dim=2"),
    "lokr": ("--network_module", "lycoris.kohya", "--network_args", "algo=lokr", "factor=4", "preset=attn-mlp"),
    "oft": ("--network_module", "networks.oft"),
    "boft": ("--network_module", "lycoris.kohya", "--network_args", "algo=boft", "preset=attn-mlp"),
}
SIZE = ("--network_dim", "4", "--no-network_train_unet_only")
BOFT = ("--network_dim", "8", "--no-network_train_unet_only")


def list_flags(kind):
    return (*(BOFT if kind == "boft" else SIZE), *KINDS[kind])


def step(case, rate=0.5):
    loss = compute_loss(case)
    loss.backward()
    with torch.no_grad():
        for _, weight in injection.iter_adapter_parameters(case.model):
            if weight.grad is not None:
                weight -= rate * weight.grad
                weight.grad = None
    return loss.detach()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_starts_as_zero_is_trained_and_is_loaded_again(kind):
    flags = list_flags(kind)
    plain, case, other = (
        build_trainable_case("sd1"),
        build_trainable_case("sd1", *flags),
        build_trainable_case("sd1", *flags, "--seed", "7"),
    )
    start = injection.get_adapter_state_dict(case.model)
    assert case.adapter.adapter_type == {"rslora": "lora"}.get(kind, kind)
    assert {name.split(".")[0] for name in start} == ({"unet"} if kind == "oft" else {"unet", "text_encoder"})
    assert {tensor.dtype for tensor in start.values()} == {torch.float32}
    assert {injection.parse_module_name(name) for name in start} == set(case.adapter.rank_alphas)
    first = step(case)
    torch.testing.assert_close(first, compute_loss(plain).detach(), rtol=1e-4, atol=1e-5)
    for _ in range(3):
        last = step(case)
    assert last < first
    injection.load_adapter_state_dict(other.model, injection.get_adapter_state_dict(case.model))
    assert torch.equal(compute_loss(other), compute_loss(case))


@pytest.mark.parametrize(
    "kind", ["lora", *(pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS if kind != "lora")]
)
def test_the_initial_weights_are_a_function_of_the_seed_and_the_global_generator_is_unchanged(kind):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    one = injection.get_adapter_state_dict(build_trainable_case("sd1", *list_flags(kind)).model)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    two, other = (
        injection.get_adapter_state_dict(build_trainable_case("sd1", *list_flags(kind), *seed).model)
        for seed in ((), ("--seed", "7"))
    )
    assert all(torch.equal(one[name], two[name]) for name in one)
    random = [name for name in one if one[name].unique().numel() > 2 and "magnitude" not in name]
    assert bool(random) == (kind not in ("oft", "boft"))
    assert not any(torch.equal(one[name], other[name]) for name in random)


@pytest.mark.parametrize(("kind", "scale"), [("lora", 1 / 4), ("rslora", 1 / 2), ("loha", 1 / 4)])
def test_the_update_is_scaled_by_alpha_over_rank(kind, scale):
    adapter = build_trainable_case("sd1", *list_flags(kind)).adapter
    narrow = [adapter.rank_alphas[site.name] for site in adapter.target_layers if not site.is_spatial_conv]
    assert {size.alpha / size.rank for size in narrow} == {scale}
    wide = [adapter.rank_alphas[site.name] for site in adapter.target_layers if site.is_spatial_conv]
    assert {(size.rank, size.alpha) for size in wide} == (
        {(2, 3.0)} if kind == "lora" else {(2, 1.0)} if wide else set()
    )


def test_a_lokr_of_two_full_matrices_is_not_scaled_as_in_other_programs():
    case = build_trainable_case("sd1", *list_flags("lokr"))
    for site in case.adapter.target_layers:
        layer, size = case.model.get_submodule(site.name), case.adapter.rank_alphas[site.name]
        assert layer.scaling["default"] == size.alpha / size.rank == (1 if "default" in layer.lokr_w2 else 1 / 4)


def test_the_magnitude_of_dora_is_the_norm_of_each_row():
    case = build_trainable_case("sd1", *list_flags("dora"))
    state = injection.get_adapter_state_dict(case.model)
    for site in case.adapter.target_layers:
        weight = case.model.get_submodule(site.name).base_layer.weight
        torch.testing.assert_close(
            state[f"{site.name}.lora_magnitude_vector.weight"].flatten(), weight.flatten(1).norm(dim=1)
        )


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--network_dim", "6"], r"--network_dim: boft needs a divisor of the \d+ input features of .*, not 6"),
        (["--network_dim", "5"], "--network_dim: 5 is odd, but boft needs an even number"),
        (
            ["--network_dim", "4", "--network_args", "algo=boft", "network_reg_dims=ff=8"],
            "--network_args: boft needs the same rank for all layers, but there are 4, 8",
        ),
    ],
)
def test_boft_reports_unsupported_ranks(flags, problem):
    with pytest.raises(ConfigError, match=problem):
        build_trainable_case("sd1", *KINDS["boft"], *flags)


def test_hashed_uniform_numbers_are_uniform_and_independent_of_their_neighbors():
    keys = torch.arange(200) * 2**40 + 12345
    numbers = hash_to_uniform(keys, 7, torch.arange(500))
    assert numbers.min() >= 0 and numbers.max() < 1
    assert numbers.mean().item() == pytest.approx(0.5, abs=0.005)
    assert numbers.var().item() == pytest.approx(1 / 12, abs=0.002)
    counts = torch.histc(numbers, 20, 0, 1)
    assert (counts - 5000).abs().max() < 350
    assert torch.corrcoef(numbers[:20]).fill_diagonal_(0).abs().max() < 0.2
    assert torch.corrcoef(numbers.T[:20]).fill_diagonal_(0).abs().max() < 0.35
    assert torch.equal(hash_to_uniform(keys[3:5], 7, torch.arange(9)), numbers[3:5, :9])
    assert not torch.equal(hash_to_uniform(keys, 8, torch.arange(500)), numbers)


@pytest.mark.parametrize("rates", [(0.4, 0, 0), (0, 0.4, 0), (0, 0, 0.4), (0.2, 0.3, 0.1)])
def test_dropout_preserves_the_mean(rates):
    dropout = LoraDropout(*rates)
    dropout.sample_keys = torch.arange(4000)
    dropped = dropout.apply(torch.ones(4000, 3, 5), 2, axis=-1)
    assert dropped.mean().item() == pytest.approx(1 - rates[2], abs=0.02)
    if rates[1] and not rates[0]:
        assert (dropped == dropped[:, :1]).all(), "rank dropout is equal for all positions of a sample"
    if rates[2] and not rates[0]:
        assert ((dropped != 0).flatten(1).all(1) | (dropped == 0).flatten(1).all(1)).all()


@pytest.mark.parametrize("rates", [(0.4, 0, 0), (0, 0.4, 0), (0, 0, 0.4)])
def test_the_dropout_of_a_sample_does_not_depend_on_its_batch_and_is_off_in_eval_mode(rates):
    layer, dropout = nn.Linear(6, 5), LoraDropout(*rates)
    dropout.attach([layer])
    given, keys = torch.randn(4, 7, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([11, 12, 13, 14])
    dropout.sample_keys = keys
    whole, plain = layer(given), layer.eval()(given)
    layer.train()
    for row in range(4):
        dropout.sample_keys = keys[row : row + 1]
        assert torch.equal(layer(given[row : row + 1]) == 0, whole[row : row + 1] == 0)
    assert bool((whole == 0).any()) and not bool((plain == 0).any())


def test_the_chunks_of_a_long_caption_have_the_dropout_of_their_sample():
    dropout = LoraDropout(0, 0.5, 0)
    dropout.sample_keys = torch.tensor([5, 6])
    dropped = dropout.apply(torch.ones(6, 8, 40), 0, axis=-1)
    assert (
        torch.equal(dropped[0], dropped[2])
        and torch.equal(dropped[3], dropped[5])
        and not torch.equal(dropped[2], dropped[3])
    )


def test_dropout_is_applied_to_every_lora_module_and_to_shared_ones_once():
    case = build_trainable_case("flux", *SIZE, "--network_dropout", "0.5")
    dropout = build_lora_dropout(AdapterConfig(network_dropout=0.5), case.family, case.model, case.adapter)
    downs = {id(case.model.get_submodule(name).lora_A["default"]) for name in case.adapter.modules}
    hooked = [module for module in case.model.modules() if module._forward_hooks]
    assert {id(module) for module in hooked} == downs
    assert all(len(module._forward_hooks) == 1 for module in hooked)
    dropout.sample_keys = torch.tensor([1, 2])
    with torch.no_grad():
        for name, weight in injection.iter_adapter_parameters(case.model):
            if "lora_B" in name:
                weight.fill_(0.1)
    dropped = compute_loss(case)
    case.model.eval()
    assert not torch.allclose(dropped, compute_loss(case))


def test_max_norm_scales_large_updates_to_the_limit_and_leaves_small_ones():
    case = build_trainable_case("flux", *SIZE, "--network_alpha", "3")
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, weight in injection.iter_adapter_parameters(case.model):
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=draw) * (1 if "single" in name else 1e-3))
    groups = {}
    for site in case.adapter.target_layers:
        groups.setdefault(site.kohya_name, []).append(case.model.get_submodule(site.name))

    def compute_norms():
        return {
            name: torch.cat([layer.get_delta_weight("default") for layer in layers]).norm().item()
            for name, layers in groups.items()
        }

    before = compute_norms()
    MaxNormRegularizer(case.model, case.adapter, 0.5)()
    after = compute_norms()
    assert any(norm > 0.5 for norm in before.values()) and any(norm < 0.5 for norm in before.values())
    assert after == pytest.approx({name: min(norm, 0.5) for name, norm in before.items()}, rel=1e-4)


def test_an_adapter_that_two_models_share_is_trained_and_scaled_as_one():
    names = ("high_noise", "low_noise")
    model = nn.ModuleDict({name: nn.ModuleDict({"layer": nn.Linear(6, 5)}) for name in names})
    adapter = injection.inject_into_model(model, AdapterConfig(network_dim=2, network_alpha=2.0), ("layer",), 0)
    injection.share_adapters(model["high_noise"], model["low_noise"])
    with torch.no_grad():
        for name, weight in injection.iter_adapter_parameters(model):
            if "lora_B" in name:
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(3)))
    assert len([weight for weight in model.parameters() if weight.requires_grad]) == 2
    MaxNormRegularizer(model, adapter, 0.5)()
    updates = [model[name]["layer"].get_delta_weight("default") for name in names]
    assert torch.equal(*updates) and float(updates[0].norm()) == pytest.approx(0.5, rel=1e-4)
    assert not torch.equal(*(model[name]["layer"].get_base_layer().weight for name in names))


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("networks.loha", ["conv_dim=2"]),
        ("networks.lokr", ["factor=4"]),
        ("lycoris.kohya", ["algo=loha", "conv_dim=2", "use_tucker=True"]),
        ("lycoris.kohya", ["algo=lokr", "decompose_both=True"]),
        ("lycoris.kohya", ["algo=lora", "dora_wd=True"]),
    ],
)
def test_max_norm_scales_the_product_of_loha_lokr_and_dora_to_the_limit(module, arguments):
    options = "--network_module", module, "--network_alpha", "3", "--network_args", *arguments
    case = build_trainable_case("sd1", *SIZE, *options)
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for number, (_, weight) in enumerate(injection.iter_adapter_parameters(case.model)):
            weight.copy_(torch.randn(weight.shape, generator=draw) * (1 if number % 3 else 0.05))

    def compute_norms():
        layers = {site.name: case.model.get_submodule(site.name) for site in case.adapter.target_layers}
        return compute_layer_update_norms(layers)

    before = compute_norms()
    limit = sorted(before.values())[len(before) // 2]
    MaxNormRegularizer(case.model, case.adapter, limit)()
    after = compute_norms()
    assert after == pytest.approx({name: min(norm, limit) for name, norm in before.items()}, rel=1e-4)
    assert sum(before[name] > after[name] * 1.0001 for name in before) > len(before) // 3


def test_the_update_norm_is_the_frobenius_norm_of_the_delta_weight():
    down, ups = torch.randn(3, 4, 2, 2), [torch.randn(5, 3, 1, 1), torch.randn(2, 3, 1, 1)]
    whole = torch.cat([up.flatten(1) for up in ups]) @ down.flatten(1) * 0.7
    torch.testing.assert_close(compute_lora_norm(down, ups, 0.7), whole.norm())
