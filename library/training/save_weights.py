"""Save the weights of a run at its intervals: under which names, with which metadata; retention and upload.

What is written is up to the subclasses, in ``save_adapter``, ``save_model`` and ``save_embedding``.  Old files are
deleted by ``checkpoint_retention``.  The main rank writes; weights of which each rank holds a part are gathered for it.
"""

import hashlib
import shutil
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path, PureWindowsPath

from .. import __version__
from ..adapters.metadata import BaseModelMetadata, RunMetadata, build_metadata
from ..atomic_files import compute_sha256
from ..cache.paths import format_bytes
from ..config.schema import ModelConfig
from ..config.schema_output import SaveConfig
from ..dataloader.batch_plan import get_planned_stages
from ..dataloader.prepare import PreparedData
from ..errors import UserError
from ..models.trained_components import record_used_rate
from ..optim.optimizers import use_eval_weights
from ..problems import report_file
from ..randomness import Purpose, derive_seed
from .checkpoint_retention import AdapterRetention
from .hub_upload import HubUploader
from .state import TrainingRun, is_interval_reached

SOFTWARE = f"lorikeet/{__version__}"
EMA_SUFFIX = "-ema"
"""What the names of files of averaged weights have behind the names of the others."""
MIN_FREE_BYTES = 2**20  # room for the log, the report, and the JSON files of a checkpoint


class SaveWeights(ABC):
    """Save the trained weights every n steps or epochs and at the end, under sd-scripts' file names."""

    id = "save_adapter"
    is_deferrable = False
    title = "LoRA file"
    """What is saved, in messages."""
    suffix = ".safetensors"
    """What follows the name; a folder has none."""

    def __init__(
        self,
        config: SaveConfig,
        prepared: PreparedData,
        started_at: float,
        retention: AdapterRetention | None = None,
    ):
        self.config, self.prepared, self.started_at = config, prepared, started_at
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
            self.save(run, name)
            return
        if self._is_epoch_save_due(run):
            epoch = run.plan.count_completed_epochs(step)
            paths = self.save(run, f"{name}-{epoch:06d}")
            comm.run_on_main(lambda: self.retention.record_epoch_files(epoch, paths))
        if self._is_step_save_due(run):
            step_paths = self.save(run, f"{name}-step{step:08d}")
            comm.run_on_main(lambda: self.retention.record_step_files(step, step_paths))

    def save(self, run: TrainingRun, name: str) -> list[Path]:
        """Write the weights, and those of the EMA; ``name`` is without suffix. An error is raised on all ranks."""
        path = Path(self.config.output_dir) / f"{name}{self.suffix}"
        with use_eval_weights(run.optimizer):
            written = self._save_files(run, path)
        self.saved_paths, self.last_paths = self.saved_paths + written, written
        if run.ema is not None:
            with run.ema.swap_parameters():
                written = written + self._save_files(run, path.with_name(f"{name}{EMA_SUFFIX}{self.suffix}"))
        run.strategy.comm.run_on_main(lambda: self._upload(written, is_last=run.state.step >= run.plan.steps))
        return written

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
        """Collect metadata, which hashes the model files, and create the repository of uploads."""
        if not self.config.no_metadata:
            data_parallel_size = run.strategy.data_parallel_size
            self._dataset_metadata = self.prepared.build_metadata(data_parallel_size)
            self._model_metadata = build_model_metadata(run.config.model)
        if self.uploader is not None:
            self.uploader.create_repo()

    @abstractmethod
    def _save_files(self, run: TrainingRun, path: Path) -> list[Path]:
        """Write and verify the weights as they are now, and return what was written. All ranks call it."""

    def build_metadata(self, run: TrainingRun, *, as_embedding: bool = False) -> dict[str, str]:
        """Build the metadata of a file; ``as_embedding``: of the vectors of a word, whatever is trained beside them."""
        config = run.config
        if as_embedding:
            config = replace(config, adapter=replace(config.adapter, train="embedding"))
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
        return build_metadata(record_used_rate(config, facts), model, self._collect_run_facts(run), SOFTWARE)

    def _get_rank_and_alpha(self, run: TrainingRun) -> tuple[int | str, float | str]:
        """Return the rank and alpha of the adapter for metadata; full training has none."""
        return "", ""

    def _collect_run_facts(self, run: TrainingRun) -> RunMetadata:
        (num_train_images, num_reg_images), validation = self.prepared.images_per_epoch, self.prepared.validation
        rank, alpha = self._get_rank_and_alpha(run)
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
            rank=rank,
            alpha=alpha,
            optimizer=_format_optimizer(run),
            mixed_precision=run.strategy.mixed_precision,
        )


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


def reserve_disk_space(path: Path, num_bytes: int, run: TrainingRun) -> None:
    """Raise if an intermediate file would take the room of the checkpoint that is due, or of that of a stopped run.

    The file of the averaged weights, which is written second, has its room reserved with the first one.
    """
    free = shutil.disk_usage(path.parent).free
    is_followed = run.ema is not None and EMA_SUFFIX not in path.name
    file_bytes = num_bytes * (2 if is_followed else 1)
    num_checkpoints = 1 + run.config.state.save_state
    needed = file_bytes + num_checkpoints * run.nan_guard.count_snapshot_bytes(run) + MIN_FREE_BYTES
    if 0 < free < needed:  # some network drives always report 0
        raise UserError(
            report_file(
                path,
                f"not written, as checkpoints would not fit any more: {format_bytes(free)} free, about"
                f" {format_bytes(needed)} needed",
                "free some space, then resume",
            )
        )
