"""Options of models of two experts that leave one of them nothing to train, and files named like the other one."""

import pytest
from problem_lines import format_lines

from library.config import parse_config
from library.config.schema import ModelConfig
from library.models.families import FAMILIES
from library.models.validate_options import drop_unused_model_options, validate_model_options


def list_problems(flags: str, model: str = "wan22_t2v") -> list[str]:
    parsed = parse_config(["--pretrained_model_name_or_path", f"random:{model}:tiny", *flags.split()])
    return format_lines(validate_model_options(parsed.config, {}))


LOW = "no timestep for low_noise, which is below"
HIGH = "no timestep for high_noise, which is from"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (
            "--noise_experts low_noise --min_timestep 900",
            f"--min_timestep: the range 900 to 1000 has {LOW} 875; set a min_timestep below 875,"
            " or --noise_experts high_noise",
        ),
        (
            "--noise_experts high_noise --max_timestep 500",
            f"--max_timestep: the range 0 to 500 has {HIGH} 875 on; set a max_timestep above 875,"
            " or --noise_experts low_noise",
        ),
        (
            "--noise_experts high_noise --max_timestep 875 --preserve_distribution_shape",
            f"--max_timestep: the range 0 to 875 has {HIGH} 875 on; set a max_timestep above 875,"
            " or --noise_experts low_noise",
        ),
        (
            "--min_timestep 100 --max_timestep 600",
            f"--min_timestep: the range 100 to 600 has {HIGH} 875 on;"
            " only low_noise would be trained: use --noise_experts low_noise, or another range",
        ),
        (
            "--min_timestep 875",
            f"--min_timestep: the range 875 to 1000 has {LOW} 875;"
            " only high_noise would be trained: use --noise_experts high_noise, or another range",
        ),
        (
            "--noise_experts high_noise --max_timestep 890 --timestep_boundary 0.9",
            f"--max_timestep: the range 0 to 890 has {HIGH} 900 on; set a max_timestep above 900,"
            " or --noise_experts low_noise",
        ),
        (
            "--noise_experts high_noise --timestep_sampling sigmoid --sigmoid_scale 0.1",
            f"--timestep_sampling: timestep_sampling sigmoid has {HIGH} 875 on; use another one",
        ),
    ],
)
def test_a_range_that_leaves_an_expert_nothing_is_refused_with_the_boundary(flags, problem):
    assert list_problems(flags) == [problem]


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--noise_experts low_noise",
        "--noise_experts high_noise",
        "--noise_experts low_noise --max_timestep 875",
        "--noise_experts high_noise --min_timestep 875",
        "--noise_experts low_noise --min_timestep 800",
        "--noise_experts high_noise --max_timestep 900",
        "--min_timestep 800 --max_timestep 900",
        "--min_timestep 875 --timestep_boundary 0.9",
    ],
)
def test_a_range_with_levels_of_all_trained_experts_is_accepted(flags):
    assert list_problems(flags) == []


def test_a_range_without_any_sample_is_refused_once():
    flags = "--min_timestep 900 --preserve_distribution_shape --timestep_sampling sigmoid --sigmoid_scale 0.01"
    (line,) = list_problems(flags)
    assert "next to no sample of timestep_sampling sigmoid is in this range" in line
    assert "min_timestep 900 is not below max_timestep 800" in " ".join(
        format_lines(parse_config(["--min_timestep", "900", "--max_timestep", "800"]).problems)
    )
    assert list_problems("--min_timestep 900 --max_timestep 800") == []


def test_the_boundary_is_that_of_the_model():
    assert "from 900 on" in list_problems("--noise_experts high_noise --max_timestep 890", "wan22_i2v")[0]
    assert list_problems("--noise_experts low_noise --min_timestep 890", "wan22_i2v") == []
    assert list_problems("--min_timestep 900", "wan") == []


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("Wan2_2-T2V-A14B-HIGH_fp8.safetensors", "high_noise"),
        ("Wan2_2-T2V-A14B-LOW_fp8_e4m3fn.safetensors", "low_noise"),
        ("wan2.2_t2v_low.safetensors", "low_noise"),
        ("wan2.2_t2v_high_noise_14B_fp16.safetensors", "high_noise"),
        ("Wan2.2-T2V-HighNoise.safetensors", "high_noise"),
        ("wan22LowNoise_v1.safetensors", "low_noise"),
        ("wan2.2_low_vram_high_noise.safetensors", "high_noise"),
        ("wan2.2_highres.safetensors", None),
        ("wan2.2_slow_motion.safetensors", None),
        ("wan2.2_flow.safetensors", None),
        ("wan2.2_slownoise.safetensors", None),
        ("wan2.2_low-vram.safetensors", None),
        ("wan2.2_high_quality.safetensors", None),
        ("wan2.2_high_and_low.safetensors", None),
        ("wan2.2_thigh.safetensors", None),
        ("low_noise", None),  # a folder
    ],
)
def test_a_file_named_like_the_other_expert_is_refused(name, expert):
    validate = FAMILIES.get("wan22_t2v").facts.options.validate
    for chosen in ("high_noise", "low_noise"):
        config = ModelConfig(f"models/{name}", noise_experts=chosen)
        lines = format_lines(validate(lambda _: None, config))
        assert len(lines) == (expert not in (None, chosen)), lines
        assert all(f"like the transformer for {expert}; give that for {chosen}" in line for line in lines)
    both = ModelConfig("models/w.safetensors", dit_high_noise=f"models/{name}")
    assert len([*validate(lambda _: None, both)]) == (expert == "low_noise")


def apply_defaults(*flags: str, model: str = "sdxl_refiner"):
    return drop_unused_model_options(parse_config(["--pretrained_model_name_or_path", f"random:{model}:tiny", *flags]))


def test_the_refiner_trains_the_noise_levels_that_it_knows():
    loaded = apply_defaults()
    assert loaded.config.noise.max_timestep == 200
    (notice,) = [line for line in loaded.list_notices() if "max_timestep" in line]
    assert notice == (
        "max_timestep 200: Stable Diffusion XL refiner knows no higher noise levels; --max_timestep 1000 trains all"
    )
    for most in (150, 1000):
        chosen = apply_defaults("--max_timestep", str(most))
        assert chosen.config.noise.max_timestep == most
        assert not [line for line in chosen.list_notices() if "knows no higher" in line]
    assert apply_defaults("--min_timestep", "300").config.noise.max_timestep is None
    assert apply_defaults("--min_timestep", "100").config.noise.max_timestep == 200
    assert apply_defaults(model="sdxl").config.noise.max_timestep is None
