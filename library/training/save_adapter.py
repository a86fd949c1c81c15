"""Save the adapter: convert it to the file format, write and verify the LoRA file.

Old files are deleted by ``checkpoint_retention``.

Every rank holds the whole adapter, whatever the strategy, so that the main rank writes it alone.
"""

import hashlib
import logging
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PureWindowsPath
from typing import Any, TypeVar

from torch import Tensor, nn

from .. import __version__
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
from ..adapters.kohya_diffusers_comfyui_keys import FileFormat, convert_from_file_format, convert_to_file_format
from ..adapters.metadata import BaseModelMetadata, RunMetadata, add_model_hashes, build_metadata
from ..adapters.module_adapter import group_by_module
from ..atomic_files import compute_sha256
from ..cache.paths import format_bytes
from ..config.schema import ModelConfig
from ..config.schema_output import SaveConfig
from ..dataloader.batch_plan import get_planned_stages
from ..dataloader.dataset_metadata import build_dataset_metadata
from ..dataloader.prepare import PreparedData
from ..errors import UserError
from ..models.base import Family
from ..models.collect_component_keys import collect_component_keys
from ..models.sampling import use_eval_mode
from ..optim.optimizers import use_eval_weights
from ..problems import report_file
from ..randomness import Purpose, derive_seed
from .adapter_parts import AdapterPart, list_adapter_parts
from .checkpoint_retention import AdapterRetention
from .hub_upload import HubUploader
from .network_weights import split_idle_layers
from .state import TrainingRun, is_interval_reached

logger = logging.getLogger(__name__)
SOFTWARE = f"lorikeet/{__version__}"
MAX_DIFFERENCES_SHOWN = 3
MIN_FREE_BYTES = 2**20  # room for the log, the report, and the JSON files of a checkpoint
T = TypeVar("T")


class SaveAdapter:
    """Save the LoRA file every n steps or epochs and at the end, under sd-scripts' file names."""

    id = "save_adapter"
    is_deferrable = False

    def __init__(
        self,
        config: SaveConfig,
        adapter: Adapter,
        prepared: PreparedData,
        started_at: float,
        retention: AdapterRetention | None = None,
    ):
        self.config, self.adapter, self.prepared, self.started_at = config, adapter, prepared, started_at
        self.retention = retention or AdapterRetention(config)
        self.saved_paths: list[Path] = []
        self.last_paths: list[Path] = []
        self.uploader: HubUploader | None = None
        if config.huggingface_repo_id is not None:
            self.uploader = HubUploader(config, config.huggingface_repo_id)
        self._dataset_metadata: dict[str, str] = {}
        self._model_metadata: dict[str, str] = {}

    def should_run(self, run: TrainingRun) -> bool:
        return bool(self.list_due_names(run))

    def list_due_names(self, run: TrainingRun) -> list[str]:
        """List the files that are due after this step, without suffix."""
        name, step = self.config.output_name, run.state.step
        if step >= run.plan.steps:
            return [name]
        epoch = [f"{name}-{run.plan.count_completed_epochs(step):06d}"] if self._is_epoch_save_due(run) else []
        return epoch + ([f"{name}-step{step:08d}"] if self._is_step_save_due(run) else [])

    def _is_epoch_save_due(self, run: TrainingRun) -> bool:
        return is_interval_reached(run.plan, run.state.step, epochs=self.config.save_every_n_epochs)

    def _is_step_save_due(self, run: TrainingRun) -> bool:
        return is_interval_reached(run.plan, run.state.step, steps=self.config.save_every_n_steps)

    def __call__(self, run: TrainingRun) -> None:
        name, step, comm = self.config.output_name, run.state.step, run.strategy.comm
        if step >= run.plan.steps:
            self.save(run, f"{name}.safetensors")
            return
        if self._is_epoch_save_due(run):
            epoch = run.plan.count_completed_epochs(step)
            paths = self.save(run, f"{name}-{epoch:06d}.safetensors")
            comm.run_on_main(lambda: self.retention.record_epoch_files(epoch, paths))
        if self._is_step_save_due(run):
            step_paths = self.save(run, f"{name}-step{step:08d}.safetensors")
            comm.run_on_main(lambda: self.retention.record_step_files(step, step_paths))

    def save(self, run: TrainingRun, name: str) -> list[Path]:
        """Write the LoRA file, and one of the EMA weights; an error on the main rank is raised on all ranks."""
        path = Path(self.config.output_dir) / name
        with use_eval_weights(run.optimizer):
            written = self._save_parts(run, path)
        self.saved_paths, self.last_paths = self.saved_paths + written, written
        if run.ema is not None:
            with run.ema.swap_parameters():
                written = written + self._save_parts(run, path.with_name(f"{path.stem}-ema{path.suffix}"))
        run.strategy.comm.run_on_main(lambda: self._upload(written, is_last=run.state.step >= run.plan.steps))
        return written

    def _save_parts(self, run: TrainingRun, path: Path) -> list[Path]:
        """Write the file, or one for each expert."""
        parts = {
            path.with_name(f"{path.stem}{part.suffix}{path.suffix}"): part
            for part in list_adapter_parts(run.task.family.facts)
        }
        for part_path, part in parts.items():
            self._save_file(run, part_path, part)
        return list(parts)

    def _upload(self, paths: list[Path], is_last: bool) -> None:
        # Earlier uploads finish first, so that retention deletes no file that is still being uploaded.
        if self.uploader is not None:
            self.uploader.wait()
            self.uploader.upload(paths)
            if is_last:
                self.uploader.wait()

    def on_train_begin(self, run: TrainingRun) -> None:
        run.strategy.comm.run_on_main(lambda: self._prepare(run))

    def _prepare(self, run: TrainingRun) -> None:
        """Collect metadata, which hashes the model files, and raise if the adapter does not fit ``save_format``."""
        if not self.config.no_metadata:
            data_parallel_size = run.strategy.data_parallel_size
            self._dataset_metadata = build_dataset_metadata(
                self.prepared.manifest, self.prepared.assignments, data_parallel_size
            )
            self._model_metadata = build_model_metadata(run.config.model)
        if self.uploader is not None:
            self.uploader.create_repo()
        part = next(iter(list_adapter_parts(run.task.family.facts)))
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
        metadata = self._build_metadata(run) | ({} if self.config.no_metadata else dict(file.metadata))
        metadata = add_model_hashes(file.tensors, metadata)
        # Only the first and the last file are compared with the model in memory; comparing all would take too long.
        is_compared = not self.saved_paths or run.state.step >= run.plan.steps
        # In the first step of a warm-up the learning rate is 0, and a zero update is correct.
        if run.state.step < run.plan.steps:
            _reserve_disk_space(path, file.tensors, run)
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

    def _build_metadata(self, run: TrainingRun) -> dict[str, str]:
        info, facts = run.task.family.get_base_model_info(run.task.pipe), run.task.family.facts
        model = BaseModelMetadata(
            info.base_model_version,
            info.architecture,
            run.task.objective.process.prediction_type,
            facts.lora.modelspec_implementation,
            is_version_2=facts.options.is_version_2,
            timestep_sampling=facts.training_noise.timestep_sampling,
            metadata=info.metadata,
        )
        return build_metadata(run.config, model, self._collect_run_facts(run), SOFTWARE)

    def _collect_run_facts(self, run: TrainingRun) -> RunMetadata:
        (num_train_images, num_reg_images), validation = self.prepared.images_per_epoch, self.prepared.validation
        sizes, is_from_file = self.adapter.rank_alphas.values(), run.config.adapter.dim_from_weights
        return RunMetadata(
            step=run.state.step,
            epoch=run.plan.batch_plan.get_epoch(max(run.state.step - 1, 0)) + 1,
            max_train_steps=run.plan.steps,
            num_epochs=run.plan.num_epochs,
            started_at=self.started_at,
            saved_at=time.time(),
            session_id=derive_seed(run.config.train.seed, Purpose.SESSION_ID, int(self.started_at * 1000)) % 2**32,
            num_train_images=num_train_images,
            num_reg_images=num_reg_images,
            num_validation_images=validation.images_per_epoch[0] if validation is not None else 0,
            num_batches_per_epoch=get_planned_stages(run.plan.batch_plan)[-1].batch_plan.micro_batches_per_epoch,
            resolution=self.prepared.resolution,
            dataset_metadata=self._dataset_metadata,
            model_metadata=self._model_metadata,
            rank=_get_common_value(size.rank for size in sizes) if is_from_file else self.adapter.rank,
            alpha=_get_common_value(size.alpha for size in sizes) if is_from_file else self.adapter.alpha,
            optimizer=_format_optimizer(run),
            mixed_precision=run.strategy.mixed_precision,
        )


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
    try:
        tensors, metadata = convert_to_file_format(state, alphas, components, form, equal_alphas=equal_alphas)
    except UserError as error:
        raise UserError(f"save_format {save_format}: {error}") from None
    return AdapterFile(tensors, metadata, form, list_client_losses(adapters, components, form, equal_alphas))


def _get_common_value(values: Iterable[T]) -> T | str:
    """Return the common value, or what sd-scripts writes when values differ."""
    distinct = set(values)
    return distinct.pop() if len(distinct) == 1 else "Dynamic"


def _format_optimizer(run: TrainingRun) -> str:
    """Format as sd-scripts does: ``torch.optim.adamw.AdamW(weight_decay=0.1)``."""
    kind = type(getattr(run.optimizer, "optimizer", run.optimizer))
    return f"{kind.__module__}.{kind.__name__}({','.join(run.config.optim.optimizer_args)})"


def build_model_metadata(model: ModelConfig) -> dict[str, str]:
    """Build sd-scripts' keys for the base model; only single-file models have hashes."""
    metadata = {"ss_sd_model_name": format_model_name(model.pretrained_model_name_or_path)}
    vae = model.vae or model.ae
    if vae is not None:
        metadata["ss_vae_name"] = format_model_name(vae)
    for source, legacy_key, key in (
        (model.pretrained_model_name_or_path, "ss_sd_model_hash", "ss_new_sd_model_hash"),
        (vae, "ss_vae_hash", "ss_new_vae_hash"),
    ):
        path = Path(source).expanduser() if source is not None else None
        if path is not None and path.is_file():
            metadata |= {legacy_key: _compute_legacy_hash(path), key: compute_sha256(path)}
    return metadata


def format_model_name(source: str | None) -> str:
    """Return the file name of a path, or a hub id as it is."""
    if source is None:
        return "built-in"
    if PureWindowsPath(source).is_absolute():
        return PureWindowsPath(source).name
    path = Path(source).expanduser()
    return path.name if path.is_absolute() or path.exists() else source


def _compute_legacy_hash(path: Path) -> str:
    """Compute the old web UI hash: 64 KiB after the first MiB."""
    with path.open("rb") as file:
        file.seek(0x100000)
        return hashlib.sha256(file.read(0x10000)).hexdigest()[:8]


def _reserve_disk_space(path: Path, tensors: Mapping[str, Tensor], run: TrainingRun) -> None:
    """Raise if an intermediate file would take the room of the checkpoint that is due, or of that of a stopped run."""
    free = shutil.disk_usage(path.parent).free
    file_bytes = sum(tensor.nbytes for tensor in tensors.values()) * (1 if run.ema is None else 2)
    num_checkpoints = 1 + run.config.state.save_state
    needed = file_bytes + num_checkpoints * run.nan_guard.count_snapshot_bytes() + MIN_FREE_BYTES
    if 0 < free < needed:  # some network drives always report 0
        raise UserError(
            report_file(
                path,
                f"not written, as checkpoints would not fit any more: {format_bytes(free)} free, about"
                f" {format_bytes(needed)} needed",
                "free some space, then resume",
            )
        )
