"""LoRA on text encoders: target layers, learning rates, gradients, several ranks, and the file."""

import pytest
import torch
from family_runs import train
from problem_lines import format_texts
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from text_encoder_runs import build_trainable_case, compute_loss, parse_settings
from training_runs import even_dataset, max_relative_difference  # noqa: F401

from library.adapters import injection
from library.config.schema import RunConfig
from library.config.schema_optim import OptimConfig
from library.config.validate_adapter import validate_adapter_for_model
from library.models.families import FAMILIES
from library.training.param_groups import build_param_groups
from library.training.trainable_modules import build_trainable_modules

BOTH = ("--no-network_train_unet_only", "--network_dim", "3", "--network_alpha", "2")
WITH_TEXT = ["sd1", "sd2", "sdxl", "sd3", "flux"]


def randomize_lora_b(model, size=0.3):
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in injection.iter_adapter_parameters(model):
            if "lora_B" in name:
                weight.copy_(size * torch.randn(weight.shape, generator=generator))


@pytest.mark.parametrize("name", WITH_TEXT)
def test_a_gradient_reaches_every_lora_of_denoiser_and_text_encoders(name):
    """DDP would wait forever for a parameter without gradient."""
    case = build_trainable_case(name, *BOTH)
    randomize_lora_b(case.model)
    compute_loss(case).backward()
    weights = dict(injection.iter_adapter_parameters(case.model))
    assert [name for name, weight in weights.items() if weight.grad is None or not weight.grad.any()] == []
    trained_encoders = [
        component
        for component in case.family.facts.lora.text_encoders
        if component != case.family.facts.text.t5_encoder
    ]
    assert {name.split(".")[0] for name in weights} == {case.family.facts.denoiser_name, *trained_encoders}
    assert {id(weight) for weight in weights.values()} == {
        id(weight)
        for component in case.pipe.components.values()
        if isinstance(component, torch.nn.Module)
        for weight in component.parameters()
        if weight.requires_grad and component is not case.pipe.vae
    } - {
        id(weight)
        for component in (getattr(case.pipe, case.family.facts.text.t5_encoder or "", None),)
        if component is not None
        for weight in component.parameters()
    }


@pytest.mark.quick
def test_the_gradient_of_a_text_encoder_lora_equals_finite_differences():
    case = build_trainable_case("sd1", *BOTH)
    case.model.double()
    randomize_lora_b(case.model)
    compute_loss(case).backward()
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: weight
        for name, weight in injection.iter_adapter_parameters(case.model)
        if name.startswith("text_encoder.")
    }
    directions = {
        name: torch.randn(weight.shape, generator=generator, dtype=weight.dtype) for name, weight in weights.items()
    }
    slope = sum(float((weights[name].grad * direction).sum()) for name, direction in directions.items())
    step, losses = 1e-6, []
    for sign in (1, -1):
        with torch.no_grad():
            for name, direction in directions.items():
                weights[name].add_(sign * step * direction)
            losses.append(float(compute_loss(case)))
            for name, direction in directions.items():
                weights[name].sub_(sign * step * direction)
    assert slope == pytest.approx((losses[0] - losses[1]) / (2 * step), rel=1e-4)
    assert abs(slope) > 1e-8


def test_gradient_checkpointing_does_not_change_gradients():
    gradients = []
    for flags in ((), ("--gradient_checkpointing",)):
        case = build_trainable_case("sd3", *BOTH, *flags)
        assert all(part.is_gradient_checkpointing == bool(flags) for part in case.model.children())
        randomize_lora_b(case.model)
        compute_loss(case).backward()
        gradients.append({name: weight.grad for name, weight in injection.iter_adapter_parameters(case.model)})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=lambda text, name=name: f"{name}: {text}")


def test_network_train_text_encoder_only_trains_no_denoiser():
    case = build_trainable_case("sdxl", "--network_train_text_encoder_only")
    assert {name.split(".")[0] for name, _ in injection.iter_adapter_parameters(case.model)} == {
        "text_encoder",
        "text_encoder_2",
    }
    randomize_lora_b(case.model)
    compute_loss(case).backward()
    assert all(weight.grad is not None for weight in case.model.parameters() if weight.requires_grad)


def test_initial_weights_differ_between_text_encoders_and_do_not_change_those_of_the_denoiser():
    case, denoiser_only = (
        build_trainable_case("sdxl", *BOTH),
        build_trainable_case("sdxl", "--network_dim", "3", "--network_alpha", "2"),
    )
    state = injection.get_adapter_state_dict(case.model)
    name = "layers.0.self_attn.q_proj.lora_A.weight"
    first, second = (
        next(tensor for key, tensor in state.items() if key.startswith(f"{part}.") and key.endswith(name))
        for part in ("text_encoder", "text_encoder_2")
    )
    assert not torch.equal(first.flatten()[:30], second.flatten()[:30])
    assert all(
        torch.equal(tensor, state[key]) for key, tensor in injection.get_adapter_state_dict(denoiser_only.model).items()
    )


def get_learning_rates(case, **options):
    config = RunConfig(optim=OptimConfig(**options))
    return {
        group.name: group.lr
        for group in build_param_groups(case.model, case.adapter, config.adapter, config.optim, case.family.facts)
    }


def test_each_component_has_its_learning_rate():
    case = build_trainable_case("sdxl", *BOTH)
    defaults = {"unet": 1e-4, "text_encoder": 1e-4, "text_encoder_2": 1e-4}
    assert get_learning_rates(case) == defaults
    assert get_learning_rates(case, unet_lr=2e-3) == {**defaults, "unet": 2e-3}
    assert get_learning_rates(case, text_encoder_lr=(5e-5,)) == {
        **defaults,
        "text_encoder": 5e-5,
        "text_encoder_2": 5e-5,
    }
    assert get_learning_rates(case, text_encoder_lr=(5e-5, 6e-5)) == {
        **defaults,
        "text_encoder": 5e-5,
        "text_encoder_2": 6e-5,
    }
    config = RunConfig()
    groups = build_param_groups(case.model, case.adapter, config.adapter, config.optim, case.family.facts)
    assert sum(len(group.parameters) for group in groups) == len(injection.get_adapter_state_dict(case.model))


def test_a_learning_rate_of_0_excludes_a_text_encoder():
    case = build_trainable_case("sdxl", *BOTH, "--text_encoder_lr", "1e-4", "0")
    assert {name.split(".")[0] for name, _ in injection.iter_adapter_parameters(case.model)} == {"unet", "text_encoder"}


def find_adapter_problems(name, *flags):
    config, facts = parse_settings(*flags), FAMILIES.get(name)().facts
    return format_texts(
        validate_adapter_for_model(
            config.adapter,
            config.optim,
            facts.options.network,
            facts.title,
            tuple(facts.lora.text_encoders),
            facts.text.t5_encoder,
        )
    )


def test_three_learning_rates_for_two_text_encoders_are_an_error():
    (problem,) = find_adapter_problems("sdxl", *BOTH, "--text_encoder_lr", "1", "2", "3")
    assert problem == "3 learning rates; give one for all, or one for each of text_encoder, text_encoder_2"


@pytest.fixture(scope="module")
def text_encoder_run(even_dataset, tmp_path_factory):  # noqa: F811
    folder = tmp_path_factory.mktemp("text")
    flags = [
        "--pretrained_model_name_or_path",
        "random:sdxl:tiny",
        "--dataset_config",
        str(even_dataset),
        *BOTH,
        *"--optimizer_type SGD --learning_rate 0.5 --text_encoder_lr 5 --max_train_steps 3".split(),
        "--output_dir",
        str(folder),
    ]
    for ranks, batch in ((1, 4), (2, 2)):
        run_on_ranks(ranks, train, *flags, "--train_batch_size", str(batch), "--output_name", f"on{ranks}")
    return folder


def test_text_encoders_train_equally_on_one_rank_and_two(text_encoder_run):
    one, two = (load_file(text_encoder_run / f"on{ranks}.safetensors") for ranks in (1, 2))
    assert max_relative_difference(one, two) < 1e-4
    assert {key.split("_")[1] for key in one} == {"unet", "te1", "te2"}


def test_diffusers_loads_the_text_encoder_lora_from_the_file(text_encoder_run):
    family = FAMILIES.get("sdxl")()
    pipe, diffusers_pipe = (family.load("random:sdxl:tiny", torch.float32) for _ in range(2))
    diffusers_pipe.load_lora_weights(str(text_encoder_run), weight_name="on1.safetensors")
    with torch.no_grad():
        base_cond = family.encode_prompts(pipe, ["a red circle"])
    model, _ = build_trainable_modules(parse_settings(*BOTH), family, pipe)
    file_tensors = load_file(text_encoder_run / "on1.safetensors")
    state = injection.get_adapter_state_dict(model)
    for key, tensor in state.items():
        if not key.startswith("unet."):
            component, _, rest = key.partition(".")
            module, matrix = rest.split(".lora_")
            module = module if module.startswith("text_model") else f"text_model.{module}"
            prefix = f"{family.facts.lora.text_encoders[component].prefix}_{module.replace('.', '_')}"
            tensor.copy_(file_tensors[f"{prefix}.lora_{'down' if matrix.startswith('A') else 'up'}.weight"])
    with torch.no_grad():
        for name, actual in family.encode_prompts(pipe, ["a red circle"]).items():
            expected = family.encode_prompts(diffusers_pipe, ["a red circle"])[name]
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)
            assert (actual - base_cond[name]).abs().max() > 1e-2, "the LoRA changes the conditioning"


def train_and_record(*flags):
    """Train; return the losses of the steps and of validation, and the components that training loaded."""
    from library.models.base import Family
    from library.parallel.ddp import DDPStrategy

    losses, loads, compute_gradients, load = [], [], DDPStrategy.compute_gradients, Family.load

    def record_loss(self, *arguments):
        losses.append(float(compute_gradients(self, *arguments)))
        return losses[-1]

    def record_load(self, model, dtype, components=None, **others):
        loads.append(components)
        return load(self, model, dtype, components, **others)

    DDPStrategy.compute_gradients, Family.load = record_loss, record_load
    train(*flags)
    return losses, loads


@pytest.mark.parametrize(("name", "t5"), [("flux", "text_encoder_2"), ("sd3", "text_encoder_3")])
def test_caching_t5_while_clip_is_trained_changes_nothing(name, t5, even_dataset, tmp_path):  # noqa: F811
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a red circle --w 64 --h 64 --d 1 --s 2\n")
    flags = (
        f"--pretrained_model_name_or_path random:{name}:tiny --dataset_config {even_dataset} --no-network_train_unet_only "
        f"--train_batch_size 2 --max_train_steps 3 --optimizer_type SGD --learning_rate 0.5 --text_encoder_lr 5 "
        f"--caption_dropout_rate 0.3 --output_dir {tmp_path} --cache_dir {tmp_path / 'cache'} "
        f"--t5xxl_max_token_length 48 --apply_t5_attn_mask --sample_prompts {prompts} --sample_every_n_steps 3"
    ).split()
    cases = {
        "none": (),
        "memory": ("--cache_text_encoder_outputs",),
        "disk": ("--cache_text_encoder_outputs_to_disk",),
        "again": ("--cache_text_encoder_outputs_to_disk", "--text_encoder_batch_size", "3"),
    }
    results = {}
    for case, more in cases.items():
        ((losses, loads),) = run_on_ranks(1, train_and_record, *flags, *more, "--output_name", case)
        assert (t5 in loads[-1]) == (case == "none") and "text_encoder" in loads[-1], "T5 is not kept in memory"
        results[case] = losses, load_file(tmp_path / f"{case}.safetensors"), loads[0]
    assert results["memory"][2] == (t5, t5.replace("text_encoder", "tokenizer")), "only T5 is loaded to fill the cache"
    assert results["again"][2] != results["disk"][2], "the second run finds the outputs on disk"
    for case in ("memory", "disk", "again"):
        assert results[case][0] == pytest.approx(results["none"][0], rel=1e-6)
        assert max_relative_difference(results["none"][1], results[case][1]) < 1e-6
    assert {key.split(".")[0] for key in results["none"][1] if key.startswith("text_encoder")} or any(
        "te1" in key for key in results["none"][1]
    )
    previews = sorted((tmp_path / "sample").glob("*.png"))
    assert len(previews) == len(cases) and len({path.read_bytes() for path in previews}) == 1
