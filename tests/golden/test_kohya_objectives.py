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

from library.models.families import FAMILIES, FAMILY_FACTS  # noqa: E402
from library.training.preflight import find_settings_problems, load_settings  # noqa: E402

PAGE = ROOT / "docs" / "sd_scripts_objectives.md"
GOLDEN = ROOT / "tests" / "data" / "kohya_objectives.json"
DATA = ["--dataset_config", str(ROOT / "dataset_configs" / "demo.toml"), "--resolution", "64"]
COMBINATIONS = list(list_combinations())
KOHYA = ("--objective_defaults", "kohya")
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


def build(combination: Combination) -> Any:
    """Our objective with the command line of an sd-scripts run; the page is written without these imports."""
    from diffusers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

    from library.training.setup import build_objective

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


def list_cases() -> list[Any]:
    """Every eighth combination is tried quickly."""
    return [
        pytest.param(each, id=each.label, marks=[pytest.mark.slow] if number % 8 else [])
        for number, each in enumerate(COMBINATIONS)
    ]


@pytest.mark.parametrize("combination", list_cases())
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


def build_defaults(model: str, *flags: str) -> Any:
    return load((*DATA, "--pretrained_model_name_or_path", f"random:{model}:tiny", *flags))[0]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), "own"),
        (("--network_module", "lycoris.kohya", "--network_args", "algo=loha"), "own"),
        (("--network_module", "networks.lora_flux"), "kohya"),
        (("--network_module", "networks.loha", "--sdpa"), "kohya"),
        (("--network_module", "networks.lora_flux", "--objective_defaults", "own"), "own"),
        (("--objective_defaults", "kohya"), "kohya"),
        (("--sdpa", "--fp8_base", "--save_model_as", "safetensors"), "own"),
    ],
)
def test_the_defaults_are_those_of_sd_scripts_where_the_settings_are(flags, expected):
    loaded = build_defaults("flux", *flags)
    noise, guidance = loaded.config.noise, loaded.config.model.guidance_scale
    found = (noise.objective_defaults, noise.timestep_sampling, noise.model_prediction_type, guidance)
    theirs = ("kohya", "sigma", "sigma_scaled", 3.5)
    assert found == (theirs if expected == "kohya" else ("own", None, "raw", 1.0))
    assert (len(loaded.kohya_objective) > 0) is (expected == "kohya")


def test_a_key_of_sd_scripts_in_a_run_file_says_where_it_comes_from(tmp_path):
    (tmp_path / "run.toml").write_text("sdpa = true\n")
    loaded = build_defaults("flux", "--config_file", str(tmp_path / "run.toml"))
    assert loaded.config.noise.objective_defaults == "kohya"


def test_what_sd_scripts_ignores_what_it_means_otherwise_is_said():
    flux = "--network_module networks.lora_flux --model_prediction_type raw --min_timestep 100 --logit_mean 0.5"
    loaded = build_defaults("flux", *flux.split(), "--weighting_scheme", "logit_normal")
    assert {str(place): reason for place, reason in loaded.unused} == {
        "--min_timestep": "sd-scripts ignores it for this model"
    }
    assert (loaded.config.noise.min_timestep, loaded.config.noise.logit_mean) == (None, 0.5)
    assert loaded.notices == ["--logit_mean: above 0 means less noise, as in sd-scripts' script for this model"]
    loaded = build_defaults("lumina2", "--network_module", "networks.lora_lumina", "--weighting_scheme", "cosmap")
    assert [reason for _, reason in loaded.unused] == [
        "sd-scripts weights the loss with model_prediction_type sigma_scaled only"
    ]
    loaded = build_defaults("sd3", "--network_module", "networks.lora_sd3", "--ip_noise_gamma", "0.1")
    assert loaded.config.noise.ip_noise_gamma == 0 and len(loaded.unused) == 1
    snr = "--network_module networks.lora --loss_type huber --huber_scale 0.5"
    loaded = build_defaults("sd1", *snr.split())
    assert [reason for _, reason in loaded.unused] == ["sd-scripts ignores it with huber_schedule snr"]


def test_the_objective_of_sd_scripts_needs_a_script_for_the_model():
    _, problems = load((*DATA, "--pretrained_model_name_or_path", "random:z_image:tiny", *KOHYA))
    assert problems == ["--objective_defaults: sd-scripts has no training script for Z-Image; use own"]


DENSITIES = [
    # sigma of the n-th of 1000 numbers, by each script's timestep sampling: u runs from little to much noise
    ("FLUX.1", {}, lambda u: shift(u, 3)),
    ("HunyuanImage", {}, lambda u: shift(u, 5)),
    ("Lumina", {}, lambda u: shift(torch.sigmoid(torch.special.ndtri(u)), 6)),
    ("Anima", {}, lambda u: torch.sigmoid(torch.special.ndtri(u))),
    ("SD3", {}, lambda u: u),
    (
        "SD3",
        {"training_shift": 3.0, "weighting_scheme": "logit_normal", "logit_mean": 0.5},
        lambda u: shift(normal(u), 3),
    ),
    # sd-scripts takes the highest noise level first, so that sigma falls where the density's number rises
    ("FLUX.1", {"weighting_scheme": "logit_normal", "logit_mean": 0.5}, lambda u: shift(1 - normal(1 - u), 3)),
]


def shift(sigmas: torch.Tensor, factor: float) -> torch.Tensor:
    return factor * sigmas / (1 + (factor - 1) * sigmas)


def normal(u: torch.Tensor) -> torch.Tensor:
    return torch.sigmoid(0.5 + torch.special.ndtri(u))


@pytest.mark.parametrize(("script", "settings", "expected"), DENSITIES)
def test_noise_levels_are_distributed_as_in_sd_scripts(script, settings, expected):
    """Up to one of its 1000 levels: it rounds to them, down for SD3 and up for the others."""
    u = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    sigmas = build(Combination(script, settings)).compute_timesteps(u, torch.Size((1, 16, 64, 64))) / 1000
    assert (sigmas - expected(u)).abs().max() < 1.001e-3 * 5


def format_page() -> str:
    """docs/sd_scripts_objectives.md."""
    golden = json.loads(GOLDEN.read_text("utf-8"))
    rows, refused = [], 0
    for combination in COMBINATIONS:
        loaded, problems = load(tuple(build_argv(combination)))
        refused += bool(problems)
        words = [f"`{name}`" if value is True else f"`{name}` {value}" for name, value in combination.settings.items()]
        loss = "refused" if problems else f"{golden[combination.label][0]:.6g}"
        note = "; ".join(problem.removeprefix("--") for problem in problems) or "; ".join(
            [*(f"{place}: {reason}".removeprefix("--") for place, reason in loaded.unused), *loaded.notices]
        )
        rows.append(f"| {combination.script} | {', '.join(words) or 'defaults'} | {loss} | {note} |")
    count = f"Of {len(rows)} combinations {len(rows) - refused} agree and {refused} are refused."
    return "\n".join([*HEAD, *list_defaults(), "", *TABLE[:1], "", count, "", *TABLE[1:], *rows, ""])


def list_defaults() -> list[str]:
    """The rows of the defaults of each model."""
    rows = {}
    for script in SCRIPTS.values():
        facts = FAMILY_FACTS[script.model]
        values = facts.options.kohya_objective.defaults
        words = [
            f"`{name}` {value:g}" if isinstance(value, float) else f"`{name}` {value or 'none'}"
            for name, value in values.items()
        ]
        rows[facts.title] = f"| {facts.title} | {', '.join(words) or 'those of this program'} |"
    return list(rows.values())


HEAD = [
    "# The objectives of sd-scripts",
    "",
    "Generated by `python tests/golden/test_kohya_objectives.py`, which is also the test of this table.",
    "",
    "Where settings come from sd-scripts, `objective_defaults` is `kohya`: options of noise, timesteps and loss that are"
    " not set have the defaults of its script for the model, options that this script ignores are named and have no"
    " effect, and values that mean something else there do so here, with a notice. A run logs which defaults it has,"
    " and its files record them (`ss_objective_defaults`). `objective_defaults own` takes the defaults of this program"
    " instead ([models.md](models.md)), and honors every option.",
    "",
    "Settings come from sd-scripts if they have an option that only sd-scripts or its GUIs have, or `network_module`"
    " other than `networks.loha`, `networks.lokr`, `networks.oft` and `lycoris.kohya`, which choose the adapter type here"
    " as well; such options count in run files, and as flags beside `network_module`, without which `--fp8_base` or"
    " `--sdpa` does not change the objective. `v_parameterization` is the exception: without it the model's own prediction type is trained.",
    "",
    "| model | defaults of `objective_defaults kohya` |",
    "|---|---|",
]
TABLE = [
    "Each row was computed twice: by the program, with the command line of sd-scripts, and from a closed form in float64"
    " (`tests/support/kohya_objectives.py`). Losses and gradients agree within 1e-5. The loss is the mean of six samples"
    " at six noise levels.",
    "| model | settings | loss | what the run says |",
    "|---|---|---|---|",
]


def format_goldens() -> str:
    """tests/data/kohya_objectives.json: mean loss and norm of the gradient of the closed forms; null: refused."""
    lines = []
    for combination in COMBINATIONS:
        values = None
        if not find_reason(combination):
            losses, gradient = compute_objective(combination)
            values = [float(f"{float(number):.9g}") for number in (losses.mean(), gradient.norm())]
        lines.append(f"  {json.dumps(combination.label)}: {json.dumps(values)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


@pytest.mark.slow
def test_the_page_of_objectives_is_up_to_date():
    assert PAGE.read_text("utf-8") == format_page(), "run: python tests/golden/test_kohya_objectives.py"


if __name__ == "__main__":
    GOLDEN.write_text(format_goldens(), "utf-8")
    PAGE.write_text(format_page(), "utf-8")
