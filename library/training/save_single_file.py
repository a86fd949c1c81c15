"""Save the model of a full training as one safetensors file, with the names of the file of the base model.

The file is that of the base model with other values: what is not trained is copied from it, the VAE for example.  So
it is read by everything that reads the base model.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ..adapters.file_writer import SAVE_DTYPES
from ..atomic_files import fsync_dir, replace_path
from ..config.schema import RunConfig
from ..config.schema_output import SaveConfig
from ..dataloader.prepare import PreparedData
from ..errors import UserError
from ..models.base import Family
from ..models.checkpoint_header import read_checkpoint_header, read_safetensors_header
from ..models.checkpoint_shards import list_shard_paths, open_checkpoint
from ..models.collect_component_keys import list_adaptable_components
from ..models.component_files import DTYPE_NAMES, ReadWeight, verify_safetensors, write_safetensors
from ..models.detect import DetectedModel
from ..models.original_layout import OriginalTensor, read_original_layout
from ..models.trained_components import select_trained_text_encoders
from ..problems import report_file
from .checkpoint_retention import AdapterRetention
from .save_model import SaveFullModel, TrainedComponent, collect_tensors, list_merged_components
from .save_weights import reserve_disk_space
from .state import TrainingRun

logger = logging.getLogger(__name__)


class SaveSingleFile(SaveFullModel):
    """Save the whole model as a file with the names of that of the base model."""

    def __init__(
        self,
        config: SaveConfig,
        detected: DetectedModel,
        prepared: PreparedData,
        started_at: float,
        retention: AdapterRetention | None = None,
    ):
        super().__init__(config, detected, prepared, started_at, retention)
        self.base = Path(detected.path_or_id)
        self._layouts: dict[str, list[OriginalTensor]] = {}

    def _list_components(self, run: TrainingRun) -> list[TrainedComponent]:
        """List the trained components, and those of the file into which LoRA files were merged."""
        models = super()._list_components(run)
        names = {each.name for each in models}
        merged = {name: model for name, model in list_merged_components(run).items() if self._has_file(name, names)}
        return models + [TrainedComponent(name, model, collect_tensors(model)) for name, model in merged.items()]

    def _has_file(self, component: str, written: Set[str]) -> bool:
        """Whether the file has a component that is not among those that are written, and is not read elsewhere."""
        is_in_file = component in self.detected.single_file_components
        return is_in_file and component not in (*written, *self.detected.component_sources)

    def _write_model(
        self, run: TrainingRun, path: Path, models: Sequence[TrainedComponent], read_weight: ReadWeight
    ) -> None:
        """Write the file beside ``path``, and give it its name when it was read back."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        path.parent.mkdir(parents=True, exist_ok=True)
        dtype = None if self.config.save_precision is None else SAVE_DTYPES[self.config.save_precision]
        metadata = {"format": "pt", **self.build_metadata(run)}
        try:
            with self._open_tensors(run, models, read_weight) as (tensors, read, copied):
                if run.state.step < run.plan.steps:
                    itemsize = None if dtype is None else dtype.itemsize
                    sizes = (each.numel() * (itemsize or each.dtype.itemsize) for each in tensors.values())
                    reserve_disk_space(path, sum(sizes), run)
                copied = set() if dtype is not None else copied
                write_safetensors(temporary, tensors, dtype, metadata, read_weight=read, copied=copied)
                verify_safetensors(temporary, tensors, dtype, read)
            replace_path(temporary, path)
            fsync_dir(path.parent)
        except OSError as error:
            raise UserError(report_file(path, f"cannot be written: {error.strerror or error}")) from error
        finally:
            temporary.unlink(missing_ok=True)

    @contextmanager
    def _open_tensors(
        self, run: TrainingRun, models: Sequence[TrainedComponent], read_weight: ReadWeight
    ) -> Iterator[tuple[Mapping[str, Tensor], ReadWeight, set[str]]]:
        """Give stand-ins of the file's tensors by their keys, the function that reads each, and the keys of copies."""
        built = {
            each.key: (each, model.tensors)
            for model in models
            for each in self._get_layout(run.task.family, model.name)
            if all(part.weight in model.tensors for part in each.runs)
        }
        with open_checkpoint(self.base) as file:
            stand_ins = _list_stand_ins(self.base)
            for key, (original, weights) in built.items():
                dtype = weights[original.runs[0].weight].dtype
                stand_ins[key] = torch.empty(original.shape, dtype=dtype, device="meta")
            keys = {id(stand_in): key for key, stand_in in stand_ins.items()}

            def read(stand_in: Tensor) -> Tensor:
                key = keys[id(stand_in)]
                if key not in built:
                    return file.get_tensor(key)
                original, weights = built[key]
                return original.build(lambda name: read_weight(weights[name]))

            yield stand_ins, read, stand_ins.keys() - built.keys()

    def _get_layout(self, family: Family, component: str) -> list[OriginalTensor]:
        if component not in self._layouts:
            self._layouts[component] = read_original_layout(family, self.detected, component)
        return self._layouts[component]


def _list_stand_ins(path: Path) -> dict[str, Tensor]:
    """List the tensors of a file, or of one in several parts, by shape and data type, on the meta device."""
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    return {
        key: torch.empty(shape, dtype=dtypes[header.dtypes[key]], device="meta")
        for header in map(read_safetensors_header, list_shard_paths(path))
        for key, shape in header.shapes.items()
    }


def saves_single_file(config: RunConfig, family: Family, detected: DetectedModel) -> bool:
    """Whether a full training saves one file: if asked for, or if the base model is one and nothing is against it."""
    if config.save.save_model_as is not None:
        return config.save.save_model_as == "safetensors"
    obstacle = find_single_file_obstacle(config, family, detected)
    if obstacle and detected.source_type == "file":
        logger.info("the model will be saved as a folder of diffusers: %s", obstacle)
    return not obstacle


def find_single_file_obstacle(config: RunConfig, family: Family, detected: DetectedModel) -> str:
    """Say why the trained model cannot be saved as one file; empty: it can."""
    facts = family.facts
    components = [facts.denoiser_name, *select_trained_text_encoders(config.adapter, config.optim, facts)]
    merged = list_adaptable_components(family) if config.adapter.base_weights else ()
    components += [name for name in merged if name in detected.single_file_components and name not in components]
    if detected.source_type != "file":
        return "the base model is no single file, whose names of weights the file would have"
    if read_checkpoint_header(Path(detected.path_or_id)).formats:
        return "the base model is stored quantized"
    if elsewhere := [name for name in ("vae", *components) if name in detected.component_sources]:
        return f"the {elsewhere[0]} is in another file than the base model"
    for name in components:
        try:
            read_original_layout(family, detected, name)
        except (ValueError, KeyError) as error:
            return f"weights of the {name} have another form in the file ({error})"
    return ""
