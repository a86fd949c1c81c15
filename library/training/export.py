"""Writing LoRA files when they are due: every process takes part, one writes, all learn how it went."""

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from torch import Tensor, nn

from .. import __version__
from ..adapters import file, lora
from ..adapters.comparing import differences
from ..adapters.formats import Format, from_file, to_file, usual_format
from ..adapters.lora import Adapter
from ..adapters.metadata import ModelFacts, RunFacts, describe, with_hashes
from ..adapters.updates import updates_of
from ..adapters.verify import BrokenFileError, read
from ..data.prepare import Prepared
from ..data.staged_plan import stages_in
from ..data.told import told as told_of_data
from ..families.sampling import evaluating
from ..families.upload import Upload
from ..optim.optimizers import weights_as_used
from ..randomness import seed_for
from .job import Run
from .lora_parts import parts_of
from .model_told import model_told
from .plan import is_due
from .retention import Retention

logger = logging.getLogger(__name__)

SOFTWARE = f"lorikeet/{__version__}"
SHOWN = 3
T = TypeVar("T")


class Export:
    """Saves every n steps or epochs, and at the end; the names are sd-scripts'."""

    can_wait = False

    def __init__(self, adapter: Adapter, prepared: Prepared, ranks: int, started_at: float):
        self.adapter, self.prepared, self.ranks, self.started_at = adapter, prepared, ranks, started_at
        self.written: list[Path] = []
        self.kept: Retention | None = None
        self.upload: Upload | None = None
        self.data: dict[str, str] = {}
        self.model: dict[str, str] = {}

    def is_due(self, run: Run) -> bool:
        return bool(self.names(run))

    def names(self, run: Run) -> list[str]:
        """The files that are due after this step, without their ending."""
        name, step = run.config.save.output_name, run.state.step
        if step >= run.plan.steps:
            return [name]
        epoch = [f"{name}-{run.plan.epochs_done(step):06d}"] if self._is_epoch(run) else []
        return epoch + ([f"{name}-step{step:08d}"] if self._is_step(run) else [])

    def _is_epoch(self, run: Run) -> bool:
        every = run.config.save.save_every_n_epochs
        return every is not None and is_due(run.plan, run.state.step, None, every)

    def _is_step(self, run: Run) -> bool:
        return is_due(run.plan, run.state.step, run.config.save.save_every_n_steps, None)

    def __call__(self, run: Run) -> None:
        name, step = run.config.save.output_name, run.state.step
        kept = self.kept = self.kept or Retention(run.config.save)
        if step >= run.plan.steps:
            self.save(run, f"{name}.safetensors")
            return
        if self._is_epoch(run):
            epoch = run.plan.epochs_done(step)
            paths = self.save(run, f"{name}-{epoch:06d}.safetensors")
            run.strategy.on_main(lambda: kept.wrote_epoch(epoch, paths))
        if self._is_step(run):
            written = self.save(run, f"{name}-step{step:08d}.safetensors")
            run.strategy.on_main(lambda: kept.wrote_step(step, written))

    def save(self, run: Run, name: str) -> list[Path]:
        """Write one file, and one of the average; an error on the process that writes is raised on all."""
        paths = [Path(run.config.save.output_dir) / name]
        with weights_as_used(run.optimizer):
            self._save_one(run, paths[0])
        if run.average is not None:
            paths.append(paths[0].with_name(f"{paths[0].stem}-ema{paths[0].suffix}"))
            with run.average.in_place():
                self._save_one(run, paths[1])
        self.written.append(paths[0])
        run.strategy.on_main(lambda: self._send(paths, is_last=run.state.step >= run.plan.steps))
        return paths

    def _send(self, paths: list[Path], is_last: bool) -> None:
        """To the hub; what was sent before is there before the next, so that no old file goes too early."""
        if self.upload is not None:
            self.upload.settle()
            self.upload.send(paths)
            if is_last:
                self.upload.settle()

    def rehearse(self, run: Run) -> None:
        """Raise before anything is trained if what is trained cannot be written in the format that is asked for.

        Here the model's files are read through once, for their hashes; only the process that writes comes here.
        """
        if not run.config.save.no_metadata:
            self.data = told_of_data(self.prepared.manifest, self.prepared.placements, self.ranks)
            self.model = model_told(run.config.model)
        if run.config.save.huggingface_repo_id is not None:
            self.upload = Upload(run.config.save, run.config.save.huggingface_repo_id)
            self.upload.open()
        form = self._tensors(run, run.strategy.unwrapped(run.adapter))[2]
        if form != "diffusers" and run.task.family.denoiser == "unet" and len(set(self.adapter.alphas.values())) > 1:
            logger.warning(
                "diffusers, as of 0.42, mixes up alphas that differ between the blocks of a UNet when it reads "
                "such files; for diffusers, convert them: python -m library convert IN OUT --to diffusers"
            )
        logger.info("LoRA files are written as %s does", {"kohya": "sd-scripts", "comfy": "ComfyUI"}.get(form, form))

    def _save_one(self, run: Run, path: Path) -> None:
        trained = run.strategy.unwrapped(run.adapter)
        with evaluating(trained):  # what is left out at random in training is not in the file
            run.strategy.on_main(lambda: self._write(run, path, trained))
        logger.info("saved %s", path)

    def _tensors(self, run: Run, trained: nn.Module) -> tuple[dict[str, Tensor], dict[str, str], Format]:
        state, alphas, family = lora.state(trained), self.adapter.alphas, run.task.family
        chosen = run.config.save.save_format
        kinds = {update.kind for update in updates_of(state, alphas).values()}
        form = usual_format(kinds, family.lora_format) if chosen == "auto" else chosen
        tensors, told = to_file(state, alphas, parts_of(family, run.task.pipe), form)
        return file.cast(tensors, run.config.save.save_precision), told, form

    def _write(self, run: Run, path: Path, trained: nn.Module) -> None:
        tensors, told, _ = self._tensors(run, trained)
        metadata = with_hashes(tensors, {**self._described(run), **({} if run.config.save.no_metadata else told)})
        # Two of the files are compared with the model in memory, which would take too long for all.
        is_compared = not self.written or run.state.step >= run.plan.steps
        # A learning rate of 0, as in the first step of a warm-up, leaves the update at zero, and rightly so.
        file.write(path, tensors, metadata, trained=run.state.has_learnt,
                   check=(lambda part: self._compare(run, part, trained, told)) if is_compared else None)  # fmt: skip

    def _compare(self, run: Run, path: Path, trained: nn.Module, told: Mapping[str, str]) -> None:
        """Read anew, does the file do in each layer what the adapter in memory does?"""
        tensors, metadata = read(path)
        content = from_file(tensors, {**metadata, **told}, parts_of(run.task.family, run.task.pipe))
        with run.strategy.alone():
            found = list(differences(trained, content, self.adapter.alphas))
        if found:
            more = f" (and {len(found) - SHOWN} more)" if len(found) > SHOWN else ""
            raise BrokenFileError(f"{path.name} is not what was trained: {'; '.join(found[:SHOWN])}{more}")

    def _described(self, run: Run) -> dict[str, str]:
        titles = run.task.family.titles(run.task.pipe)
        model = ModelFacts(titles.base_model_version, titles.architecture, run.task.objective.process.prediction)
        return describe(run.config, model, self._facts(run), SOFTWARE)

    def _facts(self, run: Run) -> RunFacts:
        trained, regularising = self.prepared.pictures
        sizes, is_from_file = self.adapter.sizes.values(), run.config.adapter.dim_from_weights
        return RunFacts(
            step=run.state.step,
            epoch=run.plan.batches.epoch_of(max(run.state.step - 1, 0)) + 1,
            steps=run.plan.steps,
            epochs=run.plan.epochs,
            started_at=self.started_at,
            saved_at=time.time(),
            session_id=seed_for(run.config.train.seed, "session", int(self.started_at * 1000)) % 2**32,
            pictures=trained,
            regularisation_pictures=regularising,
            batches_per_epoch=stages_in(run.plan.batches)[-1].plan.batches_per_epoch,
            resolution=self.prepared.resolution,
            data=self.data,
            model=self.model,
            rank=_one(size.rank for size in sizes) if is_from_file else self.adapter.rank,
            alpha=_one(size.alpha for size in sizes) if is_from_file else self.adapter.alpha,
            optimizer=_described(run),
            mixed_precision=run.strategy.precision,
        )


def _one(values: Iterable[T]) -> T | str:
    """What all have, or sd-scripts' word for that they differ."""
    found = set(values)
    return found.pop() if len(found) == 1 else "Dynamic"


def _described(run: Run) -> str:
    """``torch.optim.adamw.AdamW(weight_decay=0.1)``, as sd-scripts writes it."""
    kind = type(getattr(run.optimizer, "optimizer", run.optimizer))
    return f"{kind.__module__}.{kind.__name__}({','.join(run.config.optim.optimizer_args)})"
