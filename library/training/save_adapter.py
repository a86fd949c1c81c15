"""Save the adapter: convert it to the file format, write and verify the LoRA file.

Old files are deleted by ``checkpoint_retention``.

Every rank holds the whole adapter, whatever the strategy, so that the main rank writes it alone.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from ..adapters import file_writer, injection
from ..adapters.client_compatibility import (
    choose_file_format,
    format_client_losses,
    list_client_losses,
    needs_equal_alphas,
)
from ..adapters.file_comparison import compare_file_with_model
from ..adapters.file_reader import InvalidAdapterFileError, read_safetensors
from ..adapters.injection import Adapter
from ..adapters.kohya_diffusers_comfyui_keys import (
    FileFormat,
    convert_from_file_format,
    convert_to_file_format,
    writes_fused_layers,
)
from ..adapters.metadata import add_model_hashes
from ..adapters.module_adapter import group_by_module
from ..config.schema_output import SaveConfig
from ..dataloader.prepare import PreparedData
from ..errors import UserError
from ..models.base import Family
from ..models.collect_component_keys import collect_component_keys
from ..models.sampling import use_eval_mode
from .adapter_parts import AdapterPart, list_adapter_parts
from .checkpoint_retention import AdapterRetention
from .network_weights import split_idle_layers
from .save_weights import SaveWeights, reserve_disk_space
from .state import TrainingRun

logger = logging.getLogger(__name__)
MAX_DIFFERENCES_SHOWN = 3
T = TypeVar("T")


class SaveAdapter(SaveWeights):
    """Save the LoRA file."""

    def __init__(
        self,
        config: SaveConfig,
        adapter: Adapter,
        prepared: PreparedData,
        started_at: float,
        retention: AdapterRetention | None = None,
    ):
        super().__init__(config, prepared, started_at, retention)
        self.adapter = adapter

    def _save_files(self, run: TrainingRun, path: Path) -> list[Path]:
        """Write the file, or one for each expert."""
        parts = {
            path.with_name(f"{path.stem}{part.suffix}{path.suffix}"): part
            for part in list_adapter_parts(run.task.family)
        }
        for part_path, part in parts.items():
            self._save_file(run, part_path, part)
        return list(parts)

    def _prepare(self, run: TrainingRun) -> None:
        """Collect metadata, and raise if the adapter does not fit ``save_format``."""
        super()._prepare(run)
        part = next(iter(list_adapter_parts(run.task.family)))
        file = self._build_file(run, part.select_model(run.strategy.unwrap_model(run.model)), part)
        logger.info("LoRA key names: %s", file.file_format)
        if file.client_losses:
            logger.warning(
                "LoRA file: not every program reads it right (docs/files.md): %s",
                format_client_losses(file.client_losses),
            )

    def _save_file(self, run: TrainingRun, path: Path, part: AdapterPart) -> None:
        trained = part.select_model(run.strategy.unwrap_model(run.model))
        with use_eval_mode(trained):  # without dropout, which the verification would see
            run.strategy.comm.run_on_main(lambda: self._write_file(run, path, trained, part))
        logger.info("saved %s", path)

    def _build_file(self, run: TrainingRun, model: nn.Module, part: AdapterPart) -> "AdapterFile":
        state, task = injection.get_adapter_state_dict(model), run.task
        name = task.family.facts.denoiser_name
        adapter, pipe = part.select_adapter(self.adapter, name), part.select_pipe(task.pipe, name)
        file = build_adapter_file(state, adapter, task.family, pipe, self.config.save_format)
        tensors = file_writer.cast_tensors(file.tensors, self.config.save_precision)
        if file.file_format != "diffusers":  # whose files cannot hold embeddings
            tensors |= self.adapter.kept.embeddings
        return replace(file, tensors=tensors)

    def _write_file(self, run: TrainingRun, path: Path, model: nn.Module, part: AdapterPart) -> None:
        file = self._build_file(run, model, part)
        metadata = self.build_metadata(run) | ({} if self.config.no_metadata else dict(file.metadata))
        metadata = add_model_hashes(file.tensors, metadata)
        # Only the first and the last file are compared with the model in memory; comparing all would take too long.
        is_compared = not self.saved_paths or run.state.step >= run.plan.steps
        # In the first step of a warm-up the learning rate is 0, and a zero update is correct.
        if run.state.step < run.plan.steps:
            reserve_disk_space(path, sum(each.nbytes for each in file.tensors.values()), run)
        file_writer.write_adapter_file(
            path,
            file.tensors,
            metadata,
            is_trained=part.has_trained(run),
            check=(lambda each: self._verify_file(run, each, path, model, part=part, file=file))
            if is_compared
            else None,
        )

    def _verify_file(
        self, run: TrainingRun, temporary: Path, path: Path, model: nn.Module, *, part: AdapterPart, file: "AdapterFile"
    ) -> None:
        """Read the temporary file back and compare the update of each layer with that of the adapter in memory."""
        tensors, metadata = read_safetensors(temporary, path)
        family, name = run.task.family, run.task.family.facts.denoiser_name
        adapter, pipe = part.select_adapter(self.adapter, name), part.select_pipe(run.task.pipe, name)
        content = convert_from_file_format(tensors, {**metadata, **file.metadata}, collect_component_keys(family, pipe))
        with run.strategy.bypass_tensor_parallel():
            trained, _ = split_idle_layers(content, adapter.kept.alphas)
            differences = list(compare_file_with_model(model, trained, adapter.alphas))
        if differences:
            more = len(differences) - MAX_DIFFERENCES_SHOWN
            shown = "; ".join(differences[:MAX_DIFFERENCES_SHOWN]) + (f" (and {more} more)" if more > 0 else "")
            raise InvalidAdapterFileError(f"{path} differs from the trained adapter: {shown}")

    def _get_rank_and_alpha(self, run: TrainingRun) -> tuple[int | str, float | str]:
        if not run.config.adapter.dim_from_weights:
            return self.adapter.rank, self.adapter.alpha
        sizes = self.adapter.rank_alphas.values()
        return _get_common_value(size.rank for size in sizes), _get_common_value(size.alpha for size in sizes)


@dataclass(frozen=True)
class AdapterFile:
    """The contents of a LoRA file to be written."""

    tensors: dict[str, Tensor]
    metadata: Mapping[str, str]
    """The part of the metadata that is needed to read the alphas back."""
    file_format: FileFormat
    client_losses: Mapping[str, str]
    """The parts of the file that other programs do not read right, by program."""


def build_adapter_file(
    state_dict: Mapping[str, Tensor], adapter: Adapter, family: Family, pipe: Any, save_format: str
) -> AdapterFile:
    """Build the tensors of a LoRA file; with ``save_format`` auto, in the layout that most programs read."""
    state, alphas = adapter.kept.add_to(dict(state_dict), adapter.alphas)
    components, adapters = collect_component_keys(family, pipe), group_by_module(state, alphas)
    is_auto = save_format == "auto"
    form: Any = choose_file_format(adapters, components, family.facts.lora.format) if is_auto else save_format
    equal_alphas = is_auto and needs_equal_alphas(adapters, components, form)
    if not writes_fused_layers(form, adapters, components):
        state, alphas = adapter.kept.add_to(dict(state_dict), adapter.alphas, fuses_layers=False)
    try:
        tensors, metadata = convert_to_file_format(state, alphas, components, form, equal_alphas=equal_alphas)
    except UserError as error:
        raise UserError(f"save_format {save_format}: {error}") from None
    return AdapterFile(tensors, metadata, form, list_client_losses(adapters, components, form, equal_alphas))


def _get_common_value(values: Iterable[T]) -> T | str:
    """Return the common value, or what sd-scripts writes when values differ."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else "Dynamic"
