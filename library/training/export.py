"""Writing LoRA files when they are due: every process takes part, one writes, all learn how it went."""

import logging
import time
from pathlib import Path

from torch import Tensor, nn

from .. import __version__
from ..adapters import file, keys, lora
from ..adapters.lora import Adapter
from ..adapters.metadata import ModelFacts, RunFacts, describe, with_hashes
from ..families.base import Family
from ..optim.optimizers import weights_as_used
from ..randomness import seed_for
from .loop import Run
from .plan import is_due

logger = logging.getLogger(__name__)

SOFTWARE = f"lorikeet/{__version__}"


class Export:
    """Saves every n steps or epochs, and at the end; the names are sd-scripts'."""

    def __init__(self, adapter: Adapter, pictures: tuple[int, int], resolution: tuple[int, int], started_at: float):
        self.adapter, self.pictures, self.resolution, self.started_at = adapter, pictures, resolution, started_at
        self.written: list[Path] = []

    def is_due(self, run: Run) -> bool:
        return bool(self._names(run))

    def __call__(self, run: Run) -> None:
        for name in self._names(run):
            self.save(run, name)

    def _names(self, run: Run) -> list[str]:
        """The files that are due after this step."""
        save, step = run.config.save, run.state.step
        if step >= run.plan.steps:
            return [f"{save.output_name}.safetensors"]
        names = []
        if save.save_every_n_epochs and is_due(run.plan, step, None, save.save_every_n_epochs):
            names.append(f"{save.output_name}-{run.plan.epochs_done(step):06d}.safetensors")
        if is_due(run.plan, step, save.save_every_n_steps, None):
            names.append(f"{save.output_name}-step{step:08d}.safetensors")
        return names

    def save(self, run: Run, name: str) -> None:
        """Write one file; an error on the process that writes is raised on all."""
        path = Path(run.config.save.output_dir) / name
        with weights_as_used(run.optimizer):
            self._save_one(run, path)
        if run.average is not None:
            with run.average.in_place():
                self._save_one(run, path.with_name(f"{path.stem}-ema{path.suffix}"))
        self.written.append(path)

    def _save_one(self, run: Run, path: Path) -> None:
        model = run.strategy.unwrapped(run.adapter)
        run.strategy.on_main(lambda: self._write(run, path, model))
        logger.info("saved %s", path)

    def _write(self, run: Run, path: Path, trained: nn.Module) -> None:
        family, tensors = run.task.family, dict[str, Tensor]()
        whole = lora.state(trained)
        for part, child in trained.named_children():
            state = {name.removeprefix(f"{part}."): each for name, each in whole.items() if name.startswith(f"{part}.")}
            tensors |= self._of_part(family, part, child, state)
        tensors = file.cast(tensors, run.config.save.save_precision)
        titles = family.titles(run.task.pipe)
        model = ModelFacts(titles.base_model_version, titles.architecture, run.task.objective.process.prediction)
        metadata = with_hashes(tensors, describe(run.config, model, self._facts(run), SOFTWARE))
        # A learning rate of 0, as in the first step of a warm-up, leaves the update at zero, and rightly so.
        file.write(path, tensors, metadata, trained=run.state.has_learnt)

    def _of_part(self, family: Family, part: str, model: nn.Module, state: lora.State) -> dict[str, Tensor]:
        if family.lora_format == "diffusers":
            return keys.to_diffusers(state, self.adapter.alpha, part)
        own = part == family.denoiser
        names = keys.file_names(
            (name for name, _ in model.named_modules()), family.lora_names if own else family.text_style(part)
        )
        prefix = family.lora_prefix if own else family.text_lora_prefixes[part]
        return keys.to_kohya(state, self.adapter.alpha, prefix, names)

    def _facts(self, run: Run) -> RunFacts:
        trained, regularising = self.pictures
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
            batches_per_epoch=run.plan.batches.batches_per_epoch,
            resolution=self.resolution,
            optimizer=_described(run),
            mixed_precision=run.strategy.precision,
        )


def _described(run: Run) -> str:
    """``torch.optim.adamw.AdamW(weight_decay=0.1)``, as sd-scripts writes it."""
    kind = type(getattr(run.optimizer, "optimizer", run.optimizer))
    return f"{kind.__module__}.{kind.__name__}({','.join(run.config.optim.optimizer_args)})"
