"""LoRA injection: target modules, initialization, trainable parameters and state dict."""

import pytest
import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig, inject_adapter_in_model
from small_unet import CONFIG, TARGETS, build_unet, randomize_lora_b, run_unet
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from library.adapters import injection, precision
from library.adapters.targets_rank_alpha import match_target_modules
from library.config.schema import AdapterConfig
from library.errors import UserError


def test_the_real_unet_gets_a_lora_on_192_modules():
    with torch.device("meta"):
        model = UNet2DConditionModel(cross_attention_dim=768)
    adapter = injection.inject_into_model(model, CONFIG, TARGETS, seed=1)
    assert len(adapter.modules) == 192
    assert (adapter.rank, adapter.alpha) == (6, 2.5)
    assert len(injection.get_adapter_state_dict(model)) == 2 * 192


@torch.no_grad()
def test_the_update_is_zero_at_the_start():
    model = build_unet()
    before = run_unet(model)
    injection.inject_into_model(model, CONFIG, TARGETS, seed=1)
    assert torch.equal(run_unet(model), before)
    randomize_lora_b(model)
    assert not torch.allclose(run_unet(model), before)


@torch.no_grad()
def test_the_update_is_lora_b_times_lora_a_times_alpha_over_rank():
    model, plain = build_unet(), build_unet()
    adapter = injection.inject_into_model(model, CONFIG, TARGETS, seed=1)
    randomize_lora_b(model)
    state = injection.get_adapter_state_dict(model)
    for name in adapter.modules:
        down, up = (state[f"{name}.lora_{half}.weight"].flatten(1) for half in "AB")
        weight = plain.get_submodule(name).weight
        weight += (up @ down * (2.5 / 6)).view_as(weight)
    torch.testing.assert_close(run_unet(model), run_unet(plain), rtol=1e-4, atol=1e-5)


def test_the_initial_weights_depend_on_the_seed_and_the_name_only():
    def init_weights(seed, targets=TARGETS):
        model = build_unet()
        injection.inject_into_model(model, CONFIG, targets, seed)
        return injection.get_adapter_state_dict(model)

    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = init_weights(seed=3)
    assert torch.equal(before, torch.random.get_rng_state()), "the global generator is unchanged"
    torch.manual_seed(2)
    second, other, fewer = init_weights(seed=3), init_weights(seed=4), init_weights(3, ("to_q",))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(first[name], fewer[name]) for name in fewer)
    downs = [name for name in first if "lora_A" in name]
    assert not any(torch.equal(first[name], other[name]) for name in downs)
    assert not torch.equal(first[downs[1]], first[downs[8]])


def test_lora_a_is_initialized_as_kaiming_uniform_with_the_bound_of_a_linear_layer():
    model = nn.ModuleDict({"to_q": nn.Linear(400, 30), "conv": nn.Conv2d(90, 8, 1)})
    injection.inject_into_model(model, AdapterConfig(network_dim=64), ("to_q", "conv"), seed=0)
    for name, fan_in in (("to_q", 400), ("conv", 90)):
        down = injection.get_adapter_state_dict(model)[f"{name}.lora_A.weight"]
        assert down.abs().max() <= fan_in**-0.5
        assert down.std().item() == pytest.approx(fan_in**-0.5 / 3**0.5, rel=0.03)


def test_only_the_lora_is_trainable_and_in_float32_whatever_the_dtype_of_the_model():
    model = build_unet(torch.bfloat16).train()
    injection.inject_into_model(model, CONFIG, TARGETS, seed=1)
    with torch.autocast("cpu", torch.bfloat16):
        run_unet(model).square().mean().backward()
    trained = dict(injection.iter_adapter_parameters(model))
    assert {id(p) for p in trained.values()} == {id(p) for p in model.parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32}
    assert {p.dtype for p in model.parameters() if not p.requires_grad} == {torch.bfloat16}
    assert all(p.grad is not None and p.grad.isfinite().all() for p in trained.values())
    assert all(bool(p.grad.any()) for name, p in trained.items() if "lora_B" in name)


def test_alpha_zero_means_the_rank_as_in_sd_scripts():
    assert (
        injection.inject_into_model(build_unet(), AdapterConfig(network_dim=6, network_alpha=0), TARGETS, seed=1).alpha
        == 6
    )


def test_a_target_that_matches_no_layer_is_reported_by_name():
    with pytest.raises(UserError, match="no layer of UNet2DConditionModel matches 'to_qq'"):
        injection.inject_into_model(build_unet(), CONFIG, (*TARGETS, "to_qq"), seed=1)
    with pytest.raises(UserError, match="none are given"):
        injection.inject_into_model(build_unet(), CONFIG, (), seed=1)


def test_a_target_is_a_suffix_of_a_module_name_that_begins_at_a_dot():
    model = nn.ModuleDict({"to_q": nn.Linear(2, 2), "not_to_q": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
    assert match_target_modules(model, ("to_q",)) == ("to_q",)


class Outer(nn.Module):
    """Wrap a model as ``module``, as DDP does."""

    def __init__(self, module):
        super().__init__()
        self.module = module


def test_parameter_names_are_the_same_in_any_wrapper():
    model = build_unet()
    injection.inject_into_model(model, CONFIG, TARGETS, seed=1)
    plain = list(injection.get_adapter_state_dict(model))
    assert plain[0] == "down_blocks.0.attentions.0.proj_in.lora_A.weight"
    assert list(injection.get_adapter_state_dict(Outer(model))) == plain
    assert list(injection.get_adapter_state_dict(torch.compile(model, backend="eager"))) == plain
    assert list(injection.get_adapter_state_dict(Outer(torch.compile(Outer(model), backend="eager")))) == plain
    model.mid_block = torch.compile(model.mid_block, backend="eager")  # as regional compilation does
    assert any("_orig_mod" in name for name, _ in model.named_parameters())
    assert list(injection.get_adapter_state_dict(model)) == plain


def test_a_state_dict_is_loaded_and_a_wrong_one_is_rejected():
    model, other = build_unet(), build_unet()
    injection.inject_into_model(model, CONFIG, TARGETS, seed=1)
    injection.inject_into_model(other, CONFIG, TARGETS, seed=2)
    randomize_lora_b(model)
    injection.load_adapter_state_dict(other, injection.get_adapter_state_dict(model))
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            injection.get_adapter_state_dict(model).values(),
            injection.get_adapter_state_dict(other).values(),
            strict=True,
        )
    )
    short = dict(list(injection.get_adapter_state_dict(model).items())[1:])
    with pytest.raises(ValueError, match=r"proj_in\.lora_A"):
        injection.load_adapter_state_dict(other, short)


class CastCounter(TorchDispatchMode):
    """Counts the casts of tensors."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._to_copy.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("use_dora", [False, True])
def test_lora_inputs_are_cast_by_autocast_alone_with_equal_results(use_dora):
    """peft casts them to float32 for each layer, and autocast casts them back."""
    results, casts = [], []
    for leaves_casts in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 8)).bfloat16().requires_grad_(False)
        model = inject_adapter_in_model(LoraConfig(r=4, target_modules=["0", "2"], use_dora=use_dora), model)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn_like(parameter, dtype=torch.float32)
        if leaves_casts:
            precision.leave_input_casts_to_autocast(model)
        inputs = torch.randn(5, 8).bfloat16().requires_grad_()
        with CastCounter() as counter, torch.autocast("cpu", torch.bfloat16):
            output = model(inputs)
        output.square().sum().backward()
        gradients = [each.grad for each in model.parameters() if each.requires_grad]
        results.append([output.detach(), inputs.grad, *gradients])
        casts.append(counter.count)

    assert all(map(torch.equal, *results))
    assert casts[1] < casts[0] if not use_dora else casts[1] == casts[0]
