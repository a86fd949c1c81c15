"""Models of two experts: one result on any number of processes, exact resume, and files that diffusers reads."""

import shutil
from pathlib import Path

import pytest
import torch
from clip_files import write_clip
from killed_runs import train_and_kill
from rank_processes import run_on_ranks
from safetensors.torch import load_file
from torch import nn
from training_runs import train

from library.config.schema_distributed import ParallelConfig
from library.config.schema_objective import NoiseConfig
from library.diffusion.expert_selection import HIGH_NOISE, LOW_NOISE, NoiseExperts
from library.diffusion.noise_level_distributions import NoiseDistribution
from library.diffusion.timestep_shift import FixedShift
from library.errors import ConfigError
from library.models.families import FAMILIES
from library.tools.plan import run_plan
from library.training.validate_model import validate_model_parallel

STEPS, SEED = 6, 5
MODEL = "random:wan22_t2v:tiny"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    for number in range(4):
        clip = write_clip(folder / "clips" / f"{number}.mp4", 30, 24, (96, 64), shade=50 * number)
        clip.with_suffix(".txt").write_text(f"clip {number}, moving", encoding="utf-8")
    (folder / "set.toml").write_text(
        f"""
[[datasets]]
resolution = 64
batch_size = 2
caption_extension = ".txt"
[[datasets.subsets]]
video_dir = '{folder / "clips"}'
target_frames = [1, 9]
"""
    )
    return folder / "set.toml"


def build_flags(data: Path, folder: Path, *more: str) -> tuple[str, ...]:
    settings = f"--network_dim 2 --learning_rate 1e-1 --seed {SEED} --mixed_precision no --max_train_steps {STEPS}"
    model = () if "--pretrained_model_name_or_path" in more else ("--pretrained_model_name_or_path", MODEL)
    return (*model, "--dataset_config", str(data), "--output_dir", str(folder), *settings.split(), *more)


def load_both(folder: Path) -> dict[str, torch.Tensor]:
    return {
        f"{expert}.{key}": value
        for expert in (HIGH_NOISE, LOW_NOISE)
        for key, value in load_file(folder / f"lora_{expert}.safetensors").items()
    }


def test_the_experts_of_steps_have_the_shares_of_their_noise_levels():
    distribution = NoiseDistribution("shift", NoiseConfig(), FixedShift(3.0))
    experts = NoiseExperts(0.875)
    share = distribution.compute_share_below(0.875, 1560)
    counts = experts.count_steps(1, range(4000), distribution)
    assert abs(counts[LOW_NOISE] / 4000 - share) < 0.02 and sum(counts.values()) == 4000
    assert experts.get_quantiles(LOW_NOISE, distribution, 1) == (0.0, share)
    assert experts.get_quantiles(HIGH_NOISE, distribution, 1) == (share, 1.0)
    assert NoiseExperts(0.875, "low_noise").count_steps(1, range(9), distribution) == {LOW_NOISE: 9}


@pytest.mark.slow
def test_the_plan_says_how_many_steps_train_each_expert(dataset):
    flags = ["--dataset_config", str(dataset), "--seed", str(SEED), "--max_train_steps", str(STEPS)]
    text, _ = run_plan([*flags, "--pretrained_model_name_or_path", MODEL])
    distribution = NoiseDistribution("shift", NoiseConfig(), FixedShift(3.0))
    drawn = [NoiseExperts(0.875).draw(SEED, step, distribution) for step in range(STEPS)]
    parts = [f"{each} {drawn.count(each)} of {STEPS} steps" for each in (HIGH_NOISE, LOW_NOISE)]
    assert len({*drawn}) == 2 and all(part in text for part in parts)
    text, _ = run_plan([*flags, "--pretrained_model_name_or_path", MODEL, "--noise_experts", "low_noise"])
    assert "low_noise 6 of 6 steps (100%)" in text


# An idle expert has no gradient; with one of zeros it would be decayed, and moved by its momentum.
OPTIMIZER = "--optimizer_type SGD --optimizer_args momentum=0.9 weight_decay=0.1".split()


@pytest.fixture(scope="module")
def whole(dataset, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    run_on_ranks(1, train, *build_flags(dataset, folder, *OPTIMIZER, "--gradient_accumulation_steps", "2"))
    return folder


LAYOUTS = {
    "two processes": (2, ()),
    "FSDP": (2, ("--fsdp",)),
    "recovery": (1, ("--gradient_accumulation_steps", "2", "--on_oom", "recover")),
    "swapped blocks": (1, ("--gradient_accumulation_steps", "2", "--blocks_to_swap", "3", "--gradient_checkpointing")),
    "idle expert in host memory": (
        1,
        "--gradient_accumulation_steps 2 --blocks_to_swap 4 --block_swap_ring_size 2".split(),
    ),
    "tensor parallel": (2, "--tp_size 2 --gradient_accumulation_steps 2".split()),
    "context parallel": (2, "--cp_size 2 --gradient_accumulation_steps 2".split()),
    "pipeline": (2, "--pp_size 2 --gradient_accumulation_steps 2 --gradient_checkpointing".split()),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_experts_train_the_same_in_every_layout(layout, whole, dataset, tmp_path):
    ranks, more = LAYOUTS[layout]
    run_on_ranks(ranks, train, *build_flags(dataset, tmp_path, *OPTIMIZER, *more))
    files = [load_both(folder) for folder in (whole, tmp_path)]
    ups = [key for key in files[0] if "lora_up" in key]
    for expert in (HIGH_NOISE, LOW_NOISE):
        assert any(files[0][key].any() for key in ups if key.startswith(expert)), "each has its steps"
    largest = max(float(files[0][key].abs().max()) for key in ups)
    assert max(float((files[1][key] - files[0][key]).abs().max()) for key in ups) < 1e-5 * largest


@pytest.mark.slow
@pytest.mark.parametrize("killed_at", [1, 4])
def test_a_killed_run_of_both_experts_resumes_to_the_same_bits(killed_at, dataset, tmp_path):
    more = "--save_every_n_steps 1 --save_state --auto_resume --ema_decay 0.9 --optimizer_type AdamW".split()
    run_on_ranks(1, train, *build_flags(dataset, tmp_path / "whole", *more))
    with pytest.raises(AssertionError):
        run_on_ranks(1, train_and_kill, (0,), killed_at, *build_flags(dataset, tmp_path / "killed", *more))
    run_on_ranks(1, train, *build_flags(dataset, tmp_path / "killed", *more))
    files = [load_both(tmp_path / name) for name in ("whole", "killed")]
    assert files[0].keys() == files[1].keys() and all(torch.equal(files[0][key], files[1][key]) for key in files[0])
    names = [sorted(path.name for path in (tmp_path / name).glob("*.safetensors")) for name in ("whole", "killed")]
    assert names[0] == names[1] and "lora-ema_low_noise.safetensors" in names[0]


@pytest.mark.slow
def test_an_expert_whose_only_steps_had_no_learning_rate_yet_is_saved_as_it_is(dataset, tmp_path):
    """The learning rate of the first step of a warm-up is 0; each step draws its expert from the seed."""
    distribution = NoiseDistribution("shift", NoiseConfig(), FixedShift(3.0))
    draw = NoiseExperts(0.875).draw
    seed = next(
        seed for seed in range(999) if [draw(seed, step, distribution) for step in (0, 1)] == [HIGH_NOISE, LOW_NOISE]
    )
    more = (
        "--seed",
        str(seed),
        *"--lr_scheduler constant_with_warmup --lr_warmup_steps 3 --save_every_n_steps 2".split(),
    )
    run_on_ranks(1, train, *build_flags(dataset, tmp_path, *more))
    early = {key: load_file(tmp_path / f"lora-step00000002_{key}.safetensors") for key in (HIGH_NOISE, LOW_NOISE)}
    trained = {expert: any(early[expert][key].any() for key in early[expert] if "lora_up" in key) for expert in early}
    assert trained == {HIGH_NOISE: False, LOW_NOISE: True}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wan22_t2v", "wan22_i2v", "wan22_fun_control"])
def test_diffusers_loads_the_files_of_both_experts(name, dataset, tmp_path):
    """Each changes its own transformer, by what was trained."""
    model = ("--pretrained_model_name_or_path", f"random:{name}:tiny")
    if FAMILIES.get(name).facts.control.num_images[0]:  # the clips are their own controls
        controls = shutil.copytree(dataset.with_name("clips"), tmp_path / "controls")
        text = dataset.read_text() + f"control_directory = '{controls}'\n"
        dataset = tmp_path / "control.toml"
        dataset.write_text(text)
    run_on_ranks(1, train, *build_flags(dataset, tmp_path, *model, "--save_every_n_steps", "3"))
    family = FAMILIES.get(name)()
    pipe = family.load(f"random:{name}:tiny", torch.float32)
    pipe.transformer = pipe.transformer.high_noise  # as diffusers loads it
    for expert, options in ((HIGH_NOISE, {}), (LOW_NOISE, {"load_into_transformer_2": True})):
        path = str(tmp_path / f"lora_{expert}.safetensors")
        pipe.load_lora_weights(path, adapter_name=expert, **options)
    weights = load_both(tmp_path)
    for expert, transformer in ((HIGH_NOISE, pipe.transformer), (LOW_NOISE, pipe.transformer_2)):
        layer = transformer.blocks[1].attn1.to_q
        key = f"{expert}.lora_unet_blocks_1_self_attn_q"
        scale = float(weights[f"{key}.alpha"]) / 2
        expected = scale * weights[f"{key}.lora_up.weight"] @ weights[f"{key}.lora_down.weight"]
        theirs = layer.lora_B[expert].weight @ layer.lora_A[expert].weight * layer.scaling[expert]
        torch.testing.assert_close(theirs, expected)
        assert expected.any()


@pytest.mark.slow
@pytest.mark.parametrize("expert", [HIGH_NOISE, LOW_NOISE])
def test_one_expert_alone_is_trained_at_its_noise_levels(expert, dataset, tmp_path, monkeypatch):
    from library.diffusion.objective import Objective

    compute, seen = Objective.compute_timesteps, []
    monkeypatch.setattr(Objective, "compute_timesteps", lambda *each: seen.append(compute(*each)) or seen[-1])
    more = ("--noise_experts", expert, "--train_batch_size", "2", "--validation_split", "0.25")
    train(*build_flags(dataset, tmp_path, *more))
    assert [path.name for path in tmp_path.glob("*.safetensors")] == [f"lora_{expert}.safetensors"]
    levels = torch.cat(seen)
    is_high = levels >= 874.9
    assert bool(is_high.all() if expert == HIGH_NOISE else not (levels > 875.1).any()) and len(levels) > 20
    names = {key.split(".")[0] for key in load_file(tmp_path / f"lora_{expert}.safetensors")}
    assert "lora_unet_blocks_0_self_attn_q" in names and len(names) == 20


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--network_weights", "both are trained"),
        ("--noise_experts low_noise --sample_prompts", "low_noise alone is loaded"),
    ],
)
def test_what_two_experts_cannot_do_is_refused_in_one_line(flags, reason, dataset, tmp_path):
    (tmp_path / "file.txt").write_text("a\n", encoding="utf-8")
    values = [*flags.split(), str(tmp_path / "file.txt")]
    with pytest.raises(ConfigError, match=reason):
        train(*build_flags(dataset, tmp_path, *values))


SHARED = ("--expert_adapters", "shared", *OPTIMIZER)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["two processes", "FSDP", "swapped blocks", "tensor parallel"])
def test_an_adapter_that_both_experts_share_is_one_file_in_every_layout(layout, dataset, tmp_path):
    ranks, more = LAYOUTS[layout]
    one = (1, ("--gradient_accumulation_steps", "2"))
    for name, (count, flags) in {"one": one, "other": (ranks, more)}.items():
        run_on_ranks(count, train, *build_flags(dataset, tmp_path / name, *SHARED, *flags))
        assert [path.name for path in (tmp_path / name).glob("*.safetensors")] == ["lora.safetensors"]
    files = [load_file(tmp_path / name / "lora.safetensors") for name in ("one", "other")]
    ups = [key for key in files[0] if "lora_up" in key]
    largest = max(float(files[0][key].abs().max()) for key in ups)
    assert len(ups) == 20 and largest > 0
    assert max(float((files[1][key] - files[0][key]).abs().max()) for key in ups) < 1e-5 * largest


@pytest.mark.slow
def test_steps_of_either_expert_train_the_shared_adapter(dataset, tmp_path):
    """A first step of high noise is that of its own adapter; the next one, of low noise, goes on with it."""
    distribution = NoiseDistribution("shift", NoiseConfig(), FixedShift(3.0))
    draw = NoiseExperts(0.875).draw
    seed = next(
        seed for seed in range(999) if [draw(seed, step, distribution) for step in (0, 1)] == [HIGH_NOISE, LOW_NOISE]
    )
    steps = ("--seed", str(seed), "--save_every_n_steps", "1", "--max_train_steps", "2")
    for name, more in {"separate": SHARED[2:], "shared": SHARED}.items():
        run_on_ranks(1, train, *build_flags(dataset, tmp_path / name, *more, *steps))
    first = load_file(tmp_path / "shared" / "lora-step00000001.safetensors")
    own = load_file(tmp_path / "separate" / "lora-step00000001_high_noise.safetensors")
    assert first.keys() == own.keys() and all(torch.equal(first[key], own[key]) for key in first)
    last = load_file(tmp_path / "shared" / "lora.safetensors")
    still = load_file(tmp_path / "separate" / "lora_high_noise.safetensors")
    ups = [key for key in first if "lora_up" in key]
    assert all(torch.equal(still[key], own[key]) for key in ups), "its own adapter has no second step"
    assert all(not torch.equal(last[key], first[key]) for key in ups)


@pytest.mark.slow
def test_a_shared_dora_is_refused_and_another_boundary_has_other_shares(dataset, tmp_path):
    with pytest.raises(ConfigError, match="magnitudes of DoRA"):
        train(*build_flags(dataset, tmp_path, *SHARED, "--network_args", "use_dora=True"))
    flags = ["--dataset_config", str(dataset), "--seed", str(SEED), "--pretrained_model_name_or_path", MODEL]
    text, _ = run_plan([*flags, "--max_train_steps", "200", "--timestep_boundary", "500"])
    distribution = NoiseDistribution("shift", NoiseConfig(), FixedShift(3.0))
    count = sum(NoiseExperts(0.5).draw(SEED, step, distribution) == LOW_NOISE for step in range(200))
    assert f"from noise level 0.5 on high_noise: high_noise {200 - count} of 200 steps" in text


def test_too_many_stages_for_the_blocks_of_an_expert_end_with_one_line():
    """Its blocks are those of two transformers, of which a check builds one."""
    family, blocks = FAMILIES.get("wan22_t2v")(), nn.ModuleList(map(nn.Linear, (1, 1), (1, 1)))
    denoiser = nn.ModuleDict({"blocks": blocks})
    for size, count in ((2, 0), (3, 1)):
        parallel = ParallelConfig(pp_size=size)
        problems = list(validate_model_parallel(parallel, "AdamW", family, lambda: denoiser))
        assert len(problems) == count and all("has 2 blocks, too few for 3 devices" in str(each) for each in problems)
