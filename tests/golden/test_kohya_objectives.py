"""The objectives of sd-scripts: each combination of its settings gives its loss and gradient here, or is refused.

``tests/support/kohya_objectives.py`` has them as closed forms, ``tests/data/kohya_objectives.json`` the mean loss and the
norm of the gradient of each.  ``python tests/golden/test_kohya_objectives.py`` writes both that file and
docs/sd_scripts_objectives.md.
"""

import functools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [] if __name__ != "__main__" else [str(ROOT), str(ROOT / "tests" / "support")]

from kohya_objectives import (  # noqa: E402
    LATENTS,
    NOISE,
    OUTPUT,
    SCRIPTS,
    SIGMAS,
    UNET_TIMESTEPS,
    Combination,
    compute_objective,
    list_combinations,
)

from library.diffusion.objective import Objective  # noqa: E402
from library.models.families import FAMILIES  # noqa: E402
from library.training.preflight import find_settings_problems, load_settings  # noqa: E402
from library.training.setup import build_objective  # noqa: E402

PAGE = ROOT / "docs" / "sd_scripts_objectives.md"
GOLDEN = ROOT / "tests" / "data" / "kohya_objectives.json"
DATA = ["--dataset_config", str(ROOT / "dataset_configs" / "demo.toml"), "--resolution", "64"]
COMBINATIONS = list(list_combinations())
SCHEDULE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def build_argv(combination: Combination) -> list[str]:
    script = SCRIPTS[combination.script]
    argv = [*DATA, "--pretrained_model_name_or_path", f"random:{script.model}:tiny", "--network_module", script.module]
    for name, value in {**script.flags, **combination.settings}.items():
        argv += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return argv


@functools.cache
def load(argv: tuple[str, ...]) -> tuple[Any, list[str]]:
    """The settings as a run gets them, and the problems that refuse it."""
    loaded = load_settings(argv)
    return loaded, [str(problem) for problem in find_settings_problems(loaded)]


def build(combination: Combination) -> Objective:
    """Our objective with the command line of an sd-scripts run."""
    loaded, problems = load(tuple(build_argv(combination)))
    assert problems == []
    script, config = SCRIPTS[combination.script], loaded.config
    scheduler = FlowMatchEulerDiscreteScheduler() if script.is_flow else DDIMScheduler(**SCHEDULE)
    pipe = SimpleNamespace(scheduler=scheduler)
    return build_objective(config.noise, config.loss, FAMILIES.get(script.model)(config.model), pipe)


def compute_ours(combination: Combination) -> tuple[torch.Tensor, torch.Tensor]:
    objective = build(combination)
    timesteps = 1000 * SIGMAS if SCRIPTS[combination.script].is_flow else UNET_TIMESTEPS
    noised = objective.add_noise_at(LATENTS.float(), NOISE.float(), timesteps.float())
    output = OUTPUT.float().requires_grad_()
    loss = objective.compute_elementwise_loss(output, noised).mean((1, 2, 3))
    losses = loss * objective.compute_loss_weights(noised.timesteps)
    (gradient,) = torch.autograd.grad(losses.sum(), output)
    return losses.detach(), gradient


def find_reason(combination: Combination) -> str:
    """Why a combination is refused, or nothing."""
    _, problems = load(tuple(build_argv(combination)))
    return "; ".join(problems)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda combination: combination.label)
def test_a_combination_gives_the_loss_and_gradient_of_sd_scripts_or_is_refused(combination):
    golden = json.loads(GOLDEN.read_text("utf-8"))[combination.label]
    if reason := find_reason(combination):
        assert golden is None and reason.startswith(("--huber_schedule: snr", "--zero_terminal_snr: needs a model"))
        return
    losses, gradient = compute_ours(combination)
    expected_losses, expected_gradient = compute_objective(combination)
    torch.testing.assert_close(losses.double(), expected_losses, rtol=1e-5, atol=0)
    for ours, theirs in zip(gradient.double(), expected_gradient, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))
    assert [float(losses.double().mean()), float(gradient.double().norm())] == pytest.approx(golden, rel=1e-6)
