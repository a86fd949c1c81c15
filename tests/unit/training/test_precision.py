"""Attention modes and the precision of adapters."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from diffusers import attention_backend
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry
from problem_lines import format_lines
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from tiny_pipelines import TINY
from torch.nn.attention import SDPBackend
from training_runs import even_dataset, max_relative_difference, train, train_adapter

from library.config import parse_config
from library.distributed.accelerator import prepare_accelerator
from library.distributed.validate_launch import validate_attention_support, validate_distributed
from library.distributed.world import World
from library.models.attention import (
    DIFFUSERS_ATTENTION_BACKENDS,
    attend_with_cudnn,
    make_gradient_contiguous,
    set_attention_mode,
)
from library.models.facts import TORCH_ATTENTION_MODES
from library.models.families import FAMILIES, FAMILY_FACTS
from library.models.validate_options import validate_attention_mode

__all__ = ["even_dataset"]  # a fixture

DATA = ["--dataset_config", "pyproject.toml"]


def predict(name: str, mode: str) -> torch.Tensor:
    family, tiny = FAMILIES.get(TINY[name]().family)(), TINY[name]()
    denoiser = getattr(tiny.pipe, family.facts.denoiser_name)
    set_attention_mode(denoiser, mode)
    backends = {
        str(module.processor._attention_backend.value)
        for module in denoiser.modules()
        if getattr(getattr(module, "processor", None), "_attention_backend", None) is not None
    }
    assert backends == (set() if mode in TORCH_ATTENTION_MODES else {DIFFUSERS_ATTENTION_BACKENDS[mode]})
    with torch.no_grad():
        return family.predict(tiny.pipe, denoiser, tiny.batch.latents, torch.tensor([700.0, 250.0]), tiny.batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["flux", "z_image", "qwen_image"])
def test_attention_modes_give_the_same_result_and_do_not_affect_other_models(name):
    expected = predict(name, "sdpa")
    actual = predict(name, "math")

    assert float((expected - actual).abs().max()) < 1e-4
    assert torch.equal(predict(name, "sdpa"), expected)


@pytest.mark.parametrize(("wrap", "layouts"), [(make_gradient_contiguous, [True, True]), (torch.clone, [True, False])])
def test_cudnn_gets_gradients_of_one_layout_whatever_follows_attention(wrap, layouts):
    """torch's cuDNN backward takes the layout of the first gradient for that of all: wrong numbers, or a crash."""
    found = []
    for joins_mlp in (False, True):  # as in FLUX.1's double and single blocks
        attended = torch.randn(1, 6, 2, 8, requires_grad=True)
        attended.register_hook(lambda gradient: found.append(gradient.is_contiguous()))
        tokens = wrap(attended).flatten(2, 3)
        (torch.cat([tokens, torch.ones(1, 6, 64)], dim=2) if joins_mlp else tokens).square().sum().backward()
    assert found == layouts

    inputs = (torch.randn(1, 6, 2, 8, requires_grad=True) for _ in range(3))
    assert "ContiguousGradient" in attend_with_cudnn(*inputs, kernel=SDPBackend.MATH).grad_fn.name()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TINY.keys() & FAMILY_FACTS.keys()))
def test_each_attention_mode_that_a_family_lists_reaches_its_denoiser(name):
    """Sana, Lumina 2 and CogView4 have processors without backends: any mode would have switched xformers on."""
    family = FAMILIES.get(name)()
    denoiser = getattr(TINY[name]().pipe, family.facts.denoiser_name)
    with attention_backend("native"):
        for mode in {"math", "efficient"} & set(FAMILY_FACTS[name].blocks.attention_modes):
            set_attention_mode(denoiser, mode)
            backends = {str(each.processor._attention_backend.value) for each in iter_attention(denoiser)}
            assert backends == {DIFFUSERS_ATTENTION_BACKENDS[mode]}


def iter_attention(denoiser):
    """The modules whose processor has a backend."""
    for module in denoiser.modules():
        if getattr(getattr(module, "processor", None), "_attention_backend", None) is not None:
            yield module


def test_diffusers_own_cudnn_function_is_never_used():
    set_attention_mode(torch.nn.Linear(1, 1), "sdpa")  # DIFFUSERS_ATTN_BACKEND can choose it
    assert _AttentionBackendRegistry._backends[AttentionBackendName._NATIVE_CUDNN] is attend_with_cudnn


def test_cudnn_attention_equals_torchs():
    query, key, value = (torch.randn(2, 6, 2, 8) for _ in range(3))
    mask = torch.tensor([True] * 4 + [False] * 2)[None, None, None]
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(each.transpose(1, 2) for each in (query, key, value)), attn_mask=mask
    )
    actual = attend_with_cudnn(query, key, value, mask, kernel=SDPBackend.MATH)
    assert torch.allclose(actual, expected.transpose(1, 2), atol=1e-6)


def test_torch_never_chooses_cudnn_attention_by_itself():
    torch.backends.cuda.enable_cudnn_sdp(True)
    prepare_accelerator(parse_config(DATA).config)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


def test_a_family_lists_only_attention_modes_of_its_denoiser():
    for name, facts in FAMILY_FACTS.items():
        for mode in (*TORCH_ATTENTION_MODES, *DIFFUSERS_ATTENTION_BACKENDS):
            problems = [*validate_attention_mode(mode, SimpleNamespace(family=name))]
            assert (not problems) == (mode in (*TORCH_ATTENTION_MODES, *facts.blocks.attention_modes)), (name, mode)
    (problem,) = format_lines(validate_attention_mode("flash", SimpleNamespace(family="sd3")))
    assert "flash is not supported for Stable Diffusion 3, only sdpa, xformers" in problem


def test_an_attention_mode_that_is_not_installed_is_reported_with_a_fix():
    world = replace(World.from_environment(), device_type="cpu")
    assert (
        format_lines(validate_attention_support("sdpa", world, "no"))
        == format_lines(validate_attention_support("math", world, None))
        == []
    )
    assert format_lines(validate_attention_support("flash", world, "no")) == [
        "--attn_mode flash: not installed; pip install flash-attn, or use sdpa",
        "--attn_mode flash: needs a CUDA device, and this is cpu; use sdpa",
        "--attn_mode flash: supports half precision only; set mixed_precision bf16, or use sdpa",
    ]
    assert format_lines(validate_attention_support("cudnn", replace(world, device_type="cuda"), "bf16")) == []


@pytest.mark.parametrize(("mode", "is_refused"), [("flash", True), ("cudnn", True), ("sdpa", False), ("math", False)])
def test_attention_without_deterministic_backward_is_refused_with_deterministic(mode, is_refused):
    config = parse_config([*DATA, "--attn_mode", mode, "--deterministic"]).config
    problem = f"--attn_mode {mode}: has no deterministic backward; use sdpa with --deterministic"
    assert (problem in format_lines(validate_distributed(config, World.from_environment()))) == is_refused


@pytest.mark.parametrize(("flag", "mode"), [("--xformers", "xformers"), ("--use_flash_attn", "flash")])
def test_flags_of_sd_scripts_select_an_attention_mode(flag, mode, tmp_path):
    loaded = parse_config([*DATA, flag])
    assert format_lines(loaded.problems) == [] and loaded.config.distributed.attn_mode == mode
    (tmp_path / "run.toml").write_text(f"{flag[2:]} = false\n")
    loaded = parse_config([*DATA, "--config_file", str(tmp_path / "run.toml")])
    assert format_lines(loaded.problems) == [] and loaded.config.distributed.attn_mode == "sdpa"
    assert format_lines(parse_config([*DATA, flag, "3"]).problems) == [f"{flag}: takes no value"]


@pytest.mark.slow
def test_unsupported_attention_is_refused_before_a_model_is_loaded(even_dataset, tmp_path):
    with pytest.raises(AssertionError, match=r"--attn_mode xformers: not installed.*\n.*needs a CUDA"):
        run_on_ranks(1, train, "--dataset_config", str(even_dataset), "--output_dir", str(tmp_path), "--xformers")
    with pytest.raises(AssertionError, match="--attn_mode: math is not supported for Stable Diffusion 1"):
        run_on_ranks(
            1, train, "--dataset_config", str(even_dataset), "--output_dir", str(tmp_path), "--attn_mode", "math"
        )


def train_and_read_dtypes(*flags: str) -> tuple[set, set, set]:
    """Return the dtypes of the base model, the adapter and its gradients."""
    from library.training import state

    get_parameters, dtypes = state.TrainingRun.parameters.fget, {}

    def record_dtypes(run):
        trainable = get_parameters(run)
        base = [
            parameter.dtype
            for parameter in run.strategy.unwrap_model(run.model).parameters()
            if not parameter.requires_grad
        ]
        dtypes["base"], dtypes["adapter"] = set(base), {parameter.dtype for parameter in trainable}
        dtypes.setdefault("gradients", set()).update(
            parameter.grad.dtype for parameter in trainable if parameter.grad is not None
        )
        return trainable

    state.TrainingRun.parameters = property(record_dtypes)
    train(*flags)
    return dtypes["base"], dtypes["adapter"], dtypes["gradients"]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "adapter"), [((), torch.float32), (("--full_bf16",), torch.bfloat16)])
def test_the_base_is_in_bf16_and_the_adapter_only_with_full_bf16(options, adapter, even_dataset, tmp_path):
    ((base, weights, gradients),) = run_on_ranks(
        1,
        train_and_read_dtypes,
        "--dataset_config",
        str(even_dataset),
        "--output_dir",
        str(tmp_path),
        *"--max_train_steps 2 --learning_rate 0.1 --mixed_precision bf16".split(),
        *options,
    )

    assert base == {torch.bfloat16} and weights == gradients == {adapter}
    saved = load_file(tmp_path / "lora.safetensors")
    assert {tensor.dtype for name, tensor in saved.items() if not name.endswith("alpha")} == {adapter}


@pytest.mark.slow
def test_bf16_adapters_train_equally_on_two_ranks_and_close_to_float32(even_dataset, tmp_path):
    flags = ("--optimizer_type", "SGD", "--mixed_precision", "bf16")
    float32_adapter = train_adapter(tmp_path / "whole", 1, 4, 1, *flags, dataset=even_dataset)
    one_rank = train_adapter(tmp_path / "one", 1, 4, 1, *flags, "--full_bf16", dataset=even_dataset)
    two_ranks = train_adapter(tmp_path / "two", 2, 2, 1, *flags, "--full_bf16", dataset=even_dataset)

    for other in (float32_adapter, two_ranks):
        assert (
            max_relative_difference(
                {name: tensor.float() for name, tensor in one_rank.items()},
                {name: tensor.float() for name, tensor in other.items()},
            )
            < 0.3
        )


@pytest.mark.slow
def test_full_bf16_without_mixed_precision_bf16_is_refused(even_dataset, tmp_path):
    assert format_lines(parse_config([*DATA, "--full_bf16", "--mixed_precision", "no"]).problems) == [
        "--full_bf16: needs mixed_precision bf16, not no"
    ]
    with pytest.raises(AssertionError, match="--full_bf16: needs mixed_precision bf16, not no"):
        run_on_ranks(1, train, "--dataset_config", str(even_dataset), "--output_dir", str(tmp_path), "--full_bf16")
