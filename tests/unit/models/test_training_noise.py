"""Noise levels that families are trained with: their facts, the loaded models, the table, the plan and checkpoints."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from library.config.schema_objective import LossConfig, NoiseConfig
from library.diffusion.process import FlowMatchingProcess
from library.diffusion.timestep_sampling import TIMESTEP_SAMPLINGS
from library.diffusion.timestep_shift import FixedShift
from library.errors import FileError
from library.estimate import noise_summary
from library.estimate.noise_summary import NoiseSummary
from library.models.detect import detect_model, get_config_reader
from library.models.families import FAMILIES, FAMILY_FACTS
from library.models.family_noise_levels import PROGRAMS, NoiseLevels
from library.training.preflight import find_settings_problems, load_settings
from library.training.resume import describe_default_noise_levels, find_changes
from library.training.setup import build_objective
from scripts.noise_table import PAGE, insert_table, iter_rows

ROOT = Path(__file__).resolve().parents[3]
DEMO = ROOT / "dataset_configs" / "demo.toml"


def is_flow_family(name: str) -> bool:
    try:
        return detect_model(f"random:{name}:tiny").prediction_type == "flow"
    except FileError:  # the installed diffusers lacks it; its tests are skipped, or fail
        return True


FLOW_FAMILIES = [name for name in FAMILY_FACTS if is_flow_family(name)]
QUICK = ("flux2_klein", "hunyuan_image", "cogview4")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in FLOW_FAMILIES]
)
def test_the_noise_levels_that_a_plan_knows_are_those_of_the_loaded_model(name):
    """The plan reads JSON files only; training asks the loaded pipeline."""
    model = detect_model(f"random:{name}:tiny")
    family = FAMILIES.get(model.family)()
    pipe = family.load(model, torch.float32, family.facts.image_encoders)
    objective = build_objective(NoiseConfig(), LossConfig(), family, pipe)
    facts = family.facts.training_noise
    planned = facts.build_distribution(NoiseConfig(), get_config_reader(model))
    assert isinstance(objective.process, FlowMatchingProcess)
    assert objective.noise_config.timestep_sampling == planned.sampling == facts.timestep_sampling
    side = 4 * model.size_multiple
    shape = family.encode_moments(pipe, torch.zeros(1, 3, side, 2 * side)).mean_and_std[:, 0].shape
    tokens = objective.process.count_tokens(shape)
    assert facts.count_tokens(2 * side, side, model.size_multiple) == tokens
    assert objective.process.shift.compute_factor(tokens) == pytest.approx(planned.default_shift.compute_factor(tokens))


@pytest.mark.parametrize("name", FLOW_FAMILIES)
def test_facts_name_timestep_samplings_and_trainers_that_exist(name):
    facts = FAMILY_FACTS[name].training_noise
    assert facts.timestep_sampling in TIMESTEP_SAMPLINGS
    assert {*facts.other_trainers} <= {*PROGRAMS}
    assert {levels.timestep_sampling for levels in facts.other_trainers.values()} <= {*TIMESTEP_SAMPLINGS}


@pytest.mark.parametrize("name", FLOW_FAMILIES)
def test_no_family_is_trained_with_almost_no_samples_below_half_the_noise_at_1024_pixels(name):
    ours = next(iter_rows(name, FAMILY_FACTS[name]))
    least = {"cosmos2_video2world": 0.05}  # whose authors publish a trainer of LoRA with these noise levels
    assert ours.shares[0][1] >= (0.12 if name.startswith("flux2") else least.get(name, 0.115))


def test_the_table_of_noise_levels_in_the_documents_is_current():
    page = PAGE.read_text(encoding="utf-8")
    assert insert_table(page) == page, "run: python -m scripts.noise_table"


def test_the_parabola_of_onetrainer_has_the_shares_of_its_weights():
    """Its weights of 1000 levels, which it draws from."""
    level = torch.linspace(0, 1, 1000, dtype=torch.float64)
    weights = (2 - 7.7 * (level - 0.5) ** 2).clamp(min=0)
    for sigma in (0.5, 0.25):
        share = (weights[level < sigma].sum() / weights.sum()).item()
        stated = FAMILY_FACTS["chroma"].training_noise.other_trainers["OneTrainer"]
        assert stated.compute_share_below(sigma, FixedShift(), 4096) == pytest.approx(share, abs=1e-3)


def test_noise_levels_of_another_trainer_have_the_shift_of_the_pipeline_without_their_own():
    assert NoiseLevels("shift").compute_share_below(0.5, FixedShift(3.0), 64) == pytest.approx(0.136, abs=1e-3)
    assert NoiseLevels("shift", 1.0).compute_share_below(0.5, FixedShift(3.0), 64) == pytest.approx(0.5)


def test_a_plan_prints_the_shares_of_its_samples_without_loading_torch():
    command = [
        *(sys.executable, "-X", "importtime", "-m", "library", "plan"),
        *("--dataset_config", "dataset_configs/demo.toml", "--pretrained_model_name_or_path", "random:z_image:base"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    line = "noise levels: timestep_sampling shift, shift 2; share of samples: 24.4% below sigma 0.5, 3.7% below sigma"
    assert line in done.stdout
    assert "torch\n" not in done.stderr


def test_a_shift_that_is_set_is_used_whatever_the_default_of_the_family():
    noise = NoiseConfig(discrete_flow_shift=4.0)
    assert noise.get_timestep_sampling("flux2_shift") == noise.get_timestep_sampling("nextdit_shift") == "shift"
    assert noise.get_timestep_sampling("sigma") == "sigma", "which has a shift as well"
    assert NoiseConfig(timestep_sampling="uniform", discrete_flow_shift=4.0).get_timestep_sampling() == "uniform"


def test_a_range_without_samples_is_refused_where_the_distribution_is_cut():
    flags = f"--dataset_config {DEMO} --pretrained_model_name_or_path random:flux:tiny --timestep_sampling logsnr"
    cut = f"{flags} --preserve_distribution_shape --min_timestep".split()
    (problem,) = find_settings_problems(load_settings([*cut, "985"]))
    assert problem.option == "min_timestep" and "next to no sample of timestep_sampling logsnr" in str(problem)
    assert find_settings_problems(load_settings([*cut, "500"])) == []
    assert find_settings_problems(load_settings([*flags.split(), "--min_timestep", "985"])) == []


def test_stages_of_a_run_count_by_their_steps_and_not_by_their_images(monkeypatch):
    """Two stages of 100 steps, of which the second has many more images."""

    def build_stage(first_step, end_step, side, images):
        plan = SimpleNamespace(
            buckets=[SimpleNamespace(resolution=(side, side))], count_samples=lambda _: images, steps_per_epoch=images
        )
        return SimpleNamespace(first_step=first_step, end_step=end_step, batch_plan=plan)

    stages = [build_stage(0, 100, 512, 10), build_stage(100, None, 1536, 1000)]
    monkeypatch.setattr(noise_summary, "get_planned_stages", lambda _: stages)
    detected, plan = detect_model("random:flux"), SimpleNamespace(batch_plan=None, steps=200)
    summary = noise_summary.summarize_noise_levels(NoiseConfig(), detected, plan)
    facts = FAMILY_FACTS["flux"].training_noise
    distribution = facts.build_distribution(NoiseConfig(), get_config_reader(detected))
    tokens = [facts.count_tokens(side, side, detected.size_multiple) for side in (512, 1536)]
    expected = sum(distribution.compute_share_below(0.5, count) for count in tokens) / 2
    assert summary.shares[0] == pytest.approx(expected)


def test_the_latent_frames_of_clips_count_for_shifts_by_size(monkeypatch):
    bucket = SimpleNamespace(resolution=(512, 512), num_frames=17)  # three latent frames of LTX-Video
    batch_plan = SimpleNamespace(buckets=[bucket], count_samples=lambda _: 1, steps_per_epoch=1)
    stage = SimpleNamespace(first_step=0, end_step=None, batch_plan=batch_plan)
    monkeypatch.setattr(noise_summary, "get_planned_stages", lambda _: [stage])
    detected, plan = detect_model("random:ltx_video"), SimpleNamespace(batch_plan=None, steps=1)
    summary = noise_summary.summarize_noise_levels(NoiseConfig(), detected, plan)
    process = FlowMatchingProcess.from_scheduler(
        get_config_reader(detected)("scheduler/scheduler_config.json"), patch_size=1
    )
    factor = process.shift.compute_factor(process.count_tokens(torch.Size((1, 128, 3, 16, 16))))
    assert summary.shifts == pytest.approx((factor, factor))


def test_shares_of_several_sizes_are_their_mean():
    summary = NoiseSummary("shift", (1.88, 3.16), (0.194, 0.027))
    assert "shift 1.88 to 3.16; share of samples: 19.4% below sigma 0.5, 2.7% below sigma 0.25" in summary.format_text()
    distribution = FAMILY_FACTS["flux2_dev"].training_noise.build_distribution(
        NoiseConfig(), get_config_reader(detect_model("random:flux2_dev"))
    )
    both = distribution.compute_mean_share_below(0.5, {1024: 1, 4096: 3})
    single = [distribution.compute_share_below(0.5, tokens) for tokens in (1024, 4096)]
    assert both == pytest.approx((single[0] + 3 * single[1]) / 4)


def test_a_checkpoint_of_a_release_with_other_default_noise_levels_is_not_continued_in_silence():
    klein, flux, anima = (detect_model(f"random:{name}:tiny") for name in ("flux2_klein", "flux", "anima"))
    assert describe_default_noise_levels(NoiseConfig(), klein) == "flux2_shift"
    assert describe_default_noise_levels(NoiseConfig(timestep_sampling="shift", discrete_flow_shift=3), klein) is None
    assert describe_default_noise_levels(NoiseConfig(), flux) is None
    assert describe_default_noise_levels(NoiseConfig(), anima) is None
    former = {"settings": {}}
    (change,) = find_changes(former, {"settings": {}, "noise_levels": "flux2_shift"})
    assert change.changes_result
    assert str(change) == "the model family's default noise levels: those of its pipeline -> flux2_shift"
    assert list(find_changes(former, {"settings": {}, "noise_levels": None})) == []
