"""Training text encoders: which layers, at which rate, by which gradient, on how many ranks, and into which file."""

import pytest
import torch
from family_runs import train
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from text_encoder_runs import build_trainable_case, compute_loss, parse_settings
from training_runs import even_dataset, max_relative_difference  # noqa: F401

from library.adapters import lora
from library.config.schema import OptimConfig, RunConfig
from library.config.validate_adapter import validate_adapter_for_model
from library.models.families import FAMILIES
from library.training.trainable import build_param_groups, build_trainable_modules

BOTH = ("--no-network_train_unet_only", "--network_dim", "3", "--network_alpha", "2")
WITH_TEXT = ["sd1", "sd2", "sdxl", "sd3", "flux"]


def stir(model, size=0.3):
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in lora.iter_adapter_parameters(model):
            if "lora_B" in name:
                weight.copy_(size * torch.randn(weight.shape, generator=draw))


@pytest.mark.parametrize("name", WITH_TEXT)
def test_a_gradient_reaches_every_lora_of_denoiser_and_text_encoders(name):
    """DDP waits for ever for one that none reaches."""
    case = build_trainable_case(name, *BOTH)
    stir(case.model)
    compute_loss(case).backward()
    weights = dict(lora.iter_adapter_parameters(case.model))
    assert [each for each, weight in weights.items() if weight.grad is None or not weight.grad.any()] == []
    wanted = [part for part in case.family.facts.text_encoders if part != case.family.facts.t5_encoder]
    assert {each.split(".")[0] for each in weights} == {case.family.denoiser_name, *wanted}
    assert {id(weight) for weight in weights.values()} == {
        id(weight)
        for part in case.pipe.components.values()
        if isinstance(part, torch.nn.Module)
        for weight in part.parameters()
        if weight.requires_grad and part is not case.pipe.vae
    } - {
        id(weight)
        for part in (getattr(case.pipe, case.family.facts.t5_encoder or "", None),)
        if part is not None
        for weight in part.parameters()
    }


@pytest.mark.quick
def test_the_gradient_of_a_text_encoders_lora_is_the_slope_of_the_loss():
    case = build_trainable_case("sd1", *BOTH)
    case.model.double()
    stir(case.model)
    compute_loss(case).backward()
    draw = torch.Generator().manual_seed(1)
    own = {
        name: weight for name, weight in lora.iter_adapter_parameters(case.model) if name.startswith("text_encoder.")
    }
    ways = {name: torch.randn(weight.shape, generator=draw, dtype=weight.dtype) for name, weight in own.items()}
    slope = sum(float((own[name].grad * way).sum()) for name, way in ways.items())
    step, found = 1e-6, []
    for sign in (1, -1):
        with torch.no_grad():
            for name, way in ways.items():
                own[name].add_(sign * step * way)
            found.append(float(compute_loss(case)))
            for name, way in ways.items():
                own[name].sub_(sign * step * way)
    assert slope == pytest.approx((found[0] - found[1]) / (2 * step), rel=1e-4)
    assert abs(slope) > 1e-8


def test_checkpointing_changes_no_gradient():
    gradients = []
    for flags in ((), ("--gradient_checkpointing",)):
        case = build_trainable_case("sd3", *BOTH, *flags)
        assert all(part.is_gradient_checkpointing == bool(flags) for part in case.model.children())
        stir(case.model)
        compute_loss(case).backward()
        gradients.append({name: weight.grad for name, weight in lora.iter_adapter_parameters(case.model)})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def test_only_the_text_encoders_learn_when_that_is_asked():
    case = build_trainable_case("sdxl", "--network_train_text_encoder_only")
    assert {name.split(".")[0] for name, _ in lora.iter_adapter_parameters(case.model)} == {
        "text_encoder",
        "text_encoder_2",
    }
    stir(case.model)
    compute_loss(case).backward()
    assert all(weight.grad is not None for weight in case.model.parameters() if weight.requires_grad)


def test_two_text_encoders_do_not_start_alike_and_the_denoiser_starts_as_alone():
    case, alone = (
        build_trainable_case("sdxl", *BOTH),
        build_trainable_case("sdxl", "--network_dim", "3", "--network_alpha", "2"),
    )
    state = lora.get_adapter_state_dict(case.model)
    name = "layers.0.self_attn.q_proj.lora_A.weight"
    one, two = (
        next(each for key, each in state.items() if key.startswith(f"{part}.") and key.endswith(name))
        for part in ("text_encoder", "text_encoder_2")
    )
    assert not torch.equal(one.flatten()[:30], two.flatten()[:30])
    assert all(torch.equal(each, state[key]) for key, each in lora.get_adapter_state_dict(alone.model).items())


def rates(case, **options):
    config = RunConfig(optim=OptimConfig(**options))
    return {
        group.name: group.lr
        for group in build_param_groups(case.model, case.adapter, config.adapter, config.optim, case.family.facts)
    }


def test_each_part_has_its_rate():
    case = build_trainable_case("sdxl", *BOTH)
    same = {"unet": 1e-4, "text_encoder": 1e-4, "text_encoder_2": 1e-4}
    assert rates(case) == same
    assert rates(case, unet_lr=2e-3) == {**same, "unet": 2e-3}
    assert rates(case, text_encoder_lr=(5e-5,)) == {**same, "text_encoder": 5e-5, "text_encoder_2": 5e-5}
    assert rates(case, text_encoder_lr=(5e-5, 6e-5)) == {**same, "text_encoder": 5e-5, "text_encoder_2": 6e-5}
    config = RunConfig()
    groups = build_param_groups(case.model, case.adapter, config.adapter, config.optim, case.family.facts)
    assert sum(len(group.parameters) for group in groups) == len(lora.get_adapter_state_dict(case.model))


def test_a_rate_of_0_leaves_an_encoder_out():
    case = build_trainable_case("sdxl", *BOTH, "--text_encoder_lr", "1e-4", "0")
    assert {name.split(".")[0] for name, _ in lora.iter_adapter_parameters(case.model)} == {"unet", "text_encoder"}


def find_adapter_problems(name, *flags):
    config, facts = parse_settings(*flags), FAMILIES.get(name)().facts
    problems = validate_adapter_for_model(
        config.adapter, config.optim, facts.name, facts.title, facts.text_encoders, facts.t5_encoder
    )
    return [problem for _, problem in problems]


def test_three_rates_for_two_encoders_are_an_error():
    (problem,) = find_adapter_problems("sdxl", *BOTH, "--text_encoder_lr", "1", "2", "3")
    assert problem == "3 learning rates; give one for all, or one for each of text_encoder, text_encoder_2"
    (problem,) = find_adapter_problems("z_image", *BOTH)
    assert problem == "the text encoders of Z-Image cannot be trained; remove this option"


@pytest.fixture(scope="module")
def run_with_text(even_dataset, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("text")
    flags = [
        "--pretrained_model_name_or_path",
        "random:sdxl:tiny",
        "--dataset_config",
        str(even_dataset),
        *BOTH,
        "--optimizer_type",
        "SGD",
        "--learning_rate",
        "0.5",
        "--text_encoder_lr",
        "5",
        "--max_train_steps",
        "3",
        "--output_dir",
        str(folder),
    ]
    for ranks, batch in ((1, 4), (2, 2)):
        run_on_ranks(ranks, train, *flags, "--train_batch_size", str(batch), "--output_name", f"on{ranks}")
    return folder


def test_text_encoders_train_alike_on_one_rank_and_two(run_with_text):
    one, two = (load_file(run_with_text / f"on{ranks}.safetensors") for ranks in (1, 2))
    assert max_relative_difference(one, two) < 1e-4
    assert {key.split("_")[1] for key in one} == {"unet", "te1", "te2"}


def test_diffusers_reads_the_text_encoders_from_the_file(run_with_text):
    family = FAMILIES.get("sdxl")()
    plain, theirs = (family.load("random:sdxl:tiny", torch.float32) for _ in range(2))
    theirs.load_lora_weights(str(run_with_text), weight_name="on1.safetensors")
    with torch.no_grad():
        before = family.encode_prompts(plain, ["a red circle"])
    model, _ = build_trainable_modules(parse_settings(*BOTH), family, plain)
    written = load_file(run_with_text / "on1.safetensors")
    state = lora.get_adapter_state_dict(model)
    for key, tensor in state.items():
        if not key.startswith("unet."):
            part, _, rest = key.partition(".")
            module, half = rest.split(".lora_")
            module = module if module.startswith("text_model") else f"text_model.{module}"
            start = f"{family.text_lora_prefixes[part]}_{module.replace('.', '_')}"
            tensor.copy_(written[f"{start}.lora_{'down' if half.startswith('A') else 'up'}.weight"])
    with torch.no_grad():
        for name, value in family.encode_prompts(plain, ["a red circle"]).items():
            other = family.encode_prompts(theirs, ["a red circle"])[name]
            torch.testing.assert_close(value, other, rtol=1e-4, atol=1e-5)
            assert (value - before[name]).abs().max() > 1e-2, "they have learnt something"
