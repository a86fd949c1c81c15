"""``--fused_backward_pass`` gives the weights of the ordinary run to the bit, in less memory, or is refused."""

import shutil
from pathlib import Path

import pytest
import torch
from measured_memory import find_peak
from nan_runs import train_with_nan_loss
from problem_lines import format_lines
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from torch import nn
from training_runs import even_dataset, train

from library.config import parse_config
from library.config.schema_optim import OptimConfig
from library.config.validate_full import validate_fused_launch
from library.optim.fused_backward import FusedBackward
from library.optim.optimizers import ParamGroup, build_optimizer
from library.optim.validate_optimizer import validate_fused_optimizer
from library.training.oom_advice import suggest_oom_fixes

__all__ = ["even_dataset"]  # a fixture

BASE = ["--dataset_config", "pyproject.toml", "--train", "full", "--fused_backward_pass"]


def build_layers(width: int, count: int) -> nn.Sequential:
    """Build linear layers with weights from a fixed seed."""
    layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))
    generator = torch.Generator().manual_seed(0)
    for weight in layers.parameters():
        nn.init.normal_(weight, std=0.3, generator=generator)
    return layers


def train_layers(config: OptimConfig, micro_batches: int, *, is_fused: bool) -> tuple[list[torch.Tensor], object]:
    """Take three steps; return the weights, and the state of the optimizer."""
    layers = build_layers(8, 4)
    groups = [
        ParamGroup("first", list(layers[:2].parameters()), 1e-2),
        ParamGroup("last", [*layers[2:].parameters()], 3e-3),
    ]
    if config.optimizer_type == "Muon":
        groups = [
            ParamGroup(each.name, [weight for weight in each.parameters if weight.ndim == 2], each.lr)
            for each in groups
        ]
    optimizer = build_optimizer(config, groups)
    if callable(getattr(optimizer, "train", None)):
        optimizer.train()
    fused = FusedBackward(optimizer, 0) if is_fused else None
    for step in range(3):
        if fused is not None:
            fused.start_step(0)
        for index in range(micro_batches):
            inputs = torch.linspace(-1, 1 + step, 24 * 8).reshape(24, 8) * (index + 1)
            loss = layers(inputs).square().mean()
            if fused is None:
                loss.backward()
                continue
            with fused.run_micro_batch(loss, is_last=index == micro_batches - 1):
                loss.backward()
        if fused is None:
            optimizer.step()
        trained = [weight for group in groups for weight in group.parameters]
        assert fused is None or (fused.num_updated == len(trained) and all(each.grad is None for each in trained))
        optimizer.zero_grad()
    return [weight.detach() for weight in layers.parameters()], optimizer.state_dict()


@pytest.mark.parametrize(
    "settings",
    [
        "SGD momentum=0.9",
        "AdamW weight_decay=0.1",
        "AdamW foreach=True",
        "RAdam",
        "Adafactor",
        "Adafactor relative_step=False scale_parameter=False",
        "Lion",
        "CAME",
        "Muon",
        "AdamWScheduleFree",
    ],
)
def test_weights_and_state_are_those_of_a_step_after_backward_to_the_bit(settings):
    name, *arguments = settings.split()
    config = OptimConfig(optimizer_type=name, optimizer_args=tuple(arguments), learning_rate=1e-2)
    assert list(validate_fused_optimizer(config)) == []
    for micro_batches in (1, 3):
        weights, state = train_layers(config, micro_batches, is_fused=False)
        others, other_state = train_layers(config, micro_batches, is_fused=True)
        assert all(map(torch.equal, weights, others))
        assert not torch.equal(weights[0], build_layers(8, 4)[0].weight)
        torch.testing.assert_close(other_state, state, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ("Prodigy", "it computes its step size from all weights"),
        ("DAdaptAdam", "it computes its step size from all weights"),
        ("pytorch_optimizer.Lamb pre_norm=True", "its update of a weight depends on the other weights"),
    ],
)
def test_optimizers_that_need_all_gradients_are_refused_by_name_with_the_reason(settings, reason):
    name, *arguments = settings.split()
    (problem,) = validate_fused_optimizer(OptimConfig(optimizer_type=name, optimizer_args=tuple(arguments)))
    assert problem.value == name and problem.text.endswith(reason)


def run_step(layers: nn.Sequential, fused: FusedBackward, factor: float = 1.0) -> None:
    fused.start_step(0)
    width = layers[0].in_features
    loss = layers(torch.linspace(-1, 1, 8 * width).reshape(8, width)).square().sum() * factor
    with fused.run_micro_batch(loss, is_last=True):
        loss.backward()


def test_each_gradient_is_clipped_by_its_own_norm_as_in_sd_scripts():
    layers, clipped = build_layers(8, 3), build_layers(8, 3)
    layers(torch.linspace(-1, 1, 64).reshape(8, 8)).square().sum().backward()
    for weight in layers.parameters():
        nn.utils.clip_grad_norm_([weight], 0.5)
    norm = torch.stack([weight.grad.norm() for weight in layers.parameters()]).norm()
    torch.optim.SGD(layers.parameters(), 0.1).step()

    fused = FusedBackward(torch.optim.SGD(clipped.parameters(), 0.1), 0.5)
    run_step(clipped, fused)

    assert all(map(torch.equal, layers.parameters(), clipped.parameters()))
    assert fused.compute_grad_norm() > 5 * norm, "the norm before clipping"


def test_nothing_is_updated_from_the_first_gradient_on_that_is_not_finite():
    layers, before = build_layers(8, 3), build_layers(8, 3)
    layers[1].weight.register_hook(lambda gradient: gradient * float("inf"))
    fused = FusedBackward(torch.optim.AdamW(layers.parameters()), 0)
    run_step(layers, fused)
    changed = [
        name for name, weight in layers.named_parameters() if not torch.equal(weight, before.get_parameter(name))
    ]
    assert set(changed) >= {"2.weight"} and not set(changed) & {"1.weight", "0.weight", "0.bias"}
    assert all(weight.isfinite().all() and weight.grad is None for weight in layers.parameters())
    assert fused.num_updated == len(changed) and not fused.compute_grad_norm().isfinite()

    layers = build_layers(8, 3)
    fused = FusedBackward(torch.optim.AdamW(layers.parameters()), 0)
    run_step(layers, fused, float("nan"))
    assert all(map(torch.equal, layers.parameters(), before.parameters())) and not fused.num_updated


def measure_peak(is_fused: bool) -> int:
    """Measure the peak bytes of a backward pass with the optimizer, whose state exists before."""
    layers = build_layers(256, 40)
    optimizer = torch.optim.SGD(layers.parameters(), 0.1, momentum=0.9, foreach=False)
    fused = FusedBackward(optimizer, 0) if is_fused else None
    for _ in range(2):
        with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            if fused is not None:
                run_step(layers, fused, 1e-9)
            else:
                (layers(torch.linspace(-1, 1, 2048).reshape(8, 256)).square().sum() * 1e-9).backward()
                optimizer.step()
                optimizer.zero_grad()
    return find_peak(profile)


def test_the_peak_of_a_step_falls_by_the_size_of_the_gradients():
    gradients = sum(weight.nbytes for weight in build_layers(256, 40).parameters())
    saved = measure_peak(False) - measure_peak(True)
    assert 0.9 * gradients < saved < gradients


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--mixed_precision fp16", "mixed_precision"),
        ("--on_oom recover", "on_oom"),
        ("--fsdp", "fsdp"),
        ("--deepspeed", "deepspeed"),
        ("--cp_size 2", "cp_size"),
    ],
)
def test_what_needs_all_gradients_before_an_update_is_refused(flags, named):
    lines = [line for line in format_lines(parse_config([*BASE, *flags.split()]).problems) if "fused_backward" in line]
    assert len(lines) == 1 and lines[0].startswith(f"--{named}"), lines
    config = parse_config(BASE).config
    assert len(list(validate_fused_launch(config, 2, "", "no"))) == 1
    assert len(list(validate_fused_launch(config, 1, "", "fp16"))) == 1
    assert (
        list(validate_fused_launch(config, 1, "", "bf16")) == [] != list(validate_fused_launch(config, 1, "FSDP", "no"))
    )


def test_the_names_of_sd_scripts_mean_the_same_and_train_no_lora_in_its_place():
    full = ["--dataset_config", "pyproject.toml", "--train", "full"]
    for flags in (["--blockwise_fused_optimizers"], ["--fused_optimizer_groups", "10"]):
        assert parse_config([*full, *flags]).config.full.fused_backward_pass
        assert len(parse_config([*full[:2], *flags]).problems) == 1
    assert not parse_config([*full, "--fused_optimizer_groups", "0"]).config.full.fused_backward_pass
    assert format_lines(parse_config([*full, "--fused_optimizer_groups"]).problems)
    lora = parse_config([*full[:2], "--fused_backward_pass"])
    assert lora.problems == [] and not lora.config.full.fused_backward_pass, "sd-scripts ignores it for a LoRA"


SETTINGS = (
    "--train full --train_text_encoder --max_train_steps 4 --learning_rate 1e-3 --max_grad_norm 0 --seed 3"
    " --train_batch_size 2 --gradient_accumulation_steps 2 --gradient_checkpointing --lr_scheduler cosine"
).split()


def read_weights(model: Path) -> dict[str, torch.Tensor]:
    """Read the weights of all components of a model."""
    paths = sorted(model.rglob("*.safetensors"))
    return {f"{path.parent.name}.{name}": value for path in paths for name, value in load_file(path).items()}


def find_differences(one: Path, other: Path) -> list[str]:
    first, second = read_weights(one), read_weights(other)
    return [name for name in first.keys() | second.keys() if not torch.equal(first[name], second[name])]


@pytest.mark.slow
def test_a_run_is_equal_to_the_ordinary_one_and_resumed_to_the_bit(even_dataset, tmp_path):
    def run(name: str, *flags: str) -> Path:
        output = ("--dataset_config", str(even_dataset), "--output_dir", str(tmp_path / name))
        run_on_ranks(1, train, *SETTINGS, *output, *flags)
        return tmp_path / name / "lora"

    flags = "--optimizer_type Adafactor --optimizer_args relative_step=False --ema_decay 0.9 --save_every_n_steps 2 --save_state".split()
    ordinary = run("ordinary", *flags)
    fused = run("fused", *flags, "--fused_backward_pass")
    assert find_differences(ordinary, fused) == []
    assert find_differences(ordinary.parent / "lora-ema", fused.parent / "lora-ema") == []

    shutil.copytree(fused.parent, tmp_path / "killed", ignore=shutil.ignore_patterns("lora", "lora-ema", "lora-state"))
    resumed = run("killed", *flags, "--fused_backward_pass", "--auto_resume")
    assert find_differences(fused, resumed) == [] and len(find_differences(fused, ordinary.parent / "lora-ema")) > 100


@pytest.mark.slow
def test_a_step_with_nan_loss_is_skipped(even_dataset, tmp_path):
    """With plain SGD this is bitwise equal to a learning rate of 0 in that step."""
    flags = [
        *"--train full --max_train_steps 4 --learning_rate 0.03 --optimizer_type SGD --max_grad_norm 1 --seed 3".split(),
        *"--train_batch_size 4 --fused_backward_pass --train_modules attn2 --dataset_config".split(),
        str(even_dataset),
    ]
    run_on_ranks(1, train_with_nan_loss, 0, 2, False, *flags, "--output_dir", str(tmp_path / "bad"))
    rates = "--lr_scheduler piecewise_constant --lr_scheduler_args step_rules=1:2,0:3,1".split()
    run_on_ranks(1, train, *flags, *rates, "--output_dir", str(tmp_path / "expected"))
    assert find_differences(tmp_path / "bad" / "lora", tmp_path / "expected" / "lora") == []
    assert len(list((tmp_path / "bad").glob("lora.nan-step00000003-rank0.json"))) == 1


def test_a_weight_that_the_last_micro_batch_does_not_reach_is_updated_as_well():
    layers = build_layers(8, 2)
    before = [weight.detach().clone() for weight in layers.parameters()]
    fused = FusedBackward(torch.optim.SGD(layers.parameters(), lr=0.1), 0)
    fused.start_step(0)
    for number, model in enumerate((layers, layers[:1])):
        loss = model(torch.ones(2, 8)).square().mean()
        with fused.run_micro_batch(loss, is_last=number == 1):
            loss.backward()
    assert fused.num_updated == 4
    assert all(weight.grad is None for weight in layers.parameters())
    assert not any(torch.equal(old, weight) for old, weight in zip(before, layers.parameters(), strict=True))


def test_weights_of_a_step_that_stopped_half_way_are_told_as_such():
    layers = build_layers(8, 40)
    fused = FusedBackward(torch.optim.SGD(layers.parameters(), lr=0.1), 0)
    layers[0].weight.register_hook(lambda gradient: gradient * float("nan"))
    fused.start_step(0)
    loss = layers(torch.ones(2, 8)).square().mean()
    with fused.run_micro_batch(loss, is_last=True):
        loss.backward()
    assert 0 < fused.num_updated < 80 and fused.is_updating
    fused.start_step(0)
    assert not fused.is_updating


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ("--train full --fused_backward_pass", ("--on_oom", "--quantize_base", "--network_dim")),
        ("--train full --fused_backward_pass --torch_compile", ("--on_oom", "--blocks_to_swap")),
        ("--train full", ("--blocks_to_swap", "--quantize_base", "--network_dim")),
        ("--train embedding --token_string x", ("--cache_text_encoder_outputs", "--network_dim")),
    ],
)
def test_what_is_advised_after_out_of_memory_is_not_refused(words, refused):
    advice = " ".join(suggest_oom_fixes(parse_config(words.split()).config, "forward", 4))
    assert not [option for option in refused if option in advice]
    assert ("--fused_backward_pass" in advice) == (words == "--train full")
    assert "--blocks_to_swap" in advice or words != "--train full --fused_backward_pass"


@pytest.mark.parametrize(
    "words", [f"--train full --block_lr {','.join(['1e-5'] * 23)}", "--token_string x --embedding_lr 1e-3"]
)
def test_rates_are_named_as_unused_where_adafactor_sets_its_own(words):
    parsed = parse_config([*words.split(), "--optimizer_type", "Adafactor"])
    assert [str(place) for place, _ in parsed.unused] == [words.split()[-2]]


def test_block_rates_beside_a_rate_of_0_train_the_denoiser_or_are_refused():
    words = f"--train full --train_text_encoder --unet_lr 0 --block_lr {','.join(['1e-5'] * 23)}"
    parsed = parse_config(words.split())
    assert parsed.config.adapter.trains_denoiser
    assert any("contradicts unet_lr" in line for line in format_lines(parsed.problems))
