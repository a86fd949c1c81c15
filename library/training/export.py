"""Writing LoRA files when they are due: every process takes part, one writes, all learn how it went."""

import hashlib
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PureWindowsPath
from typing import Any, TypeVar

from torch import Tensor, nn

from .. import __version__
from ..adapters import checkpoint_file, lora
from ..adapters.checkpoint_file import InvalidAdapterFileError, compare_file_with_model, read_safetensors
from ..adapters.formats import FileFormat, choose_file_format, convert_from_file_format, convert_to_file_format
from ..adapters.lora import Adapter
from ..adapters.metadata import BaseModelMetadata, RunMetadata, add_model_hashes, build_metadata
from ..adapters.state_dict import group_updates
from ..atomic_files import compute_sha256
from ..config.schema import ModelConfig
from ..config.schema_output import SaveConfig
from ..data.batch_plan import get_planned_stages
from ..data.metadata import build_dataset_metadata as told_of_data
from ..data.prepare import PreparedData
from ..models.sampling import use_eval_mode
from ..optim.optimizers import use_eval_weights
from ..randomness import derive_seed
from .hub_upload import HubUploader
from .state import TrainingRun, is_interval_reached
from .trainable import collect_component_keys

logger = logging.getLogger(__name__)


SOFTWARE = f"lorikeet/{__version__}"


MAX_DIFFERENCES_SHOWN = 3


T = TypeVar("T")


class SaveAdapter:
    """Saves every n steps or epochs, and at the end; the names are sd-scripts'."""

    is_deferrable = False

    def __init__(self, adapter: Adapter, prepared: PreparedData, data_parallel_size: int, started_at: float):
        self.adapter, self.prepared, self.data_parallel_size, self.started_at = (
            adapter,
            prepared,
            data_parallel_size,
            started_at,
        )
        self.saved_paths: list[Path] = []
        self.retention: AdapterRetention | None = None
        self.upload: HubUploader | None = None
        self.dataset_metadata: dict[str, str] = {}
        self.model_metadata: dict[str, str] = {}

    def should_run(self, run: TrainingRun) -> bool:
        return bool(self.list_due_names(run))

    def list_due_names(self, run: TrainingRun) -> list[str]:
        """The files that are due after this step, without their ending."""
        name, step = run.config.save.output_name, run.state.step
        if step >= run.plan.steps:
            return [name]
        epoch = [f"{name}-{run.plan.count_completed_epochs(step):06d}"] if self._is_epoch_save_due(run) else []
        return epoch + ([f"{name}-step{step:08d}"] if self._is_step_save_due(run) else [])

    def _is_epoch_save_due(self, run: TrainingRun) -> bool:
        every = run.config.save.save_every_n_epochs
        return every is not None and is_interval_reached(run.plan, run.state.step, None, every)

    def _is_step_save_due(self, run: TrainingRun) -> bool:
        return is_interval_reached(run.plan, run.state.step, run.config.save.save_every_n_steps, None)

    def __call__(self, run: TrainingRun) -> None:
        name, step = run.config.save.output_name, run.state.step
        kept = self.retention = self.retention or AdapterRetention(run.config.save)
        if step >= run.plan.steps:
            self.save(run, f"{name}.safetensors")
            return
        if self._is_epoch_save_due(run):
            epoch = run.plan.count_completed_epochs(step)
            paths = self.save(run, f"{name}-{epoch:06d}.safetensors")
            run.strategy.comm.run_on_main(lambda: kept.record_epoch_save(epoch, paths))
        if self._is_step_save_due(run):
            written = self.save(run, f"{name}-step{step:08d}.safetensors")
            run.strategy.comm.run_on_main(lambda: kept.record_step_save(step, written))

    def save(self, run: TrainingRun, name: str) -> list[Path]:
        """Write one file, and one of the average; an error on the process that writes is raised on all."""
        paths = [Path(run.config.save.output_dir) / name]
        with use_eval_weights(run.optimizer):
            self._save_file(run, paths[0])
        if run.ema is not None:
            paths.append(paths[0].with_name(f"{paths[0].stem}-ema{paths[0].suffix}"))
            with run.ema.swap_parameters():
                self._save_file(run, paths[1])
        self.saved_paths.append(paths[0])
        run.strategy.comm.run_on_main(lambda: self._upload(paths, is_last=run.state.step >= run.plan.steps))
        return paths

    def _upload(self, paths: list[Path], is_last: bool) -> None:
        """To the hub; what was sent before is there before the next, so that no old file goes too early."""
        if self.upload is not None:
            self.upload.wait()
            self.upload.upload(paths)
            if is_last:
                self.upload.wait()

    def prepare(self, run: TrainingRun) -> None:
        """Raise before anything is trained if what is trained cannot be written in the format that is asked for.

        Here the model's files are read through once, for their hashes; only the process that writes comes here.
        """
        if not run.config.save.no_metadata:
            self.dataset_metadata = told_of_data(
                self.prepared.manifest, self.prepared.assignments, self.data_parallel_size
            )
            self.model_metadata = build_model_metadata(run.config.model)
        if run.config.save.huggingface_repo_id is not None:
            self.upload = HubUploader(run.config.save, run.config.save.huggingface_repo_id)
            self.upload.create_repo()
        form = self._build_tensors(run, run.strategy.unwrap_model(run.model))[2]
        if (
            form != "diffusers"
            and run.task.family.denoiser_name == "unet"
            and len(set(self.adapter.alphas.values())) > 1
        ):
            logger.warning(
                "diffusers, as of 0.42, mixes up alphas that differ between the blocks of a UNet when it reads "
                "such files; for diffusers, convert them: python -m library convert IN OUT --to diffusers"
            )
        logger.info("LoRA files are written as %s does", {"kohya": "sd-scripts", "comfy": "ComfyUI"}.get(form, form))

    def _save_file(self, run: TrainingRun, path: Path) -> None:
        trained = run.strategy.unwrap_model(run.model)
        with use_eval_mode(trained):  # what is left out at random in training is not in the file
            run.strategy.comm.run_on_main(lambda: self._write_file(run, path, trained))
        logger.info("saved %s", path)

    def _build_tensors(
        self, run: TrainingRun, model: nn.Module
    ) -> tuple[dict[str, Tensor], dict[str, str], FileFormat]:
        state, alphas, family = lora.get_adapter_state_dict(model), self.adapter.alphas, run.task.family
        chosen = run.config.save.save_format
        kinds = {update.adapter_type for update in group_updates(state, alphas).values()}
        form = choose_file_format(kinds, family.lora_format) if chosen == "auto" else chosen
        tensors, told = convert_to_file_format(state, alphas, collect_component_keys(family, run.task.pipe), form)
        return checkpoint_file.cast_tensors(tensors, run.config.save.save_precision), told, form

    def _write_file(self, run: TrainingRun, path: Path, model: nn.Module) -> None:
        tensors, told, _ = self._build_tensors(run, model)
        metadata = add_model_hashes(
            tensors, {**self._build_metadata(run), **({} if run.config.save.no_metadata else told)}
        )
        # Two of the files are compared with the model in memory, which would take too long for all.
        is_compared = not self.saved_paths or run.state.step >= run.plan.steps
        # A learning rate of 0, as in the first step of a warm-up, leaves the update at zero, and rightly so.
        checkpoint_file.write_adapter_file(
            path,
            tensors,
            metadata,
            is_trained=run.state.has_trained,
            check=(lambda part: self._verify_file(run, part, model, told)) if is_compared else None,
        )

    def _verify_file(self, run: TrainingRun, path: Path, model: nn.Module, file_metadata: Mapping[str, str]) -> None:
        """Read anew, does the file do in each layer what the adapter in memory does?"""
        tensors, metadata = read_safetensors(path)
        content = convert_from_file_format(
            tensors, {**metadata, **file_metadata}, collect_component_keys(run.task.family, run.task.pipe)
        )
        with run.strategy.bypass_tensor_parallel():
            found = list(compare_file_with_model(model, content, self.adapter.alphas))
        if found:
            more = f" (and {len(found) - MAX_DIFFERENCES_SHOWN} more)" if len(found) > MAX_DIFFERENCES_SHOWN else ""
            raise InvalidAdapterFileError(
                f"{path.name} is not what was trained: {'; '.join(found[:MAX_DIFFERENCES_SHOWN])}{more}"
            )

    def _build_metadata(self, run: TrainingRun) -> dict[str, str]:
        titles = run.task.family.get_base_model_info(run.task.pipe)
        model = BaseModelMetadata(
            titles.base_model_version, titles.architecture, run.task.objective.process.prediction_type
        )
        return build_metadata(run.config, model, self._collect_run_facts(run), SOFTWARE)

    def _collect_run_facts(self, run: TrainingRun) -> RunMetadata:
        trained, regularising = self.prepared.images_per_epoch
        sizes, is_from_file = self.adapter.rank_alphas.values(), run.config.adapter.dim_from_weights
        return RunMetadata(
            step=run.state.step,
            epoch=run.plan.batch_plan.get_epoch(max(run.state.step - 1, 0)) + 1,
            max_train_steps=run.plan.steps,
            num_epochs=run.plan.num_epochs,
            started_at=self.started_at,
            saved_at=time.time(),
            session_id=derive_seed(run.config.train.seed, "session", int(self.started_at * 1000)) % 2**32,
            num_train_images=trained,
            num_reg_images=regularising,
            num_batches_per_epoch=get_planned_stages(run.plan.batch_plan)[-1].batch_plan.micro_batches_per_epoch,
            resolution=self.prepared.resolution,
            dataset_metadata=self.dataset_metadata,
            model_metadata=self.model_metadata,
            rank=_get_common_value(size.rank for size in sizes) if is_from_file else self.adapter.rank,
            alpha=_get_common_value(size.alpha for size in sizes) if is_from_file else self.adapter.alpha,
            optimizer=_format_optimizer(run),
            mixed_precision=run.strategy.mixed_precision,
        )


def _get_common_value(values: Iterable[T]) -> T | str:
    """What all have, or sd-scripts' word for that they differ."""
    found = set(values)
    return found.pop() if len(found) == 1 else "Dynamic"


def _format_optimizer(run: TrainingRun) -> str:
    """``torch.optim.adamw.AdamW(weight_decay=0.1)``, as sd-scripts writes it."""
    kind = type(getattr(run.optimizer, "optimizer", run.optimizer))
    return f"{kind.__module__}.{kind.__name__}({','.join(run.config.optim.optimizer_args)})"


def build_model_metadata(model: ModelConfig) -> dict[str, str]:
    """sd-scripts' keys; hashes of single files only, since a folder has none that anybody would look for."""
    told = {"ss_sd_model_name": format_model_name(model.pretrained_model_name_or_path)}
    vae = model.vae or model.ae
    if vae is not None:
        told["ss_vae_name"] = format_model_name(vae)
    for place, old, new in (
        (model.pretrained_model_name_or_path, "ss_sd_model_hash", "ss_new_sd_model_hash"),
        (vae, "ss_vae_hash", "ss_new_vae_hash"),
    ):
        path = Path(place).expanduser() if place is not None else None
        if path is not None and path.is_file():
            told |= {old: _compute_legacy_hash(path), new: compute_sha256(path)}
    return told


def format_model_name(source: str | None) -> str:
    """Of a path the last part; a hub id as it is."""
    if source is None:
        return "built-in"
    if PureWindowsPath(source).is_absolute():
        return PureWindowsPath(source).name
    path = Path(source).expanduser()
    return path.name if path.is_absolute() or path.exists() else source


def _compute_legacy_hash(path: Path) -> str:
    """What web UIs once told models apart by: 64 KiB after the first MiB."""
    with path.open("rb") as file:
        file.seek(0x100000)
        return hashlib.sha256(file.read(0x10000)).hexdigest()[:8]


@dataclass
class AdapterRetention:
    """Knows what this run wrote, with those that it goes on from, and never touches anything else; on the process
    that writes."""

    config: SaveConfig
    epoch_files: dict[int, list[Path]] = field(default_factory=dict)
    step_files: dict[int, list[Path]] = field(default_factory=dict)

    def to_json(self) -> list[list[Any]]:
        """All that was written, for a state."""
        return [
            [[number, [path.name for path in paths]] for number, paths in written.items()]
            for written in (self.epoch_files, self.step_files)
        ]

    @classmethod
    def from_json(cls, config: SaveConfig, names: list[list[Any]]) -> "AdapterRetention":
        """As it was when a state was saved."""
        folder = Path(config.output_dir)
        return cls(config, *({number: [folder / name for name in each] for number, each in part} for part in names))

    def record_epoch_save(self, epoch: int, paths: list[Path]) -> None:
        """Of the epochs that were saved, the last n stay."""
        self.epoch_files[epoch] = paths
        if self.config.save_last_n_epochs is not None and self.config.save_every_n_epochs is not None:
            _delete_files_up_to(
                self.epoch_files, epoch - self.config.save_every_n_epochs * self.config.save_last_n_epochs
            )

    def record_step_save(self, step: int, paths: list[Path]) -> None:
        """What was saved in the last n steps stays."""
        self.step_files[step] = paths
        if self.config.save_last_n_steps is not None:
            _delete_files_up_to(self.step_files, step - self.config.save_last_n_steps - 1)


def _delete_files_up_to(written: dict[int, list[Path]], last: int) -> None:
    """All that was written up to ``last``."""
    for number in [each for each in written if each <= last]:
        for path in written.pop(number):
            try:
                path.unlink(missing_ok=True)
                logger.info("removed %s", path)
            except OSError as error:
                logger.warning("%s: cannot be removed: %s", path, error.strerror)
