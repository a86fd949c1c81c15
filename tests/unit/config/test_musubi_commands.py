"""Training commands and run files of musubi-tuner: each option is taken, mapped, named without effect, or refused."""

import json
import re

import pytest
from data_paths import DATA, ROOT
from problem_lines import format_lines, format_unused

from library.cli import main
from library.config import parse_config
from library.config.help import format_config_as_toml
from library.config.options import flatten_config
from library.optim.lr_schedulers import build_lr_schedule
from library.training.preflight import find_settings_problems, load_settings

COMMANDS = json.loads((ROOT / "tests" / "data" / "musubi_commands.json").read_text("utf-8"))
QWEN = ["--dit", "random:qwen_image:tiny", "--network_module", "networks.lora_qwen_image"]
MODELS = {
    "networks.lora_qwen_image": "qwen_image",
    "networks.lora_flux_2": "flux2_dev",
    "networks.lora_zimage": "z_image",
    "networks.lora_krea2": "krea2",
    "networks.lora_flux": "flux_kontext",
    "networks.lora_wan": "wan",
    "networks.lora_hv_1_5": "hunyuan_video15",
    "networks.lora_framepack": "framepack",
}


def load(*flags: str):
    return load_settings([*DATA, *flags])


def list_unused(loaded) -> dict[str, str]:
    return {place.removeprefix("--"): reason for place, reason in format_unused(loaded.unused)}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command["script"])
def test_the_documented_commands_have_no_problems(command):
    argv = build_tiny_command(command)
    assert format_lines(parse_config([*DATA, *argv]).problems) == [] and find_problems(argv) == []


def test_settings_of_a_command_are_those_of_a_file_of_our_own(tmp_path):
    argv = """--sdpa --mixed_precision bf16 --timestep_sampling shift --weighting_scheme none --discrete_flow_shift 2.2
    --optimizer_type AdamW --learning_rate 5e-5 --gradient_checkpointing --max_data_loader_n_workers 2
    --persistent_data_loader_workers --network_dim 16 --max_train_epochs 16 --save_every_n_epochs 1 --seed 42
    --fp8_base --fp8_scaled --blocks_to_swap 1 --flash3 --gradient_checkpointing_cpu_offload --model_version original
    --output_dir out --output_name name-of-lora""".split()
    own = tmp_path / "own.toml"
    own.write_text("""
pretrained_model_name_or_path = "random:qwen_image:tiny"
model_version = "original"
network_module = "networks.lora"
network_dim = 16
mixed_precision = "bf16"
timestep_sampling = "shift"
weighting_scheme = "none"
discrete_flow_shift = 2.2
learning_rate = 5e-5
gradient_checkpointing = true
cpu_offload_checkpointing = true
quantize_base = "fp8"
blocks_to_swap = 1
attn_mode = "flash3"
max_data_loader_n_workers = 2
max_train_epochs = 16
save_every_n_epochs = 1
save_format = "kohya"
cache_latents_to_disk = true
cache_text_encoder_outputs_to_disk = true
output_dir = "out"
output_name = "name-of-lora"
""")
    command, file = load(*QWEN, *argv), load("--config_file", str(own))
    theirs, ours = flatten_config(command.config), flatten_config(file.config)
    assert {name: (theirs[name], ours[name]) for name in ours if theirs[name] != ours[name]} == {
        "network_module": ("networks.lora_qwen_image", "networks.lora"),
        "network_args": (("train_modulation=True",), ()),
    }
    assert list_unused(command) == {"sdpa": "", "persistent_data_loader_workers": ""}


def test_defaults_of_musubi_tuner_are_taken_and_named_with_those_that_differ():
    loaded = load(*QWEN)
    config = loaded.config
    assert (config.noise.timestep_sampling, config.noise.discrete_flow_shift) == ("sigma", 1.0)
    assert (config.optim.learning_rate, config.save.save_format) == (2e-6, "kohya")
    assert config.cache.cache_latents_to_disk and config.cache.cache_text_encoder_outputs_to_disk
    assert sorted(loaded.taken_defaults) == sorted(
        "timestep_sampling discrete_flow_shift learning_rate save_format cache_latents_to_disk network_args"
        " cache_text_encoder_outputs_to_disk".split()
    )
    assert loaded.kohya_defaults == ("seed 42 (there another one for each run)",)
    own = load("--pretrained_model_name_or_path", "random:qwen_image:tiny")
    assert own.taken_defaults == {} and own.config.save.save_format == "auto"


def test_rex_has_the_curve_of_musubi_tuner():
    """Its curve is 0.1 and 0.9, and ends at a hundredth of the rate where nothing is said."""
    optim = load(*QWEN, "--lr_scheduler", "rex", "--learning_rate", "1").config.optim
    rates = [build_lr_schedule(optim, 10)(step) for step in (0, 5, 9, 10)]
    assert rates == pytest.approx([1, 0.91, 0.531053, 0.01], abs=1e-6)
    given = ["--lr_scheduler_args", "rex_alpha=0.5", "rex_beta=0.5", "--lr_scheduler_min_lr_ratio", "0"]
    optim = load(*QWEN, "--lr_scheduler", "REX", "--learning_rate", "1", *given).config.optim
    assert build_lr_schedule(optim, 10)(9) == pytest.approx(0.181818, abs=1e-6)
    partly = load(*QWEN, "--lr_scheduler", "rex", "--lr_scheduler_args", "rex_alpha=0.2").config.optim
    assert partly.lr_scheduler_args == ("rex_alpha=0.2", "rex_beta=0.9")


def test_a_setting_replaces_the_default_of_musubi_tuner():
    flags = "--learning_rate 1e-3 --timestep_sampling flux_shift --save_format diffusers --no-cache_latents_to_disk"
    loaded = load(*QWEN, *flags.split(), "--seed", "1")
    assert (loaded.config.optim.learning_rate, loaded.config.save.save_format) == (1e-3, "diffusers")
    assert not loaded.config.cache.caches_latents and loaded.kohya_defaults == ()
    assert sorted(loaded.taken_defaults) == ["cache_text_encoder_outputs_to_disk", "network_args"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--text_encoder1 a --text_encoder2 b", {"t5xxl": "a", "clip_l": "b"}),
        ("--edit", {"model_version": "edit"}),
        ("--edit_plus", {"model_version": "edit-2509"}),
        ("--flash_attn", {"attn_mode": "flash"}),
        ("--flash3", {"attn_mode": "flash3"}),
        ("--xformers", {"attn_mode": "xformers"}),
        ("--fp8_base --fp8_scaled", {"quantize_base": "fp8"}),
        ("--gradient_checkpointing --gradient_checkpointing_cpu_offload", {"cpu_offload_checkpointing": True}),
        (
            "--compile --compile_backend inductor --compile_mode max-autotune --compile_fullgraph --dynamo_dynamic",
            {"torch_compile": True, "dynamo_mode": "max-autotune", "dynamo_fullgraph": True, "compile_dynamic": "true"},
        ),
        ("--save_precision fp32", {"save_precision": "float"}),
    ],
)
def test_an_option_with_another_name_sets_ours(flags, expected):
    parsed = parse_config([*DATA, *QWEN, *flags.split()])
    values = flatten_config(parsed.config)
    assert format_lines(parsed.problems) == [] and {name: values[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("flags", "reasons"),
    [
        ("--fp8_vl", {"fp8_vl": "text encoders are not quantized"}),
        ("--fp8_t5 --fp8_llm --fp8_text_encoder", {"fp8_t5": "", "fp8_llm": "", "fp8_text_encoder": ""}),
        (
            "--blocks_to_swap 1 --block_swap_h2d_only --block_swap_ring_size 3 --use_pinned_memory_for_block_swap",
            {"block_swap_h2d_only": "", "use_pinned_memory_for_block_swap": ""},
        ),
        (
            "--blocks_to_swap 1 --compile --compile_mode max-autotune",
            {"compile": "blocks_to_swap is set", "compile_mode": "torch_compile is not set"},
        ),
        ("--discrete_flow_shift 3", {"discrete_flow_shift": "sigma has no shift in musubi-tuner"}),
        (
            "--split_attn --vae_dtype bfloat16 --img_in_txt_in_offloading",
            dict.fromkeys(("split_attn", "vae_dtype"), ""),
        ),
        ("--turbo_dit x.safetensors", {"turbo_dit": "previews are sampled with the model that is trained"}),
        ("--metadata_arch x", {"metadata_arch": "modelspec.architecture is that of the model"}),
    ],
)
def test_an_option_without_effect_is_named(flags, reasons):
    parsed = parse_config([*DATA, *QWEN, *flags.split()])
    unused = list_unused(parsed)
    assert format_lines(parsed.problems) == []
    assert all(reason in unused[name] for name, reason in reasons.items())


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("--sage_attn", "no backward pass"),
        ("--show_timesteps console", "library plan"),
        ("--num_layers 40", "the model has the blocks of its files"),
        ("--remove_first_image_from_target", "the picture itself is the first"),
        ("--skip_existing", "a run caches by itself"),
        ("--no_vae_load", "for a model of musubi-tuner that is not supported"),
        ("--dit_in_channels 32", "the model has the channels of its files"),
        ("--no_such_option 1", "unknown option"),
    ],
)
def test_what_would_change_the_result_is_refused_with_the_reason(flags, reason):
    (problem,) = format_lines(parse_config([*DATA, *QWEN, *flags.split()]).problems)
    assert problem.startswith(flags.split()[0]) and reason in problem


@pytest.mark.parametrize(
    ("flags", "title"),
    [
        ("--task k5-lite-i2v-5s-sd --nabla_P 0.9", "Kandinsky 5, which is trained from a folder in diffusers' format"),
        ("--task k5-pro-t2v-5s-hd", "Kandinsky 5, which is not supported"),
        ("--network_module networks.lora_kandinsky", "Kandinsky 5"),
        ("--network_module networks.lora_hidream_o1 --dino_loss_weight 1", "HiDream-O1"),
    ],
)
def test_a_model_that_cannot_be_trained_is_the_only_problem(flags, title):
    loaded = load_settings(["--dit", "no/such/file.safetensors", "--dataset_config", "no/such.toml", *flags.split()])
    (problem,) = format_lines(find_settings_problems(loaded))
    assert title in problem and "FLUX.1 Kontext, FLUX.2, Qwen-Image, Wan 2.1 and 2.2 A14B, HunyuanVideo" in problem


@pytest.mark.parametrize(
    "text", ['dit = ""', "dit = false", 'network_module = "networks.lora_zimage"', 'dit = ""\nvae = ""']
)
def test_a_file_of_musubi_tuner_without_a_model_never_trains_the_demo_model(text, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(f"{text}\noutput_name = 'a'\n")
    problems = format_lines(parse_config([*DATA, "--config_file", str(path)]).problems)
    assert any("dit: names no model" in line for line in problems)


@pytest.mark.parametrize("option", ["fused_backward_pass", "mem_eff_save", "block_swap_optimizer_patch_params"])
def test_a_command_for_full_fine_tuning_trains_no_adapter_in_its_place(option):
    problems = format_lines(parse_config([*DATA, "--dit", "random:z_image:tiny", f"--{option}"]).problems)
    reason = "for full fine-tuning (--train full), not for a LoRA"
    assert problems == [f"--{option}: {reason}"]


@pytest.mark.parametrize("mean", [(), ("--timestep_sampling", "sigma", "--discrete_flow_shift", "3")])
def test_a_command_that_chooses_the_defaults_of_the_objective_stays_one_of_musubi_tuner(mean):
    own = load(*QWEN, *mean, "--weighting_scheme", "logit_normal", "--logit_mean", "0.5", "--objective_defaults", "own")
    assert format_lines(own.problems) == []
    assert own.program == "musubi-tuner" and own.config.optim.learning_rate == 2e-6
    noise = own.config.noise
    assert noise.logit_mean == 0.5 and noise.discrete_flow_shift == (3 if mean else None)
    assert noise.timestep_sampling == ("sigma" if mean else None)
    kohya = load(*QWEN, "--objective_defaults", "kohya")
    (problem, *_) = [line for line in format_lines(find_settings_problems(kohya)) if "objective" in line]
    assert problem == "--objective_defaults: sd-scripts has no training script for Qwen-Image; use own"


def test_a_file_of_the_gui_has_the_keys_of_commands(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'blocks_to_swap = 26\ncompile = true\ncompile_backend = "inductor"\ndim_from_weights = false\n'
        'dit = "random:krea2:tiny"\nfp8_base = true\nfp8_scaled = true\nnetwork_module = "networks.lora_krea2"\n'
        'optimizer_type = "AdaFactor"\noptimizer_args = ["relative_step=False"]\nsdpa = true\nsigmoid_scale = 1\n'
        'min_timestep = 0\nmax_timestep = 1000\ntimestep_sampling = "krea2_shift"\nanother_key = 1\n'
    )
    loaded = load("--config_file", str(path))
    assert format_lines(loaded.problems) == [] and loaded.config.distributed.torch_compile is None
    names = {place.partition(": ")[2] for place, _ in format_unused(loaded.unused)}
    assert {"compile", "sdpa", "another_key"} == names


def test_a_higher_mean_of_sigma_sampling_is_less_noise_as_in_musubi_tuner():
    flags = ["--weighting_scheme", "logit_normal", "--logit_mean", "0.5", "--min_timestep", "200"]
    loaded = load(*QWEN, *flags)
    assert loaded.config.noise.logit_mean == -0.5 and len(loaded.notices) == 2
    assert "-0.5 is the same here" in loaded.notices[0] and "max_timestep 800 is the same here" in loaded.notices[1]
    assert (loaded.config.noise.min_timestep, loaded.config.noise.max_timestep) == (None, 800)
    own = load("--pretrained_model_name_or_path", "random:qwen_image:tiny", *flags, "--timestep_sampling", "sigma")
    assert own.config.noise.logit_mean == 0.5 and own.notices == []
    shift = load(*QWEN, *flags[4:], "--timestep_sampling", "shift")
    assert shift.config.noise.discrete_flow_shift == 1.0 and shift.notices == []


@pytest.mark.parametrize(
    "flags",
    [
        "--dataset_config a --vae b --model_version original",
        "--dataset_config a --text_encoder b --batch_size 16 --fp8_vl",
        "--dataset_config a --text_encoder1 b --text_encoder2 c --batch_size 16 --fp8_t5 --skip_existing",
        "--dataset_config a --vae b --i2v --clip c --vae_cache_cpu",
        "--dataset_config a --t5 b --batch_size 16 --fp8_t5",
        "--dataset_config a --vae b --vae_chunk_size 32 --vae_tiling --vae_dtype float16",
        "--dataset_config a --vae b --i2v --image_encoder c --vae_sample_size 128 --vae_enable_patch_conv",
        "--dataset_config a --text_encoder b --byt5 c --batch_size 16 --fp8_vl",
        "--dataset_config a --text_encoder1 b --text_encoder2 c --batch_size 16 --fp8_llm --text_encoder_dtype fp16",
    ],
)
def test_a_command_that_only_caches_is_answered_in_one_line(flags, capsys):
    assert main(flags.split()) == 0
    assert re.fullmatch(r"not needed: .*python -m library cache build.*\n", capsys.readouterr().out)


@pytest.mark.parametrize("flags", ["--dataset_config a", "--vae b --output_name c", "--dit a --vae b --skip_existing"])
def test_a_command_that_may_train_is_no_command_that_caches(flags, capsys):
    assert main(flags.split()) == 2
    assert "not needed: a training" not in capsys.readouterr().out


@pytest.mark.parametrize(("module", "family"), MODELS.items())
def test_a_module_is_for_its_own_model(module, family):
    other = "z_image" if family != "z_image" else "krea2"
    flags = ["--network_module", module, "--dit"]
    assert find_problems([*flags, f"random:{family}:tiny"]) == []
    assert len(find_problems([*flags, f"random:{other}:tiny"])) >= 1


def find_problems(flags: list[str]) -> list[str]:
    loaded = load(*flags)
    problems = format_lines(find_settings_problems(loaded))
    return [line for line in problems if "pyproject.toml" not in line]


def test_the_modulation_of_kontext_is_trained_only_where_exclude_patterns_are_given():
    flags = ["--dit", "random:flux_kontext:tiny", "--network_module", "networks.lora_flux"]
    loaded = load(*flags)
    assert loaded.config.model.model_version == "kontext" and not loaded.config.adapter.trains_text_encoders
    assert loaded.config.adapter.network_args == ("exclude_patterns=['.*(img_mod|txt_mod|modulation).lin']",)
    assert load(*flags, "--network_args", "exclude_patterns=['.*x.*']").config.adapter.network_args == (
        "exclude_patterns=['.*x.*']",
        "pattern_names=original",
    )
    shared = [*flags[:3], "networks.lokr"]  # its default patterns are always added there
    both = "exclude_patterns=['.*x.*', '.*(img_mod|txt_mod|modulation).lin']"
    given = load(*shared, "--network_args", "exclude_patterns=['.*x.*']", "--family", "flux_kontext")
    assert given.config.adapter.network_args == (both, "pattern_names=original")
    (problem,) = find_problems(["--dit", "random:flux:tiny", *flags[2:]])
    assert problem == "--network_module: kontext is a version of FLUX.1 Kontext, and the model is FLUX.1"


def test_a_version_of_another_model_is_refused():
    (problem,) = find_problems([*QWEN, "--model_version", "dev"])
    assert problem.startswith("--model_version: dev is a version of FLUX.2 dev, and the model is Qwen-Image")
    (problem,) = find_problems([*QWEN, "--model_version", "layered"])
    assert problem.startswith("--model_version: layered is a version of Qwen-Image-Layered, and the model is Qwen-Im")
    assert find_problems(["--dit", "random:qwen_image_layered:tiny", "--model_version", "layered"]) == []
    plus = ["--dit", "random:qwen_image_edit_plus:tiny", "--model_version"]
    assert find_problems([*plus, "edit-2509"]) == []
    (problem,) = find_problems([*plus, "edit-2511"])
    assert "edit-2511 has zero_cond_t true in its config, and the model false" in problem


def test_a_switch_of_musubi_tuner_does_not_replace_the_option_for_which_it_stands():
    loaded = load(*QWEN, "--attn_mode", "math", "--flash_attn")
    assert loaded.config.distributed.attn_mode == "math" and "flash_attn" in list_unused(loaded)
    assert not load(*QWEN, "--compile", "--no-torch_compile").config.distributed.torch_compile


def test_options_of_our_own_runs_have_not_the_names_of_musubi_tuner():
    own = ["--pretrained_model_name_or_path", "random:qwen_image:tiny"]
    assert len(parse_config([*DATA, *own, "--flash_attn", "--vae_dtype", "x"]).problems) == 2
    assert load(*own).program == ""


def build_tiny_command(command) -> list[str]:
    """A documented command with a tiny model in place of its files."""
    argv = list(command["argv"])
    files = (
        "--vae",
        *("--text_encoder", "--text_encoder1", "--text_encoder2"),
        "--t5",
        "--clip",
        "--byt5",
        "--image_encoder",
        "--dit_high_noise",
        "--sample_prompts",
    )
    for option in ("--dataset_config", *files):
        if option in argv:
            del argv[argv.index(option) : argv.index(option) + 2]
    module = argv[argv.index("--network_module") + 1] if "--network_module" in argv else ""
    # networks.lora is the module of HunyuanVideo there
    models = {"": "qwen_image_edit_plus:2511", "networks.lora": "hunyuan_video", **MODELS}
    model = f"{models[module]}:tiny"
    if "--task" in argv:  # which is compared with the sizes of the model
        task = argv[argv.index("--task") + 1]
        names = {"t2v-1.3B": "wan", "i2v-14B": "wan_i2v", "flf2v-14B": "wan_flf2v"}
        names |= {"t2v-A14B": "wan22_t2v:tiny", "t2v": "hunyuan_video15:tiny", "i2v": "hunyuan_video15_i2v:tiny"}
        model = names.get(task, "wan:14b")
    argv[argv.index("--dit") + 1] = f"random:{model}"
    return argv


LOGIT_NORMAL = "--weighting_scheme logit_normal --logit_mean 0.5 --min_timestep 200 --max_timestep 900".split()
WRITTEN = {
    **{f"{each['script']} {number}": build_tiny_command(each) for number, each in enumerate(COMMANDS[:5])},
    "sigma": [*QWEN, *LOGIT_NORMAL],
    "patterns": [*QWEN, "--network_args", "exclude_patterns=['.*img_mod.*']", "loraplus_lr_ratio=4"],
    "other names": [*QWEN, "--fp8_base", "--save_precision", "fp32", "--no-cache_latents_to_disk"],
    "kontext": ["--dit", "random:flux_kontext:tiny", "--network_module", "networks.lora_flux"],
    "lokr": ["--dit", "random:qwen_image:tiny", "--network_module", "networks.lokr", "--network_dim", "8"],
}


@pytest.mark.parametrize("name", WRITTEN)
def test_the_settings_that_are_written_read_back_as_the_configuration_that_ran(name, tmp_path):
    ran = load(*WRITTEN[name])
    path = tmp_path / "run.toml"
    path.write_text(format_config_as_toml(ran.config), "utf-8")
    read = load_settings(["--config_file", str(path)])
    assert format_lines(read.problems) == [] and read.taken_defaults == {}
    theirs, ours = flatten_config(read.config), flatten_config(ran.config)
    assert {each: (theirs[each], ours[each]) for each in ours if theirs[each] != ours[each]} == {}
    assert [line for line in format_lines(find_settings_problems(read)) if "pyproject.toml" not in line] == []


def test_the_task_of_a_command_is_compared_with_the_model():
    (problem,) = find_problems(["--dit", "random:wan", "--network_module", "networks.lora_wan", "--task", "t2v-14B"])
    assert problem.startswith("--task: t2v-14B has ffn_dim 13824 in its config, and the model 8960")
    (problem,) = find_problems([*QWEN, "--task", "t2v-14B"])
    assert problem.startswith("--task: t2v-14B is a version of Wan 2.1, and the model is Qwen-Image")


def test_a_command_of_wan_has_the_files_and_the_shift_that_it_names(tmp_path):
    loaded = load(*build_tiny_command(COMMANDS[3]), "--t5", "umt5.safetensors", "--vae_cache_cpu", "--fp8_t5")
    config = loaded.config
    assert (config.model.text_encoder, config.model.model_version) == ("umt5.safetensors", "t2v-1.3B")
    assert (config.noise.timestep_sampling, config.noise.discrete_flow_shift) == ("shift", 3.0)
    assert config.adapter.network_args == () and {"vae_cache_cpu", "fp8_t5"} <= list_unused(loaded).keys()


A14B = ["--dit", "random:wan22_t2v:tiny", "--network_module", "networks.lora_wan", "--task", "t2v-A14B"]


def test_both_transformers_share_an_adapter_in_a_command_as_in_musubi_tuner():
    both = load(*A14B, "--timestep_boundary", "900", "--offload_inactive_dit", "--force_v2_1_time_embedding")
    model = both.config.model
    assert (model.expert_adapters, model.noise_experts, model.noise_boundary) == ("shared", "both", 0.9)
    assert both.taken_defaults["expert_adapters"] == "shared"
    assert {"offload_inactive_dit", "force_v2_1_time_embedding"} <= list_unused(both).keys()
    own = load("--pretrained_model_name_or_path", "random:wan22_t2v:tiny", "--timestep_boundary", "0.8")
    assert (own.config.model.expert_adapters, own.config.model.noise_boundary) == ("separate", 0.8)
    assert "expert_adapters" not in load(*QWEN).taken_defaults


@pytest.mark.parametrize(
    ("words", "expert"),
    [
        ("--timestep_sampling shift --min_timestep 0 --max_timestep 875", "low_noise"),
        ("--timestep_sampling shift --min_timestep 875 --max_timestep 1000", "high_noise"),
        ("--timestep_sampling shift --min_timestep 100 --max_timestep 900", "both"),
        ("--timestep_sampling sigma --min_timestep 875 --max_timestep 1000", "both"),
        ("--timestep_sampling shift --max_timestep 875 --noise_experts high_noise", "high_noise"),
    ],
)
def test_one_transformer_alone_is_told_by_its_timesteps(words, expert):
    assert load(*A14B, *words.split()).config.model.noise_experts == expert


def test_text_encoders_of_hunyuan_video_have_the_names_of_its_script():
    words = ["--dit", "random:hunyuan_video:tiny", "--network_module", "networks.lora"]
    names = load(*words, "--text_encoder1", "llava.safetensors", "--text_encoder2", "clip.safetensors").config.model
    assert (names.t5xxl, names.clip_l) == ("llava.safetensors", "clip.safetensors")
    both = find_problems([*words, "--text_encoder1", "owner/a", "--text_encoder", "owner/b"])
    assert any("HunyuanVideo has one text_encoder, which another option names, too" in line for line in both)
