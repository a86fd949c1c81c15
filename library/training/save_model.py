"""Save the model of a full training (``--train full``) as a folder of diffusers, which every part of it completes.

Trained components are written from memory, tensor by tensor; the others come from the base model: copied where it is a
folder, else loaded again, since training needs neither a cached VAE nor cached text encoders.
"""

import filecmp
import json
import logging
import os
import shutil
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..adapters.component_key_names import clean_parameter_name
from ..adapters.file_writer import SAVE_DTYPES
from ..atomic_files import fsync_dir, replace_path
from ..config.schema_output import SaveConfig
from ..dataloader.prepare import PreparedData
from ..distributed.devices import HOST, MIXED_PRECISION_DTYPES
from ..errors import UserError
from ..models.base import Family
from ..models.collect_component_keys import list_adaptable_components
from ..models.component_files import ReadWeight, cast_weight, read_whole, write_weights
from ..models.detect import DetectedModel, get_config_reader
from ..models.loading import disable_progress_bars
from ..models.model_configs import is_component, read_required
from ..models.sampling import use_eval_mode
from ..parallel.sharded_weights import run_on_main_with_whole_weights
from ..problems import report_file
from .checkpoint_retention import AdapterRetention
from .save_weights import SaveWeights, reserve_disk_space
from .state import TrainingRun

logger = logging.getLogger(__name__)
INDEX_FILE = "model_index.json"
FAULTY_DISK = "the disk may be faulty"


class SaveFullModel(SaveWeights):
    """Save the model of a full training; the main rank gathers its weights, of which each rank may hold a part."""

    title = "model"

    def __init__(
        self,
        config: SaveConfig,
        detected: DetectedModel,
        prepared: PreparedData,
        started_at: float,
        retention: AdapterRetention | None = None,
    ):
        super().__init__(config, prepared, started_at, retention)
        self.detected = detected

    def _save_files(self, run: TrainingRun, path: Path) -> list[Path]:
        trained = run.strategy.unwrap_model(run.model)
        models = self._list_components(run)
        weights = [tensor for each in models for tensor in each.tensors.values()]
        with use_eval_mode(trained):
            run_on_main_with_whole_weights(
                run.strategy.comm,
                weights,
                lambda read_weight: self._write_model(run, path, models, read_weight),
                run.strategy.find_gather,
            )
        logger.info("saved %s", path)
        return [path]

    def _list_components(self, run: TrainingRun) -> "list[TrainedComponent]":
        """List the components that are written from memory: those that are trained."""
        return [
            TrainedComponent(name, model, collect_tensors(model, run.strategy.get_stand_in))
            for name, model in run.strategy.unwrap_model(run.model).named_children()
            if any(parameter.requires_grad for parameter in model.parameters())
        ]

    @abstractmethod
    def _write_model(
        self, run: TrainingRun, path: Path, models: Sequence["TrainedComponent"], read_weight: ReadWeight
    ) -> None:
        """Write the model beside ``path``, and give it its name when it is complete; the main rank calls it."""


class SaveModel(SaveFullModel):
    """Save the whole model as a folder of diffusers."""

    suffix = ""

    def _write_model(
        self, run: TrainingRun, path: Path, models: Sequence["TrainedComponent"], read_weight: ReadWeight
    ) -> None:
        """Write the folder beside ``path``, and give it its name when it is complete."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        if run.state.step < run.plan.steps:
            reserve_disk_space(path, self._count_bytes(models), run)
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            self._write_components(run, temporary, {model.name: model for model in models}, read_weight)
            _replace_folder(temporary, path)
        except (OSError, SafetensorError) as error:  # which safetensors raises on a full disk
            reason = getattr(error, "strerror", None) or error
            raise UserError(report_file(path, f"cannot be written: {reason}")) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _count_bytes(self, models: Sequence["TrainedComponent"]) -> int:
        """Count the bytes of the weights in the precision of the files, and of the components that are copied."""
        dtype = None if self.config.save_precision is None else SAVE_DTYPES[self.config.save_precision]
        tensors = [tensor for model in models for tensor in model.tensors.values()]
        num_bytes = sum(each.numel() * (each.dtype if dtype is None else dtype).itemsize for each in tensors)
        if self.detected.source_type != "folder":
            return num_bytes
        names = {*(read_required(get_config_reader(self.detected), INDEX_FILE))} - {model.name for model in models}
        files = (file for name in names for file in (Path(self.detected.path_or_id) / name).rglob("*"))
        return num_bytes + sum(file.stat().st_size for file in files if file.is_file())

    def _write_components(
        self, run: TrainingRun, folder: Path, models: Mapping[str, "TrainedComponent"], read_weight: ReadWeight
    ) -> None:
        read = get_config_reader(self.detected)
        index, pipe = dict(read_required(read, INDEX_FILE)), run.task.pipe
        metadata = {"format": "pt", **self.build_metadata(run)}
        dtype = None if self.config.save_precision is None else SAVE_DTYPES[self.config.save_precision]
        merged = list_merged_components(run)
        for name, entry in list(index.items()):
            if not is_component(entry):
                continue
            if name in models:
                write_component(folder / name, models[name], dtype, metadata, read_weight)
            elif name in merged:
                component = TrainedComponent(name, merged[name], collect_tensors(merged[name]))
                write_component(folder / name, component, dtype, metadata)
            elif name == "scheduler":
                pipe.scheduler.save_pretrained(folder / name)
            elif not self._copy_component(run, name, folder / name):
                index[name] = [None, None]
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, ensure_ascii=False) + "\n", "utf-8")

    def _copy_component(self, run: TrainingRun, name: str, target: Path) -> bool:
        """Copy a component that is not trained from the base model; False if this program knows none of this name."""
        source = Path(self.detected.path_or_id) / name
        if self.detected.source_type == "folder" and name not in self.detected.component_sources:
            if source.is_dir():
                copy_folder(source, target)
            return source.is_dir()
        family: Family = run.task.family
        if name not in family.facts.components:
            component = getattr(run.task.pipe, name, None)  # such as an image processor, which has no weights
            if component is not None and hasattr(component, "save_pretrained"):
                component.save_pretrained(target)
                return True
            return False
        dtype = MIXED_PRECISION_DTYPES[run.strategy.mixed_precision]
        if self.config.save_precision is not None:
            dtype = SAVE_DTYPES[self.config.save_precision]
        component = getattr(family.load(self.detected, dtype, (name,), device=HOST), name)
        if isinstance(component, nn.Module):
            save_and_verify(component, target, component.state_dict())
        else:
            component.save_pretrained(target)
        return True


def copy_folder(source: Path, target: Path) -> None:
    """Copy a folder, and compare every file with its copy."""
    shutil.copytree(source, target)
    for file in sorted(each for each in source.rglob("*") if each.is_file()):
        copied = target / file.relative_to(source)
        if not filecmp.cmp(file, copied, shallow=False):
            raise UserError(report_file(copied, f"reads back other than {file}", FAULTY_DISK))


def save_and_verify(model: Any, folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a model with these weights as its library does, and compare them with what is read."""
    read: dict[str, Tensor] = {}
    with disable_progress_bars():
        if hasattr(model, "save_config"):  # of diffusers, whose files have the names of the modules
            model.save_pretrained(folder)
            for path in folder.glob("*.safetensors"):
                read |= load_file(path)
        else:
            model.save_pretrained(folder, state_dict=dict(tensors))
            read = type(model).from_pretrained(folder, dtype="auto", use_safetensors=True).state_dict()
    for name, tensor in tensors.items():
        if name not in read or not torch.equal(read[name], tensor):
            raise UserError(report_file(folder, f"{name} reads back other than written", FAULTY_DISK))


def list_merged_components(run: TrainingRun) -> dict[str, nn.Module]:
    """List the loaded components that may differ from the base model by ``base_weights``."""
    names = list_adaptable_components(run.task.family) if run.config.adapter.base_weights else ()
    found = {name: getattr(run.task.pipe, name, None) for name in names}
    return {name: module for name, module in found.items() if isinstance(module, nn.Module)}


@dataclass(frozen=True)
class TrainedComponent:
    """A component with its weights by their names in files, of which each rank may hold a part."""

    name: str
    model: Any
    tensors: Mapping[str, Tensor]


def collect_tensors(model: nn.Module, get_stand_in: Callable[[Tensor], Tensor] = torch.detach) -> dict[str, Tensor]:
    """Collect the weights of a component by their names in files, or what stands for those that are sharded."""
    tensors = model.state_dict(keep_vars=True)
    return {clean_parameter_name(name): get_stand_in(tensor) for name, tensor in tensors.items()}


def write_component(
    folder: Path,
    component: TrainedComponent,
    dtype: torch.dtype | None,
    metadata: Mapping[str, str],
    read_weight: ReadWeight = read_whole,
) -> None:
    """Write the configuration and the weights of a trained component, and verify the weights."""
    folder.mkdir(parents=True, exist_ok=True)
    model = component.model
    if hasattr(model, "save_config"):  # of diffusers, whose files have the names of the modules
        model.save_config(folder)
        stem = "diffusion_pytorch_model"
        write_weights(folder, stem, component.tensors, dtype, metadata, read_weight=read_weight)
        return
    # transformers gives some weights other names in files, as those of the first releases.
    tensors = {name: cast_weight(read_weight(tensor), dtype) for name, tensor in component.tensors.items()}
    save_and_verify(model, folder, tensors)


def _replace_folder(temporary: Path, path: Path) -> None:
    """Give the folder its name; an old folder of this name is removed only after the new one is complete."""
    old = path.with_name(f".{path.name}.{os.getpid()}.old")
    if path.exists():
        replace_path(path, old)
    try:
        replace_path(temporary, path)
    except OSError:
        if old.exists():
            replace_path(old, path)
        raise
    fsync_dir(path.parent)
    shutil.rmtree(old, ignore_errors=True)
