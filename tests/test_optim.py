"""Learning rates equal transformers' schedules, optimizers are found by name and step as they should."""

import pytest
import torch
from transformers.optimization import get_scheduler

from library.config.schema import OptimConfig
from library.config.values import Share
from library.errors import ConfigError
from library.optim.optimizers import make_optimizer, set_learning_rate
from library.optim.schedules import SCHEDULES, learning_rate

STEPS = 37


def reference(config: OptimConfig, warmup: int) -> list[float]:
    """What transformers gives an optimizer over the run."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=config.learning_rate)
    specific = {
        "cosine_with_restarts": {"num_cycles": config.lr_scheduler_num_cycles},
        "polynomial": {"power": config.lr_scheduler_power},
    }.get(config.lr_scheduler)
    scheduler = get_scheduler(config.lr_scheduler, optimizer, warmup, STEPS, scheduler_specific_kwargs=specific)
    rates = []
    for _ in range(STEPS):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


@pytest.mark.parametrize("warmup", [0, 5])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_learning_rate_is_that_of_transformers(name, warmup):
    warmup = 0 if name == "constant" else warmup
    config = OptimConfig(learning_rate=3e-4, lr_scheduler=name, lr_warmup_steps=Share(warmup, False),
                         lr_scheduler_num_cycles=3, lr_scheduler_power=2.0)  # fmt: skip

    ours = [learning_rate(config, step, STEPS) for step in range(STEPS)]

    assert ours == pytest.approx(reference(config, warmup), rel=1e-9, abs=1e-15)


def test_the_peak_comes_right_after_the_warm_up():
    config = OptimConfig(learning_rate=1.0, lr_scheduler="cosine", lr_warmup_steps=Share(0.25, True))
    rates = [learning_rate(config, step, 40) for step in range(40)]

    assert rates.index(max(rates)) == 10 and rates[10] == 1.0


def test_a_learning_rate_of_zero_has_a_schedule():
    assert learning_rate(OptimConfig(learning_rate=0.0, lr_scheduler="polynomial"), 3, 10) == 0.0


@pytest.mark.parametrize("name", ["", "AdamW", "adamw", "SGD", "torch.optim.Adamax", "torch.optim:RAdam"])
def test_an_optimizer_walks_down_a_quadratic(name):
    weight = torch.nn.Parameter(torch.tensor([3.0, -2.0]))
    optimizer = make_optimizer(OptimConfig(optimizer_type=name, learning_rate=0.1), [weight])

    for _ in range(200):
        optimizer.zero_grad()
        (weight**2).sum().backward()
        optimizer.step()

    assert weight.abs().max() < 0.1


def test_optimizer_args_reach_the_optimizer():
    config = OptimConfig(optimizer_args=("weight_decay=0.25", "betas=0.8,0.9", "amsgrad=True"))
    optimizer = make_optimizer(config, [torch.nn.Parameter(torch.zeros(1))])

    assert optimizer.defaults["weight_decay"] == 0.25
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert optimizer.defaults["amsgrad"] is True


@pytest.mark.parametrize(("name", "arguments", "message"), [
    ("Adamw8", (), "no optimizer 'Adamw8'; did you mean AdamW"),
    ("AdamW8bit", (), "where its package is installed, write bitsandbytes.optim.AdamW8bit"),
    ("Prodigyy", (), "no optimizer 'Prodigyy'; known are AdamW, SGD and any package.module.Class"),
    ("nowhere.Optimizer", (), "No module named 'nowhere'"),
    ("torch.optim.Nothing", (), "module torch.optim has no 'Nothing'"),
    ("torch.nn.Linear", (), "is no optimizer"),
    ("AdamW", ("weight_decay",), "'weight_decay' is not name=value"),
    ("AdamW", ("weight_decay=much",), "'much' is no number"),
    ("AdamW", ("wight_decay=0.1",), "does not take them: got an unexpected keyword argument 'wight_decay'"),
    ("AdamW", ("lr=0.1",), "does not take them"),
    ("AdamW", ("weight_decay=-1",), "Invalid weight_decay value: -1"),
])  # fmt: skip
def test_a_mistake_in_the_optimizer_is_named(name, arguments, message):
    with pytest.raises(ConfigError, match=r"--optimizer_(type|args): ") as caught:
        make_optimizer(OptimConfig(optimizer_type=name, optimizer_args=arguments), [torch.nn.Parameter(torch.zeros(1))])

    assert message in str(caught.value)


def test_the_rate_reaches_every_group_also_where_it_is_a_tensor():
    first, second = torch.nn.Parameter(torch.zeros(1)), torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([{"params": [first], "lr": torch.tensor(1.0)}, {"params": [second]}], lr=1.0)
    kept = optimizer.param_groups[0]["lr"]

    set_learning_rate(optimizer, 0.125)

    assert optimizer.param_groups[0]["lr"] is kept and kept == 0.125
    assert optimizer.param_groups[1]["lr"] == 0.125
