"""Conflicting options of noise, timesteps and loss are rejected by name before a model is loaded."""

import subprocess
import sys
from pathlib import Path

import pytest
from problem_lines import format_lines

from library.config import parse_config
from library.config.option_needs import Need, Trait
from library.config.options import iter_options
from library.config.schema import RunConfig
from library.config.validate_objective import find_active_options, validate_objective_for_model

ROOT = Path(__file__).resolve().parents[3]
DATA = ["--dataset_config", str(ROOT / "pyproject.toml")]


def list_options_for(trait: Trait) -> list[str]:
    """The options of noise, timesteps and loss that need a kind of model, as their facts say."""

    def names_trait(need: Need) -> bool:
        return getattr(need, "trait", None) is trait or any(map(names_trait, getattr(need, "needs", ())))

    options = [option for option in iter_options(RunConfig) if option.group in ("noise", "loss")]
    return [option.name for option in options if any(map(names_trait, option.needs))]


def list_problems(*flags):
    return format_lines(parse_config([*DATA, *flags]).problems)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--loss_type huber --huber_c 0", "--huber_c: must be above 0, got 0"),
        ("--loss_type huber --huber_scale 0", "--huber_scale: must be above 0, got 0"),
        ("--discrete_flow_shift 0", "--discrete_flow_shift: must be above 0, got 0"),
        ("--training_shift -1", "--training_shift: must be above 0, got -1"),
        ("--min_timestep 500 --max_timestep 500", "--min_timestep: min_timestep 500 is not below max_timestep 500"),
        ("--max_timestep 0", "--max_timestep: must be at least 1, got 0"),
        ("--mode_scale 1.8 --weighting_scheme mode", "--mode_scale: must be at most 1.75, got 1.8"),
        (
            "--timestep_sampling hidream_shift",
            "--timestep_sampling: 'hidream_shift' is not one of uniform, sigmoid, shift, flux_shift, flux2_shift, "
            "qwen_shift, krea2_shift, ideogram4_shift, nextdit_shift, logsnr, qinglong_flux, qinglong_qwen, sigma",
        ),
    ],
)
def test_conflicting_options_are_rejected(flags, problem):
    assert list_problems(*flags.split(" ")) == [problem]


@pytest.mark.parametrize(
    "flags",
    [
        "--noise_offset 0.05 --noise_offset_random_strength --adaptive_noise_scale -0.1",
        "--multires_noise_iterations 6 --multires_noise_discount 0.5",
        "--multires_noise_discount 0",
        "--loss_type huber --huber_c 0.2 --huber_schedule exponential",
        "--huber_c 0.1 --huber_schedule snr",
        "--timestep_sampling sigma --weighting_scheme logit_normal --logit_mean 0.5 --discrete_flow_shift 3",
        "--timestep_sampling shift --weighting_scheme cosmap --sigmoid_scale 2 --discrete_flow_shift 3.1582",
        "--timestep_sampling shift --model_prediction_type sigma_scaled",
        "--min_timestep 0 --max_timestep 1000",
    ],
)
def test_compatible_options_are_accepted(flags):
    assert list_problems(*flags.split(" ")) == []


def list_conflicts(prediction, *flags):
    config = parse_config([*DATA, *flags]).config
    found = validate_objective_for_model(config.noise, config.loss, "test", prediction)
    return {problem.option: f"{problem.text}; {problem.fix}" for problem in found}


VALUES = {
    "noise_offset_random_strength": ["--noise_offset", "0.1"],
    "adaptive_noise_scale": ["0.5", "--noise_offset", "0.1"],
    "multires_noise_discount": ["0.5", "--multires_noise_iterations", "6"],
    "sigmoid_scale": ["0.5", "--timestep_sampling", "shift"],
    "logit_mean": ["0.5", "--weighting_scheme", "logit_normal"],
    "logit_std": ["0.5", "--weighting_scheme", "logit_normal"],
    "mode_scale": ["0.5", "--weighting_scheme", "mode"],
    "min_snr_gamma": ["5"],
    "v_pred_like_loss": ["0.5"],
    "noise_offset": ["0.1"],
    "multires_noise_iterations": ["6"],
    "timestep_sampling": ["sigmoid"],
    "weighting_scheme": ["cosmap"],
    "discrete_flow_shift": ["0.5"],
    "preserve_distribution_shape": ["--min_timestep", "100"],
    "model_prediction_type": ["x0"],
}


@pytest.mark.parametrize("name", list_options_for(Trait.DIFFUSION))
def test_options_without_effect_on_flow_matching_are_rejected_for_it_if_loading_shows_it(name):
    flags = [f"--{name}", *VALUES.get(name, [])]
    assert list_conflicts("flow", *flags)[name] == "not applicable to test, not for flow matching; remove it"
    assert name not in list_conflicts("v" if name != "v_pred_like_loss" else "epsilon", *flags)


@pytest.mark.parametrize("prediction", ["epsilon", "v"])
@pytest.mark.parametrize("name", list_options_for(Trait.FLOW))
def test_flow_matching_options_are_rejected_for_other_models(name, prediction):
    flags = [f"--{name}", *VALUES[name]]
    assert list_conflicts(prediction, *flags)[name] == "not applicable to test, only for flow matching; remove it"
    assert list_conflicts("flow", *flags) == {}


def test_values_that_equal_the_default_behavior_are_accepted():
    off = (
        "--min_snr_gamma 0 --noise_offset 0 --no-zero_terminal_snr --no-v_parameterization --v_pred_like_loss 0 "
        "--multires_noise_iterations 0"
    ).split()
    assert list_conflicts("flow", *off) == {}
    assert list_conflicts("epsilon", *off, "--timestep_sampling", "uniform", "--weighting_scheme", "none") == {}


def test_the_prediction_type_decides_and_the_option_overrides_the_scheduler_config():
    reasons = {
        "zero_terminal_snr": "needs a model that predicts v, but this test model predicts the noise; set"
        " v_parameterization",
        "scale_v_pred_loss_like_noise_pred": "not applicable to test, the model predicts the noise; v_parameterization"
        " is not set; remove it",
    }
    for name, reason in reasons.items():
        assert list_conflicts("epsilon", f"--{name}") == {name: reason}
        assert list_conflicts("v", f"--{name}") == list_conflicts("epsilon", f"--{name}", "--v_parameterization") == {}
        assert name in list_conflicts("v", f"--{name}", "--no-v_parameterization")
    like = ["--v_pred_like_loss", "0.5"]
    assert list_conflicts("epsilon", *like) == list_conflicts("v", *like, "--no-v_parameterization") == {}
    assert "predicts v" in list_conflicts("v", *like)["v_pred_like_loss"]
    assert "v_pred_like_loss" in list_conflicts("epsilon", *like, "--v_parameterization")


def test_options_at_their_neutral_values_are_not_rejected():
    flags = (
        "--noise_offset 0 --huber_c 0.1 --timestep_sampling sigmoid --sigmoid_scale 0 --min_timestep 0 --loss_type l1"
    ).split()
    config = parse_config([*DATA, *flags]).config
    assert find_active_options(config.noise, config.loss) == {
        "timestep_sampling": "sigmoid",
        "sigmoid_scale": 0.0,
        "loss_type": "l1",
    }


def test_an_option_that_does_not_fit_the_model_is_reported_with_its_location_before_loading(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[noise]\nzero_terminal_snr = true\n[loss]\nscale_v_pred_loss_like_noise_pred = true\n")
    result = subprocess.run(
        [
            sys.executable,
            ROOT / "train_lora.py",
            "--config_file",
            path,
            "--dataset_config",
            ROOT / "dataset_configs" / "demo.toml",
            *"--pretrained_model_name_or_path random:sd1:tiny --dry_run".split(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert result.returncode == 2
    lines = [line.strip() for line in result.stderr.splitlines()]
    assert lines[-1].startswith(f"{path}:2: zero_terminal_snr: needs a model that predicts v")
