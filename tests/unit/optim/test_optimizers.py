"""Learning-rate schedules equal those of transformers; optimizers are found by name and take their arguments."""

import importlib.util
import re
import sys
from dataclasses import replace

import pytest
import torch
from diffusers.optimization import get_scheduler as diffusers_scheduler
from problem_lines import format_lines
from training_runs import train, write_images
from transformers.optimization import get_scheduler

from library.config.schema_optim import SCHEDULERS_WITH_ARGS, OptimConfig
from library.config.types import StepsOrRatio
from library.errors import UserError
from library.optim.ema import AdapterEMA
from library.optim.learning_rates import get_learning_rates, set_learning_rates
from library.optim.lr_schedulers import PROGRESS_SCHEDULES, SCHEDULER_ARGS, build_lr_schedule
from library.optim.optimizers import (
    OPTIMIZERS,
    ParamGroup,
    build_optimizer,
    describe_optimizer,
    is_same_optimizer,
    use_eval_weights,
)
from library.optim.validate_optimizer import find_learning_rate_warnings, validate_lr_schedule, validate_optimizer

STEPS = 37
OF_TRANSFORMERS = [name for name in PROGRESS_SCHEDULES if name not in ("rex", "adafactor")]


def read_steps(count: int) -> StepsOrRatio:
    return StepsOrRatio(count, False)


def list_rates(config: OptimConfig, count: int = STEPS) -> list[float]:
    """The learning rate of every step of a run."""
    schedule = build_lr_schedule(config, count)
    return [config.learning_rate * schedule(step) for step in range(count)]


def list_reference_rates(config: OptimConfig, warmup: int, **specific) -> list[float]:
    """The learning rates of transformers' schedule over the run."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    specific |= {
        "cosine_with_restarts": {"num_cycles": config.lr_scheduler_num_cycles},
        "cosine_with_min_lr": {"num_cycles": config.lr_scheduler_num_cycles / 2}
        | {"min_lr_rate": config.lr_scheduler_min_lr_ratio},
        "polynomial": {"power": config.lr_scheduler_power},
    }.get(config.lr_scheduler, {})
    scheduler = get_scheduler(config.lr_scheduler, optimizer, warmup, STEPS, scheduler_specific_kwargs=specific)
    return step_scheduler(optimizer, scheduler)


def step_scheduler(optimizer, scheduler) -> list[float]:
    actual = []
    for _ in range(STEPS):
        actual.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return actual


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("name", OF_TRANSFORMERS)
def test_the_learning_rates_are_those_of_transformers(name, warmup):
    warmup = 0 if name == "constant" else warmup
    config = OptimConfig(
        learning_rate=3e-4,
        lr_scheduler=name,
        lr_warmup_steps=read_steps(warmup),
        lr_scheduler_num_cycles=3,
        lr_scheduler_power=2.0,
        lr_scheduler_min_lr_ratio=0.1,
    )

    assert list_rates(config) == pytest.approx(list_reference_rates(config, warmup), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("warmup", "timescale"), [(0, None), (5, None), (5, 12), (0, 12)])
def test_inverse_sqrt_is_that_of_transformers(warmup, timescale):
    config = OptimConfig(
        learning_rate=3e-4,
        lr_scheduler="inverse_sqrt",
        lr_warmup_steps=read_steps(warmup),
        lr_scheduler_timescale=timescale,
    )

    assert list_rates(config) == pytest.approx(list_reference_rates(config, warmup, timescale=timescale), rel=1e-9)


@pytest.mark.parametrize(("warmup", "decay", "lowest"), [(0, 0, None), (5, 8, None), (5, 8, 0.2), (0, 37, 0.1)])
def test_warmup_stable_decay_is_that_of_transformers(warmup, decay, lowest):
    config = OptimConfig(
        learning_rate=3e-4,
        lr_scheduler="warmup_stable_decay",
        lr_warmup_steps=read_steps(warmup),
        lr_decay_steps=read_steps(decay),
        lr_scheduler_min_lr_ratio=lowest,
    )

    expected = list_reference_rates(config, warmup, num_decay_steps=decay, min_lr_ratio=lowest or 0.0)

    assert list_rates(config) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_piecewise_constant_is_that_of_diffusers():
    rules = "1:10,0.1:20,0.01"
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    expected = step_scheduler(optimizer, diffusers_scheduler("piecewise_constant", optimizer, step_rules=rules))
    config = OptimConfig(
        learning_rate=3e-4, lr_scheduler="piecewise_constant", lr_scheduler_args=(f"step_rules={rules}",)
    )

    assert list_rates(config) == pytest.approx(expected, rel=1e-9)


def test_rex_has_its_closed_form():
    actual = list_rates(OptimConfig(learning_rate=1.0, lr_scheduler="rex"))

    left = [1 - step / STEPS for step in range(STEPS)]
    assert actual == pytest.approx([rest / (0.5 + 0.5 * rest) for rest in left])


def test_rex_with_the_arguments_of_musubi_tuner_has_its_rates():
    config = OptimConfig(
        learning_rate=1.0,
        lr_scheduler="rex",
        lr_scheduler_min_lr_ratio=0.01,
        lr_scheduler_args=("rex_alpha=0.1", "rex_beta=0.9"),
    )
    rates = [1.0, 0.989121, 0.975854, 0.959315, 0.938125, 0.91, 0.87087, 0.812703, 0.717143, 0.531053]
    assert list_rates(config, 10) == pytest.approx(rates, abs=1e-6)
    assert build_lr_schedule(config, 10)(10) == 0.01
    warm = list_rates(replace(config, lr_warmup_steps=read_steps(4)), 14)
    assert warm == pytest.approx([0.01, 0.2575, 0.505, 0.7525, *rates], abs=1e-6)


@pytest.mark.parametrize(
    ("scheduler", "arguments", "specific"),
    [
        ("cosine", ("num_cycles=1.5",), {"num_cycles": 1.5}),
        ("polynomial", ("lr_end=1e-5",), {"lr_end": 1e-5, "power": 1.0}),
        ("cosine_with_min_lr", (), {"num_cycles": 1.5}),
        *(
            (
                "warmup_stable_decay",
                (f"warmup_type={up}", f"decay_type='{down}'"),
                {"warmup_type": up, "decay_type": down},
            )
            for up, down in (("cosine", "linear"), ("1-sqrt", "1-sqrt"), ("linear", "cosine"))
        ),
    ],
)
def test_arguments_and_cycles_mean_what_they_mean_to_transformers(scheduler, arguments, specific):
    config = OptimConfig(
        learning_rate=3e-4,
        lr_scheduler=scheduler,
        lr_scheduler_args=arguments,
        lr_warmup_steps=read_steps(5),
        lr_decay_steps=read_steps(9),
        lr_scheduler_num_cycles=3,
        lr_scheduler_min_lr_ratio=0.1,
    )
    if scheduler == "warmup_stable_decay":
        specific = {**specific, "num_cycles": 1.5, "num_decay_steps": 9, "min_lr_ratio": 0.1}
    assert list_rates(config) == pytest.approx(list_reference_rates(config, 5, **specific), rel=1e-9, abs=1e-15)


def test_the_schedulers_with_arguments_are_those_whose_option_has_an_effect():
    assert set(SCHEDULERS_WITH_ARGS) == {"piecewise_constant", *SCHEDULER_ARGS}


@pytest.mark.parametrize("name", ["CosineAnnealingLR", "torch.optim.lr_scheduler.CosineAnnealingLR"])
def test_a_scheduler_class_is_used_with_its_arguments(name):
    config = OptimConfig(learning_rate=3e-4, lr_scheduler_type=name, lr_scheduler_args=("T_max=20", "eta_min=1e-5"))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)

    expected = step_scheduler(optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=1e-5))

    assert list_rates(config) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_scheduler_type": "CosineAnnealing"}, "has no 'CosineAnnealing'"),
        ({"lr_scheduler_type": "nowhere.Scheduler"}, "No module named 'nowhere'"),
        ({"lr_scheduler_type": "ReduceLROnPlateau"}, "missing 1 required positional argument: 'metrics'"),
        ({"lr_scheduler_type": "CosineAnnealingLR"}, "missing 1 required positional argument: 'T_max'"),
        ({"lr_scheduler_type": "StepLR", "lr_scheduler_args": ("step=3",)}, "StepLR does not take step"),
        ({"lr_scheduler": "rex", "lr_scheduler_args": ("alpha=0.1",)}, "rex takes rex_alpha and rex_beta"),
        ({"lr_scheduler": "rex", "lr_scheduler_args": ("rex_alpha=0",)}, "rex_alpha is a number above 0"),
        ({"lr_scheduler": "warmup_stable_decay", "lr_scheduler_args": ("decay_type=sine",)}, "linear, cosine, 1-sqrt"),
        ({"lr_scheduler": "piecewise_constant"}, "takes step_rules=1:10,0.1:20,0.01"),
        (
            {"lr_scheduler": "piecewise_constant", "lr_scheduler_args": ("step_rules=1:20,0.1:10,0.01",)},
            "takes step_rules",
        ),
        ({"lr_scheduler": "piecewise_constant", "lr_scheduler_args": ("rules=1:20,0.1",)}, "takes step_rules"),
    ],
)
def test_a_mistake_in_the_schedule_options_is_reported(settings, message):
    with pytest.raises(UserError, match=r"--lr_scheduler_(type|args): ") as caught:
        build_lr_schedule(OptimConfig(**settings), STEPS)

    assert message in str(caught.value)
    assert str(caught.value).splitlines() == [*format_lines(validate_lr_schedule(OptimConfig(**settings)))]


def test_the_peak_learning_rate_follows_the_warmup():
    actual = list_rates(
        OptimConfig(learning_rate=1.0, lr_scheduler="cosine", lr_warmup_steps=StepsOrRatio(0.25, True)), 40
    )

    assert actual.index(max(actual)) == 10 and actual[10] == 1.0


def test_a_learning_rate_of_zero_has_a_schedule():
    assert list_rates(OptimConfig(learning_rate=0.0, lr_scheduler="polynomial"))[3] == 0.0


def is_installed(name: str) -> bool:
    package = OPTIMIZERS[name].import_path.split(".")[0] if name in OPTIMIZERS else "torch"
    return importlib.util.find_spec(package) is not None


LEARNING_RATES = {
    "AdamW": 0.1,
    "adamw": 0.1,
    "": 0.1,
    "Adam": 0.1,
    "SGD": 0.1,
    "SGDNesterov": 0.02,
    "Muon": 0.05,
    "Adafactor": 0.1,
    "Adam8bit": 0.1,
    "AdamW8bit": 0.1,
    "PagedAdamW": 0.1,
    "PagedAdamW8bit": 0.1,
    "PagedAdamW32bit": 0.1,
    "Lion8bit": 0.02,
    "PagedLion8bit": 0.02,
    "SGDNesterov8bit": 0.02,
    "Lion": 0.02,
    "CAME": 0.02,
    "Prodigy": 1.0,
    "DAdaptAdam": 1.0,
    "DAdaptAdaGrad": 1.0,
    "DAdaptAdan": 1.0,
    "DAdaptLion": 1.0,
    "DAdaptSGD": 1.0,
    "DAdaptation": 1.0,
    "DAdaptAdamPreprint": 1.0,
    "DAdaptAdanIP": 1.0,
    "AdamWScheduleFree": 0.1,
    "RAdamScheduleFree": 0.1,
    "SGDScheduleFree": 0.1,
    "Adagrad": 0.5,
    "torch.optim.Adamax": 0.1,
    "torch.optim:RAdam": 0.1,
}
"""A learning rate for each optimizer that minimizes the quadratic."""


def test_every_optimizer_of_the_registry_is_tested():
    assert set(OPTIMIZERS) <= set(LEARNING_RATES)


@pytest.mark.parametrize("name", LEARNING_RATES)
def test_every_optimizer_minimizes_a_quadratic(name):
    if not is_installed(name):
        pytest.skip(f"{OPTIMIZERS[name].pip_package} is not installed")
    weight = torch.nn.Parameter(torch.tensor([[3.0, -2.0], [1.0, 2.5]]))
    arguments = ("relative_step=False", "scale_parameter=False") if name == "Adafactor" else ()
    config = OptimConfig(optimizer_type=name, learning_rate=LEARNING_RATES[name], optimizer_args=arguments)
    optimizer = build_optimizer(config, [ParamGroup("unet", [weight], LEARNING_RATES[name])])
    start = float((weight.detach() ** 2).sum())

    if hasattr(optimizer, "train"):
        optimizer.train()
    for _ in range(300):
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()

    with use_eval_weights(optimizer):
        assert float((weight.detach() ** 2).sum()) < 0.1 * start


@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "SGDNesterov", "Adagrad"])
def test_fused_optimizers_are_used_where_torch_has_them_and_give_the_same_weights(name):
    ends, descriptions = [], []
    for words in ((), ("fused=False", "foreach=False")):
        draw = torch.Generator().manual_seed(5)
        weights = [torch.nn.Parameter(torch.randn(3, size, generator=draw)) for size in (1, 40)]
        config = OptimConfig(optimizer_type=name, optimizer_args=("weight_decay=0.01", *words), learning_rate=0.05)
        optimizer = build_optimizer(config, [ParamGroup("all", weights, 0.05)])
        for _ in range(25):
            for item in weights:
                item.grad = torch.randn(item.shape, generator=draw) + item.detach()
            optimizer.step()
        ends.append(torch.cat([item.detach().flatten() for item in weights]))
        descriptions.append(describe_optimizer(optimizer))
    torch.testing.assert_close(*ends, rtol=1e-5, atol=1e-6)
    assert descriptions[0].endswith(" (fused)") and descriptions[1].endswith(" (for-loop)")
    assert describe_optimizer(
        build_optimizer(OptimConfig(optimizer_type="NAdam"), [ParamGroup("all", weights, 0.1)])
    ).endswith(" (foreach if supported)")


def test_optimizer_args_reach_the_optimizer():
    config = OptimConfig(optimizer_args=("weight_decay=0.25", "betas=0.8,0.9", "amsgrad=True"))
    optimizer = build_optimizer(config, [ParamGroup("unet", [torch.nn.Parameter(torch.zeros(1))], 0.5)])

    assert optimizer.defaults["weight_decay"] == 0.25
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert optimizer.defaults["amsgrad"] is True
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_prodigy_accepts_the_usual_arguments_of_sd_scripts():
    words = ("decouple=False", "use_bias_correction=True", "d_coef=2.0", "safeguard_warmup=True", "betas=0.9,0.99")
    config = OptimConfig(optimizer_type="prodigy", learning_rate=1.0, optimizer_args=words)
    group = build_optimizer(config, [ParamGroup("unet", [torch.nn.Parameter(torch.zeros(2))], 1.0)]).param_groups[0]

    assert group["weight_decouple"] is False and group["bias_correction"] is True and group["d_coef"] == 2.0


def test_a_schedule_that_is_too_short_for_the_run_is_reported_before_the_model_is_loaded(tmp_path, monkeypatch):
    def load(*_, **__):
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("library.training.run.load_training_pipeline", load)
    data = write_images(tmp_path, {(64, 64): 2})
    with pytest.raises(UserError, match="Tried to step 4 times"):
        train(
            "--dataset_config",
            str(data),
            "--max_train_steps",
            "4",
            "--output_dir",
            str(tmp_path / "out"),
            *"--lr_scheduler_type OneCycleLR --lr_scheduler_args total_steps=3 max_lr=1e-3".split(),
        )


def test_adafactor_sets_its_learning_rate_unless_relative_step_is_false():
    own = OptimConfig(optimizer_type="Adafactor", learning_rate=0.5)
    ours = OptimConfig(optimizer_type="Adafactor", learning_rate=0.5, optimizer_args=("relative_step=False",))
    groups = [ParamGroup("unet", [torch.nn.Parameter(torch.ones(2, 2))], 0.25)]

    finding, fixed_rate = build_optimizer(own, groups), build_optimizer(ours, groups)
    set_learning_rates(finding, [0.25], 0.5)
    set_learning_rates(fixed_rate, [0.25], 0.5)

    assert finding.param_groups[0]["lr"] is None and get_learning_rates(finding, ["unet"]) == {}
    assert get_learning_rates(fixed_rate, ["unet"]) == {"unet": 0.125}


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("Adamw8", (), "no optimizer 'Adamw8'; did you mean Adam"),
        ("Prodigyy", (), "no optimizer 'Prodigyy'; did you mean Prodigy"),
        ("Nonsense", (), "known are AdamW, "),
        ("nowhere.Optimizer", (), "No module named 'nowhere'"),
        ("torch.optim.Nothing", (), "module torch.optim has no 'Nothing'"),
        ("torch.nn.Linear", (), "is not a torch.optim.Optimizer"),
        ("AdamW", ("weight_decay",), "'weight_decay' is not name=value"),
        ("AdamW", ("weight_decay=much",), "'much' is not a Python literal"),
        ("AdamW", ("wight_decay=0.1",), "AdamW does not take 'wight_decay'"),
        ("Prodigy", ("wight_decay=0.1",), "Prodigy does not take 'wight_decay'"),  # its class would swallow it
        ("AdamW", ("lr=0.1",), "does not take 'lr', which is --learning_rate"),
        ("AdamW", ("weight_decay=-1",), "Invalid weight_decay value: -1"),
    ],
)
def test_a_mistake_in_the_optimizer_options_is_reported(name, arguments, message):
    (problem,) = format_lines(validate_optimizer(OptimConfig(optimizer_type=name, optimizer_args=arguments)))

    assert re.match(r"--optimizer_(type|args): ", problem) and message in problem


def test_a_missing_package_is_reported_with_its_pip_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)

    (problem,) = format_lines(validate_optimizer(OptimConfig(optimizer_type="AdamW8bit")))

    assert re.search(r"AdamW8bit: .*bitsandbytes.*; pip install bitsandbytes", problem)


def test_a_learning_rate_below_1_for_lr_free_optimizers_is_warned_about():
    groups = [ParamGroup("unet", [], 1e-4), ParamGroup("text", [], 1e-5)]

    assert len(find_learning_rate_warnings(OptimConfig(optimizer_type="Prodigy"), groups)) == 2
    assert find_learning_rate_warnings(OptimConfig(optimizer_type="AdamW"), groups) == []
    assert find_learning_rate_warnings(OptimConfig(optimizer_type="Prodigy"), [ParamGroup("unet", [], 1.0)]) == []


def test_the_learning_rate_is_set_in_every_group_even_as_a_tensor():
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [first], "lr": torch.tensor(1.0)}, {"params": [second]}], lr=1.0)
    lr_tensor = optimizer.param_groups[0]["lr"]

    set_learning_rates(optimizer, [0.5, 2.0], 0.25)

    assert optimizer.param_groups[0]["lr"] is lr_tensor and lr_tensor == 0.125
    assert optimizer.param_groups[1]["lr"] == 0.5


def test_schedule_free_weights_are_the_averaged_ones_only_in_eval_mode():
    weight = torch.nn.Parameter(torch.tensor([3.0]))
    optimizer = build_optimizer(OptimConfig(optimizer_type="SGDScheduleFree"), [ParamGroup("unet", [weight], 0.1)])
    optimizer.train()
    for _ in range(5):
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()
    trained = weight.item()

    with use_eval_weights(optimizer):
        used = weight.item()

    assert used != trained and weight.item() == pytest.approx(trained, rel=1e-6)


def test_the_ema_has_its_closed_form():
    weight = torch.nn.Parameter(torch.tensor([1.0, -1.0], dtype=torch.bfloat16))
    average = AdapterEMA([weight], decay=0.5)
    expected = weight.detach().float()
    for step in range(1, 30):
        with torch.no_grad():
            weight.copy_(torch.tensor([float(step), -2.0 * step]))
        average.update(step)
        decay = min(0.5, step / (step + 9))
        expected = decay * expected + (1 - decay) * weight.detach().float()

    assert torch.allclose(average.shadow_params[0], expected, rtol=1e-6)
    before = weight.detach().clone()
    with average.swap_parameters():
        assert torch.equal(weight.detach(), expected.to(torch.bfloat16))
    assert torch.equal(weight.detach(), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_and_their_ema_change_places_to_the_bit(dtype):
    weight = torch.nn.Parameter(torch.randn(7).to(dtype))
    average = AdapterEMA([weight], decay=0.9)
    average.shadow_params[0].normal_()
    trained, averaged = weight.detach().clone(), average.shadow_params[0].clone()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), average.swap_parameters():
            assert torch.equal(weight.detach(), averaged.to(dtype))
            if dtype == torch.float32:  # no third copy
                assert torch.equal(average.shadow_params[0], trained)
            raise ZeroDivisionError
        assert torch.equal(weight.detach(), trained) and torch.equal(average.shadow_params[0], averaged)


@pytest.mark.parametrize(
    ("other", "is_same"),
    [("adamw", True), ("torch.optim.AdamW", True), ("", True), ("AdamW8bit", False), ("torch.optim:AdamW", True)],
)
def test_other_names_of_an_optimizer_are_the_same(other, is_same):
    assert is_same_optimizer("AdamW", other) is is_same
    assert not is_same_optimizer("SGD", "SGDNesterov")
