"""The dataset, the length and the previews of a kohya_ss GUI file."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...config.options import iter_options
from ...config.schema import RunConfig
from ...models.detect import get_size_multiple
from .equivalents import FLOW_FAMILIES
from .imported import (
    OUR_DEFAULTS,
    KeyReader,
    to_integer,
    to_positive_integer,
    to_switch,
    to_text,
)
from .keys import kohya_gui as keys

_SECRETS = {"wandb_api_key": "run wandb login", "huggingface_token": "run hf auth login"}
_SAMPLERS = {option.name: option.value_type for option in iter_options(RunConfig)}["sample_sampler"]


def read_keys(reader: KeyReader, table: Mapping[str, keys.GuiKey], target: dict[str, Any] | None = None) -> None:
    for name, key in table.items():
        value = _read_key(reader, name, key)
        if value is None:
            continue
        if target is None:
            reader.result.set_option(key.option, value, name in reader)
        elif value != OUR_DEFAULTS.get(key.option):
            target[key.option] = value


def _read_key(reader: KeyReader, name: str, key: keys.GuiKey) -> Any:
    """Return what sd-scripts would get: the GUI drops 0, false and empty values."""
    text = reader.table.get(name)
    value = reader.read(name, key.gui_default, None if text == "" else key.convert)
    return key.script_default if value in ("", 0, None) else value  # False equals 0


def read_dataset(reader: KeyReader) -> None:
    result = reader.result
    read_keys(reader, keys.DATASET_KEYS, result.general)
    step, multiple = result.general.get("bucket_reso_steps", 0), get_size_multiple(result.family)
    if 0 < step < multiple and multiple % step == 0:
        result.general["bucket_reso_steps"] = multiple
        reader.list_change("bucket_reso_steps", f"finer than the model can train; buckets are multiples of {multiple}")
    config = reader.read("dataset_config", None, to_text)
    folder, reg_folder = (reader.read(name, None, to_text) for name in ("train_data_dir", "reg_data_dir"))
    if config:
        renamed = {"batch_size": "train_batch_size"}
        result.options["dataset_config"] = config
        result.options |= {renamed.get(name, name): value for name, value in result.general.items()}
        result.general.clear()
    elif folder:
        subsets = [*list_repeat_folders(reader, "train_data_dir", folder)]
        if reg_folder:
            subsets += [table | {"is_reg": True} for table in list_repeat_folders(reader, "reg_data_dir", reg_folder)]
        result.datasets.append({"subsets": subsets})


def list_repeat_folders(reader: KeyReader, key: str, folder: str) -> list[dict[str, Any]]:
    """Return a subset for each subfolder ``REPEATS_NAME``, as sd-scripts reads a folder of images."""
    root = Path(folder).expanduser()
    folders = sorted(item for item in root.iterdir() if item.is_dir()) if root.is_dir() else []
    found = [(match, item) for item in folders if (match := re.fullmatch(r"(\d+)_(.+)", item.name))]
    if not found:
        where = "has no subfolders REPEATS_NAME" if root.is_dir() else "is not on this machine"
        reader.list_change(key, f"{where}; give each subfolder a [[datasets.subsets]] with image_dir and num_repeats")
        return [{"image_dir": folder}]
    return [
        {"image_dir": f"{folder.rstrip('/')}/{item.name}", "num_repeats": int(match[1]), "class_tokens": match[2]}
        for match, item in found
    ]


def read_length(reader: KeyReader) -> None:
    result = reader.result
    epochs = reader.read("max_train_epochs", None, to_positive_integer)
    steps = reader.read("max_train_steps", 1600, to_positive_integer)
    gui_epochs = reader.read("epoch", 1, to_integer)
    if epochs:
        result.options["max_train_epochs"] = epochs
    elif steps:
        result.options["max_train_steps"] = steps
        if "max_train_steps" not in reader and gui_epochs > 1:
            reason = (
                "the GUI trains 1600 steps without max_train_steps; set max_train_epochs instead to train by epochs"
            )
            reader.list_change("epoch", reason)
    elif "dataset_config" in result.options:
        result.options["max_train_steps"] = 1600  # sd-scripts' default
    else:
        result.options["max_train_epochs"] = max(1, gui_epochs)


def read_previews_and_logs(reader: KeyReader) -> None:
    result = reader.result
    prompts = [line for line in str(reader.read("sample_prompts", "")).splitlines() if line.strip()]
    intervals = {
        name: reader.read(name, None, to_positive_integer) for name in ("sample_every_n_steps", "sample_every_n_epochs")
    }
    sampler = reader.read("sample_sampler", "euler_a", to_text)
    if prompts and any(intervals.values()):
        result.prompts = [{"line": line} for line in prompts]
        for name, value in intervals.items():
            result.set_option(name, value)
        if result.family not in FLOW_FAMILIES and sampler in _SAMPLERS:
            result.set_option("sample_sampler", sampler)
        elif result.family not in FLOW_FAMILIES:
            reader.list_harmless("sample_sampler", "not available for previews; the default sampler is used")
    for name, command in _SECRETS.items():
        if reader.read(name):
            result.list_harmless(name, "***", f"keys are not stored in files; {command}")
    if reader.read("use_wandb", False, to_switch):
        result.set_option("log_with", "wandb")
    tracker = result.options.get("log_with")
    for name in ("wandb_run_name", "log_tracker_name", "log_tracker_config", "log_config"):
        value = reader.read(name)
        if value and (tracker in ("wandb", "all") or (tracker and name != "wandb_run_name")):
            result.set_option(name, value)
    if "huggingface_repo_id" in result.options:
        for name in ("huggingface_path_in_repo", "huggingface_repo_visibility"):
            result.set_option(name, reader.read(name, None, to_text))
