"""`python -m library import`: exact values, nothing dropped silently, output that our own parser accepts."""

import copy
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import yaml
from problem_lines import format_lines

from library.cli import EXIT_USER_ERROR, run_tool
from library.config import parse_config
from library.config.schema_optim import OptimConfig
from library.config.types import StepsOrRatio
from library.dataset.dataset_config import load_dataset_config
from library.errors import UserError
from library.optim.arguments import find_unknown_args, import_class
from library.optim.lr_schedulers import build_lr_schedule
from library.optim.optimizers import resolve_optimizer
from library.tools.import_config import format_untaken, run_import_config
from library.tools.importers.imported import ImportedConfig, KeyReader, Unsupported
from library.tools.importers.keys import ai_toolkit, diffusion_pipe, kohya_gui, onetrainer, simpletuner
from library.tools.importers.programs import import_sources
from library.tools.importers.simpletuner import _read_lycoris
from library.tools.importers.source_file import SourceFile, read_source

DATA = Path(__file__).resolve().parents[2] / "data" / "import"
FILES = tuple(
    (
        "kohya_sdxl.json kohya_flux.json ai_toolkit_flux.yaml ai_toolkit_sdxl.yaml onetrainer_sdxl.json "
        "onetrainer_flux.json diffusion_pipe_flux.toml diffusion_pipe_sdxl.toml simpletuner_flux/config.json "
        "simpletuner_sdxl/config.env"
    ).split()
)
FOLDERS = ("photos/10_lorikeet bird", "photos/sub", "reg/2_bird", "masks")


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A folder with the test files and the image folders that they name."""
    shutil.copytree(DATA, tmp_path, dirs_exist_ok=True)
    for name in FOLDERS:
        (tmp_path / name).mkdir(parents=True)
    shutil.copy(tmp_path / "photos.dataset.toml", tmp_path / "photos.toml")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def import_file(name, *flags):
    """Import a file; return the report, the parsed run and the parsed datasets."""
    text, code = run_import_config([name, "--output_dir", "out", *flags])
    assert code == 0, text
    (run,) = [path for path in Path("out").glob("*.toml") if not path.name.endswith(".dataset.toml")]
    loaded = parse_config(["--config_file", str(run)])
    return text, loaded, load_dataset_config(loaded.config.data)


def import_content(path, content):
    """Import changed content of a file, without writing anything."""
    _, result = import_sources([SourceFile(Path(path), content)])
    return result


def describe(result):
    """All that an import says and would write."""
    return json.dumps(
        [
            format_lines(result.problems),
            result.family,
            sorted(result.options.items(), key=str),
            result.general,
            result.datasets,
            result.prompts,
            format_untaken(result, ""),
        ],
        default=str,
    )


@pytest.mark.parametrize(
    ("preset", "lora_type", "arguments", "is_listed"),
    [
        ("full", "LyCORIS/LoKr", set(), False),
        ("attn-mlp", "LyCORIS/LoCon", {"preset=attn-mlp"}, False),
        ("attn-only", "LyCORIS/LoHa", {"preset=attn-only"}, False),
        ("mine.toml", "LyCORIS/LoCon", set(), True),
    ],
)
def test_presets_of_lycoris_are_taken_over(work, preset, lora_type, arguments, is_listed):
    content = {**load("kohya_sdxl.json"), "LoRA_type": lora_type, "LyCORIS_preset": preset, "use_tucker": True}
    Path("preset.json").write_text(json.dumps({key: each for key, each in content.items() if "dropout" not in key}))

    text, loaded, _ = import_file("preset.json")

    assert format_lines(loaded.problems) == [] and loaded.config.adapter.network_module == "lycoris.kohya"
    assert {each for each in loaded.config.adapter.network_args if each.startswith("preset")} == arguments
    assert ("LyCORIS_preset" in text) == is_listed
    assert ("use_tucker=True" in loaded.config.adapter.network_args) == (preset == "full"), "with convolutions"
    assert ("use_tucker" in text) == (lora_type == "LyCORIS/LoCon")


def test_bucket_steps_that_the_model_cannot_train_become_those_that_it_needs(work):
    result = import_content("gui.json", {**load("kohya_sdxl.json"), "bucket_reso_steps": 1})

    assert result.general["bucket_reso_steps"] == 32
    assert "bucket_reso_steps = 1: finer than the model can train" in "\n".join(format_untaken(result, ""))


@pytest.mark.parametrize("name", FILES)
def test_the_output_is_accepted_by_our_own_parser(work, name):
    text, loaded, datasets = import_file(name)

    assert format_lines(loaded.problems) == []
    assert format_lines(datasets.problems) == []
    assert "to fix before training (0)" in text


EXPECTED = {
    "kohya_sdxl.json": {
        "network_args": ("conv_dim=8", "conv_alpha=4.0", "rank_dropout=0.2"),
        "network_alpha": 8.0,
        "network_dropout": 0.1,
        "network_train_unet_only": False,
        "unet_lr": 2e-4,
        "text_encoder_lr": (5e-5,),
        "lr_warmup_steps": StepsOrRatio(0.05, is_ratio=True),
        "lr_scheduler_num_cycles": 3,
        "max_train_epochs": 12,
        "multires_noise_iterations": 6,
        "multires_noise_discount": 0.25,
        "noise_offset": 0.0,  # noise_offset_type chooses one of the two
        "loss_type": "smooth_l1",
        "huber_c": 0.2,
        "max_timestep": 950,
        "min_snr_gamma": 5.0,
        "optimizer_args": ("decouple=True", "weight_decay=0.01", "betas=0.9,0.99"),
        "log_prefix": "lorikeet",
        "clip_skip": None,  # sd-scripts ignores it for SDXL
    },
    "kohya_flux.json": {
        "dataset_config": "photos.toml",
        "caption_extension": (".caption",),  # the GUI drops an empty text, so sd-scripts' default applies
        "max_grad_norm": 1.0,  # likewise 0
        "guidance_scale": 3.5,  # likewise 0
        "seed": 42,
        "max_bucket_reso": 2048,  # the GUI's default
        "optimizer_type": "AdamW8bit",
        "quantize_base": "fp8",
        "objective_defaults": "kohya",
        "model_prediction_type": "sigma_scaled",
        "timestep_sampling": "shift",
        "discrete_flow_shift": 2.5,
        "network_args": ("img_attn_dim=24",),
        "min_snr_gamma": None,
        "max_train_steps": 800,
        "blocks_to_swap": 6,
    },
    "ai_toolkit_flux.yaml": {
        "max_train_steps": 500,  # 1500 micro-batches in steps of 3
        "gradient_accumulation_steps": 3,
        "save_every_n_steps": 66,
        "save_last_n_steps": 132,
        "network_dim": 24,
        "network_alpha": 24.0,  # transformers are trained without alpha there
        "network_dropout": 0.05,
        "learning_rate": 2e-4,
        "optimizer_type": "AdamW8bit",
        "optimizer_args": ("eps=1e-06", "weight_decay=0.02"),
        "timestep_sampling": "sigma",
        "weighting_scheme": None,
        "discrete_flow_shift": None,
        "ema_decay": 0.995,
        "quantize_base": "fp8",
        "prior_loss_weight": 0.4,
        "save_precision": "fp16",
        "output_dir": "runs/lorikeet_flux",
        "sample_at_first": True,
    },
    "ai_toolkit_sdxl.yaml": {
        "network_alpha": 16.0,
        "gradient_accumulation_steps": 2,
        "max_train_steps": 900,
        "learning_rate": 1.0,
        "optimizer_type": "Prodigy",
        "lr_scheduler_type": "LinearLR",  # torch's, which rises from a third
        "lr_scheduler_args": ("total_iters=900",),
        "min_snr_gamma": 5.0,
        "text_encoder_lr": (5e-5,),
        "masked_loss_normalize": True,
        "huggingface_repo_id": "someone/lorikeet",
        "huggingface_repo_visibility": "public",
        "vae": "models/vae.safetensors",
        "mixed_precision": "fp16",
        "gradient_checkpointing": True,  # its default
    },
    "onetrainer_sdxl.json": {
        "unet_lr": 2e-4 * math.sqrt(8),  # the root of batch size 4 by 2 accumulation steps
        "text_encoder_lr": (5e-5 * math.sqrt(8), 0.0),
        "gradient_accumulation_steps": 2,
        "max_train_epochs": 20,
        "lr_scheduler": "cosine_with_min_lr",
        "lr_scheduler_min_lr_ratio": 0.1,
        "lr_warmup_steps": StepsOrRatio(50, is_ratio=False),  # 100 micro-batches
        "network_dim": 32,
        "network_alpha": 8.0,
        "network_args": (),
        "optimizer_args": ("weight_decay=0.02", "eps=1e-07", "betas=(0.9,0.99)"),
        "min_snr_gamma": 4.0,
        "noise_offset": 0.04,
        "min_timestep": 50,
        "save_every_n_steps": 50,
        "sample_every_n_epochs": 2,
        "save_format": "kohya",
        "output_name": "lorikeet",
        "cache_text_encoder_outputs_to_disk": False,
    },
    "onetrainer_flux.json": {
        "timestep_sampling": "sigma",
        "weighting_scheme": "logit_normal",
        "logit_mean": 0.5,
        "logit_std": 1.2,
        "discrete_flow_shift": 1.8,
        "lr_scheduler": "constant_with_warmup",
        "lr_warmup_steps": StepsOrRatio(200, is_ratio=False),  # its default
        "max_train_epochs": 50,
        "quantize_base": "nf4",
        "guidance_scale": 2.0,
        "t5xxl_max_token_length": 77,  # its default
        "network_alpha": 16.0,
        "network_dim": 16,
        "save_precision": "float",
        "cache_text_encoder_outputs_to_disk": True,
    },
    "diffusion_pipe_flux.toml": {
        "pretrained_model_name_or_path": "models/dedistilled.safetensors",
        "t5xxl": "models/FLUX.1-dev/text_encoder_2",
        "max_train_epochs": 40,
        "max_grad_norm": 0.5,
        "timestep_sampling": "shift",
        "sigmoid_scale": 1.3,
        "discrete_flow_shift": 3.0,
        "guidance_scale": 2.0,
        "network_dim": 24,
        "network_alpha": 24.0,
        "network_dropout": 0.0,
        "optimizer_args": ("betas=(0.9,0.98)", "eps=1e-06", "weight_decay=0.02"),
        "caption_dropout_rate": 0.1,
        "cpu_offload_checkpointing": True,
        "loss_type": "smooth_l1",
        "huber_c": 0.3,
        "log_tracker_name": "lorikeets",
    },
    "diffusion_pipe_sdxl.toml": {
        "max_train_steps": 600,
        "v_parameterization": True,
        "min_snr_gamma": 5.0,
        "network_train_unet_only": False,
        "unet_lr": 4e-5,
        "text_encoder_lr": (2e-5, 1.0),  # the second has that of the optimizer
        "optimizer_type": "Prodigy",
        "masked_loss": True,
        "cache_text_encoder_outputs_to_disk": False,
    },
    "simpletuner_flux/config.json": {
        "pretrained_model_name_or_path": "black-forest-labs/FLUX.1-dev",
        "network_dim": 32,
        "network_alpha": 32.0,  # its default is the rank
        "timestep_sampling": "shift",
        "discrete_flow_shift": None,
        "max_grad_norm": 0.8,
        "optimizer_type": "Lion",
        "optimizer_args": ("betas=(0.9,0.99)", "weight_decay=0.05"),
        "lr_scheduler_power": 0.8,  # its default
        "quantize_base": "int8",
        "save_last_n_steps": 750,
        "ema_decay": 0.99,
        "huggingface_repo_visibility": "private",
        "sample_every_n_steps": 100,
    },
    "simpletuner_sdxl/config.env": {
        "network_module": "networks.lokr",
        "network_dim": 9_999_999,
        "network_alpha": 9_999_999.0,  # full matrices have no scale
        "max_train_epochs": 6,
        "lr_scheduler": "constant_with_warmup",
        "lr_warmup_steps": StepsOrRatio(20, is_ratio=False),
        "learning_rate": 3e-5,
        "optimizer_type": "AdamW8bit",
        "optimizer_args": ("eps=1e-06",),
        "min_snr_gamma": 5.0,
        "noise_offset": 0.05,
        "max_grad_norm": 0.0,
        "seed": 7,
    },
}


@pytest.mark.parametrize("name", FILES)
def test_options_have_the_values_that_the_other_program_uses(work, name):
    _, loaded, _ = import_file(name)
    groups = vars(loaded.config).values()
    given = {option: value for group in groups for option, value in vars(group).items()}

    assert {option: given[option] for option in EXPECTED[name]} == EXPECTED[name]


SUBSETS = {
    "kohya_sdxl.json": [
        {"image_dir": "photos/10_lorikeet bird", "num_repeats": 10, "class_tokens": "lorikeet bird", "is_reg": False},
        {"image_dir": "reg/2_bird", "num_repeats": 2, "is_reg": True, "keep_tokens": 2, "caption_dropout_rate": 0.05},
    ],
    "ai_toolkit_flux.yaml": [
        {"num_repeats": 4, "caption_extension": (".txt",), "caption_prefix": "lrkt", "shuffle_caption": True},
        {"image_dir": "reg", "is_reg": True, "caption_prefix": None},
        {"image_dir": "photos", "caption_dropout_rate": 0.1, "class_tokens": "a photo of [trigger]"},
    ],
    "ai_toolkit_sdxl.yaml": [{"conditioning_data_dir": "masks", "flip_aug": True}],
    "onetrainer_sdxl.json": [
        {"num_repeats": 3, "recursive": True, "flip_aug": True, "keep_tokens": 2, "enable_wildcard": True},
        {"num_repeats": 2, "caption_tag_dropout_rate": 0.2, "keep_tokens": 0},
    ],
    "diffusion_pipe_flux.toml": [
        {"num_repeats": 5, "caption_prefix": "lrkt,", "caption_separator": ";", "shuffle_caption": True},
        {"num_repeats": 5},
        {"image_dir": "reg", "num_repeats": 1},
    ],
    "simpletuner_flux/config.json": [
        {"num_repeats": 5, "caption_prefix": "lrkt", "enable_wildcard": True, "caption_dropout_rate": 0.05},
        {"class_tokens": "a bird", "caption_extension": (".none",), "num_repeats": 1},
    ],
}


@pytest.mark.parametrize("name", FILES)
def test_text_encoders_are_trained_where_the_other_program_trains_them(work, name):
    """Here they are trained by default, as in sd-scripts."""
    trains_encoders = {"kohya_sdxl.json", "ai_toolkit_sdxl.yaml", "onetrainer_sdxl.json", "diffusion_pipe_sdxl.toml"}
    _, loaded, _ = import_file(name)
    assert loaded.config.adapter.trains_text_encoders == (name in trains_encoders)


@pytest.mark.parametrize("name", SUBSETS)
def test_folders_become_subsets(work, name):
    _, _, datasets = import_file(name)
    subsets = [vars(subset) for dataset in datasets.datasets for subset in dataset.subsets]

    assert [
        {key: subset[key] for key in expected} for subset, expected in zip(subsets, SUBSETS[name], strict=True)
    ] == SUBSETS[name]


SIZES = {
    "kohya_sdxl.json": [(1024, 1024, 3, True)],
    "ai_toolkit_flux.yaml": [(512, 512, 2, True), (768, 768, 2, True)],
    "ai_toolkit_sdxl.yaml": [(1024, 1024, 1, False)],
    "onetrainer_sdxl.json": [(1024, 1024, 4, True), (768, 768, 4, True)],
    "onetrainer_flux.json": [(512, 512, 2, True), (768, 768, 2, True)],
    "diffusion_pipe_flux.toml": [(512, 512, 4, True), (1024, 1024, 1, True), (624, 624, 4, False)],
    "simpletuner_flux/config.json": [(1024, 1024, 2, True), (704, 704, 2, False)],
}


@pytest.mark.parametrize("name", SIZES)
def test_each_resolution_is_a_dataset(work, name):
    _, _, datasets = import_file(name)

    assert [
        (item.resolution.width, item.resolution.height, item.batch_size, item.enable_bucket)
        for item in datasets.datasets
    ] == SIZES[name]


BUCKETS = {
    "kohya_sdxl.json": (32, 320, 1536),
    "ai_toolkit_flux.yaml": (32, 256, 1024),
    "onetrainer_flux.json": (64, 256, 1024),
    "diffusion_pipe_flux.toml": (16, 352, 736),  # 512 by 512, times and divided by the root of 2
    "simpletuner_flux/config.json": (64, 256, 2048),
}


@pytest.mark.parametrize("name", BUCKETS)
def test_buckets_have_the_sides_of_the_other_program(work, name):
    _, _, datasets = import_file(name)
    first = datasets.datasets[0]

    assert (first.bucket_reso_steps, first.min_bucket_reso, first.max_bucket_reso) == BUCKETS[name]


PROMPTS = {
    "kohya_sdxl.json": {"line": "a lorikeet on a branch --w 832 --h 1216 --s 24 --l 6 --d 3"},
    "ai_toolkit_flux.yaml": {"prompt": "lrkt on a branch", "width": 992, "seed": 7, "guidance_scale": 4.0},
    "onetrainer_sdxl.json": {"negative_prompt": "blurry", "sample_steps": 22, "scale": 6.5, "seed": 5},
    "simpletuner_flux/config.json": {"width": 1024, "height": 768, "sample_steps": 20, "guidance_scale": 3.5},
}


@pytest.mark.parametrize("name", PROMPTS)
def test_previews_are_written(work, name):
    source = read_source(Path(name))
    prompt = import_sources([source])[1].prompts[0]

    assert {key: prompt[key] for key in PROMPTS[name]} == PROMPTS[name]


LISTED = {
    "kohya_flux.json": ["split_qkv = true: q, k and v share one"],
    "ai_toolkit_flux.yaml": ['train.content_or_style = "style"', "train.gradient_accumulation_steps = 3: its steps"],
    "onetrainer_sdxl.json": ["perturbation_noise_weight = 0.1", 'timestep_distribution = "SIGMOID"'],
    "onetrainer_flux.json": ['loss_weight_fn = "SIGMA"', "enable_crop_jitter = true (default)"],
    "diffusion_pipe_flux.toml": ["adapter.dropout = 0.1", "directory[0].frame_buckets = [1, 33]"],
    "simpletuner_flux/config.json": ["[1].probability = 0.5", "tread_config = "],
    "simpletuner_sdxl/config.env": ['grad_clip_method = "value" (default)', 'caption_strategy = "filename"'],
}


@pytest.mark.parametrize("name", LISTED)
def test_what_has_no_equal_is_listed(work, name):
    text, _, _ = import_file(name)

    assert [line for line in LISTED[name] if line not in text] == []


def load(name):
    """The content of a test file, with the files that belong to it as the import reads them."""
    source = read_source(DATA / name)
    content = source.content
    return yaml.safe_load(content) if isinstance(content, str) and name.endswith(".yaml") else content


def iter_leaves(value, path=()):
    """Every key path to a value that is no table."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, member in members:
        if isinstance(member, dict) or (isinstance(member, list) and any(isinstance(item, dict) for item in member)):
            yield from iter_leaves(member, (*path, key))
        else:
            yield (*path, key)


def replace_leaf(content, path, change):
    changed = copy.deepcopy(content)
    table = changed
    for key in path[:-1]:
        table = table[key]
    table[path[-1]] = change(table[path[-1]])
    return changed


def change_value(value):
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 + 3
    if isinstance(value, list):
        return [change_value(value[0]), *value[1:]] if value else ["something"]
    if isinstance(value, str):
        switches = {"true": "false", "false": "true"}
        number = value.replace(".", "").replace("e-", "").isdigit()
        return switches.get(value) or ("0.125" if number else f"{value}_changed")
    return value


SILENT = {
    "job",
    "type",  # of a process, a model, an adapter: another program or an error
    "LoRA_type",
    "sdxl",
    "v2",
    "model_list",
    "noise_offset",  # noise_offset_type is Multires, and flow models have none
    "adaptive_noise_scale",
    "LyCORIS_preset",
    "conv_dim",
    "lr_warmup",  # lr_warmup_steps overrides it
    "lr_scheduler_num_cycles",
    "epoch",  # max_train_steps overrides it
    "v_parameterization",
    "huber_schedule",
    "text_encoder_2",
    "default",
    "hf_private",
    "min_ar",
    "crop_aspect",
    "disable_sampling",  # the file has no prompts
    "micro_batch_size_per_gpu",  # that of images overrides it
    "ema",  # GPU or CPU
    "fused",  # the same arithmetic
    "wandb_api_key",  # a secret is shown as ***
}
"""Keys that may change without effect: other keys of the file switch them off, or they choose the program."""


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith(".env")])
def test_no_key_changes_without_a_trace(work, name):
    content = load(name)
    before = describe(import_content(name, content))
    silent = []
    for path in iter_leaves(content):
        if SILENT & set(map(str, path)):
            continue
        try:
            after = describe(import_content(name, replace_leaf(content, path, change_value)))
        except UserError as error:
            after = str(error)
        if after == before:
            silent.append(".".join(map(str, path)))

    assert silent == []


@pytest.mark.parametrize("name", FILES)
def test_unknown_keys_are_listed_with_what_they_change(work, name):
    content = load(name)
    if isinstance(content, str):
        content += "\nexport NO_SUCH_KEY=3\n"
    else:
        content = {**content, "no_such_key": 3}
        process = content.get("config", {}).get("process") if isinstance(content.get("config"), dict) else None
        if process:
            content["config"]["process"][0]["no_such_key"] = 3
    listed = [item for item in import_content(name, content).untaken if "no_such_key" in item.key]

    assert listed
    assert all(item.changes_result and "unknown key" in item.reason for item in listed)


def test_an_unknown_key_gets_the_nearest_name(work):
    result = import_content("kohya_sdxl.json", {**load("kohya_sdxl.json"), "network_dimm": 3})

    assert "unknown key of kohya_ss; did you mean network_dim?" in describe(result)


TABLES = {
    "kohya_flux.json": (kohya_gui.KEY_RULES, ()),
    "ai_toolkit_flux.yaml": (ai_toolkit.TRAIN_RULES, ("config", "process", 0, "train")),
    "onetrainer_flux.json": (onetrainer.RUN_RULES, ()),
    "diffusion_pipe_flux.toml": (diffusion_pipe.RUN_RULES, ()),
    "simpletuner_flux/config.json": (simpletuner.RUN_RULES, ()),
}


@pytest.mark.parametrize("name", TABLES)
def test_every_key_that_changes_the_result_and_has_no_equal_is_listed_when_set(work, name):
    rules, path = TABLES[name]
    missed = []
    for key in [key for key, rule in rules.items() if isinstance(rule, Unsupported)]:
        content = copy.deepcopy(load(name))
        table = content
        for part in path:
            table = table[part]
        table[key] = "unusual"
        result = import_content(name, content)
        if not any(item.changes_result and item.key.endswith(key) for item in result.untaken):
            missed.append(key)

    assert missed == []


OPTIMIZER_TABLES = {
    program.__name__.rpartition(".")[2]: program.OPTIMIZERS
    for program in (ai_toolkit, diffusion_pipe, onetrainer, simpletuner)
}


@pytest.mark.parametrize("program", OPTIMIZER_TABLES)
def test_optimizers_have_the_arguments_that_are_set(program):
    refused = {}
    for name, optimizer in OPTIMIZER_TABLES[program].items():
        info = resolve_optimizer(optimizer.name)
        names = [*optimizer.arguments]
        if program == "onetrainer":
            names += onetrainer.OPTIMIZER_ARGUMENTS.get(name, "").split()
        try:
            function = import_class(info.import_path, "optimizer_type", name, info.pip_package)
        except UserError:  # a package that is not installed
            continue
        if unknown := find_unknown_args(function, [info.arg_aliases.get(name, name) for name in names]):
            refused[name] = unknown

    assert refused == {}


ONETRAINER_OPTIMIZERS = {
    "CAME": (
        {"eps": 1e-20, "beta3": 0.99},
        ["weight_decay=0.01", "betas=(0.9,0.999,0.99)", "eps1=1e-20", "eps2=1e-16"],
    ),
    "ADAFACTOR": (
        {"eps2": 0.01, "relative_step": False, "beta1": 0.5},
        ["relative_step=False", "scale_parameter=False", "warmup_init=False", "beta1=0.5", "eps=(1e-30,0.01)"],
    ),
    "SCHEDULE_FREE_SGD": (
        {"momentum": 0.8, "r": 0.5},
        ["momentum=0.8", "weight_decay=0.0", "r=0.5", "warmup_steps=200"],
    ),
}


@pytest.mark.parametrize("name", ONETRAINER_OPTIMIZERS)
def test_onetrainer_optimizers_keep_their_arguments(name):
    given, expected = ONETRAINER_OPTIMIZERS[name]
    content = {**load("onetrainer_flux.json"), "optimizer": {"optimizer": name, **given}}

    assert import_content("onetrainer_flux.json", content).options["optimizer_args"] == expected


def test_the_rex_schedule_of_onetrainer_keeps_its_curve_and_its_end():
    content = json.loads((DATA / "onetrainer_sdxl.json").read_text("utf-8"))
    content |= {"learning_rate_scheduler": "REX", "learning_rate_min_factor": 0.05, "learning_rate_warmup_steps": 0}
    result = import_content("onetrainer_sdxl.json", content)
    optim = OptimConfig(
        lr_scheduler=result.options["lr_scheduler"],
        lr_scheduler_args=tuple(result.options["lr_scheduler_args"]),
        lr_scheduler_min_lr_ratio=result.options["lr_scheduler_min_lr_ratio"],
    )
    progress = 0.7
    expected = 0.05 + 0.95 * (1 - progress) / (0.1 + 0.9 * (1 - progress))
    assert build_lr_schedule(optim, 10)(7) == pytest.approx(expected, rel=1e-9)


def test_switches_of_onetrainer_optimizers_are_listed():
    optimizer = {"optimizer": "ADAMW", "fused": True, "maximize": True, "cautious": True, "foreach": True}
    listed = import_content("x.json", {**load("onetrainer_flux.json"), "optimizer": optimizer}).untaken

    assert {item.key: item.changes_result for item in listed if item.key.startswith("optimizer.")} == {
        "optimizer.maximize": True,
        "optimizer.cautious": True,
        "optimizer.foreach": False,
    }


def test_secrets_are_not_written(work):
    for name in ("kohya_sdxl.json", "diffusion_pipe_flux.toml"):
        text, _ = run_import_config([name, "--output_dir", name.partition(".")[0]])
        assert "secret-of-wandb" not in text
        assert '"***"' in text

    written = [path for path in work.glob("*/*") if path.suffix in (".toml", ".txt", ".json")]
    assert not any("secret-of-wandb" in path.read_text("utf-8") for path in written)


def test_companion_files_can_be_given_and_are_missed(work, capsys):
    os.rename("onetrainer_concepts.json", "elsewhere.json")
    text, _ = run_import_config(["onetrainer_sdxl.json", "--output_dir", "a"])
    assert 'concept_file_name = "onetrainer_concepts.json": no such file' in text
    assert "no image folder was found in the file" in text

    text, _ = run_import_config(["elsewhere.json", "onetrainer_sdxl.json", "--output_dir", "b"])
    assert "OneTrainer, sdxl" in text
    assert (work / "b" / "onetrainer_sdxl.dataset.toml").exists()


def test_nothing_is_overwritten_unless_asked(work, capsys):
    assert run_tool(["import", "kohya_flux.json"]) == 0
    capsys.readouterr()

    assert run_tool(["import", "kohya_flux.json"]) == EXIT_USER_ERROR
    assert capsys.readouterr().err.splitlines()[1:] == [
        "  kohya_flux.toml: already exists; add --overwrite to replace it"
    ]
    assert run_tool(["import", "kohya_flux.json", "--overwrite"]) == 0


WRONG = {
    "numbers.json": ("[1, 2, 3]", "not a training configuration of"),
    "broken.json": ('{"a": 1,}', "broken.json:1: not valid JSON"),
    "broken.yaml": ("a: [1\nb: 2", "not valid YAML"),
    "ours.toml": ("network_dim = 8", "not a training configuration of"),
    "run.toml": ('network_module = "networks.lora_krea2"', "needs no import; give it to --config_file"),
    "notes.md": ("# notes", "not a .json, .yaml, .toml or .env file"),
    "mochi.toml": ('[model]\ntype = "mochi"', 'model.type = "mochi": not supported'),
    "fine.json": ('{"training_method": "FINE_TUNE", "model_type": "WUERSTCHEN_2"}', 'model_type = "WUERSTCHEN_2": not'),
    "dreambooth.json": ('{"model_list": "custom", "sdxl": true}', "no LoRA_type"),
    "slider.yaml": ("config: {process: [{type: slider}]}", 'process type = "slider"'),
    "speech.json": ('{"model_family": "wan_s2v", "model_type": "lora"}', 'model_family = "wan_s2v"'),
    "form.yaml": (
        "config: {process: [{type: sd_trainer, network: {type: lora}, model: {is_flux: true}, sample: {samples: [3]}}]}",
        "a value has another form than ai-toolkit writes",
    ),
    "rate.json": ('{"LoRA_type": "Standard", "learning_rate": "fast"}', 'learning_rate: expected a number, got "fast"'),
    "dataset.toml": ("[[directory]]\npath = 'x'", "a dataset file of diffusion-pipe; give the training file, too"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_gives_one_clear_line(work, capsys, name):
    text, expected = WRONG[name]
    Path(name).write_text(text, encoding="utf-8")

    assert run_tool(["import", name]) == EXIT_USER_ERROR
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert name in lines[1]
    assert expected in lines[1]


def test_missing_files_and_flags_are_reported(work, capsys):
    assert run_tool(["import", "nowhere.json"]) == EXIT_USER_ERROR
    assert "nowhere.json: no such file" in capsys.readouterr().err
    assert run_tool(["import", "kohya_sdxl.json", "ai_toolkit_flux.yaml"]) == EXIT_USER_ERROR
    assert "one configuration at a time" in capsys.readouterr().err
    assert run_tool(["import", "--output"]) == EXIT_USER_ERROR
    assert "--output: unknown option" in capsys.readouterr().err
    assert run_tool(["import", "--help"]) == 0


def test_arguments_of_schedules_are_taken_over():
    content = {**load("kohya_sdxl.json"), "lr_scheduler": "cosine", "lr_scheduler_args": "num_cycles=1.5"}
    assert import_content("kohya_sdxl.json", content).options["lr_scheduler_args"] == ["num_cycles=1.5"]
    content |= {"lr_scheduler": "warmup_stable_decay", "lr_scheduler_num_cycles": "3"}
    assert import_content("kohya_sdxl.json", content).options["lr_scheduler_num_cycles"] == 3
    content |= {"lr_scheduler": "constant"}
    assert "lr_scheduler_args" not in import_content("kohya_sdxl.json", content).options

    content = {**load("simpletuner_flux/config.json"), "lr_scheduler": "polynomial"}
    result = import_content(DATA / "simpletuner_flux/config.json", content)
    assert result.options["lr_scheduler_args"] == ["lr_end=4e-07"]


def test_dropouts_of_lycoris_are_taken_over_for_lora():
    settings = {"linear_dim": 4, "linear_alpha": 2, "dropout": 0.1, "rank_dropout": 0.2, "use_tucker": True}
    taken = {}
    for algorithm in ("lora", "lokr"):
        result = ImportedConfig("SimpleTuner")
        _read_lycoris(KeyReader({"algo": algorithm, **settings}, result))
        taken[algorithm] = result.options.get("network_dropout"), result.options.get("network_args", [])
        assert {each.key for each in result.untaken if each.changes_result} >= (
            {"use_tucker"} if algorithm == "lora" else {"dropout", "rank_dropout"}
        )
    assert taken["lora"] == (0.1, ["rank_dropout=0.2"])
    assert taken["lokr"][0] is None and "use_tucker=True" in taken["lokr"][1]


def test_the_strength_of_samples_is_taken_over_and_other_settings_are_named():
    content = load("ai_toolkit_flux.yaml")
    content["config"]["process"][0]["sample"] |= {"network_multiplier": 0.5, "do_cfg_norm": True}
    result = import_content("ai_toolkit_flux.yaml", content)
    assert {prompt["network_multiplier"] for prompt in result.prompts} == {0.5}
    assert any(each.key.endswith("do_cfg_norm") for each in result.untaken)
