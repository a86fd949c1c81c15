"""A step that went wrong, kept whole in a folder, so that it can be looked into later and elsewhere."""

import itertools
import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from .. import __version__
from ..adapters import lora
from ..config.describe import to_toml
from ..data.batch import Cond, Moments, PixelBatch
from ..errors import UserError
from .job import Run

if TYPE_CHECKING:
    from ..data.loader import StepWork

logger = logging.getLogger(__name__)

TENSORS = ("pixels", "frame", "weight", "mask", "latent_mask")


@dataclass(frozen=True)
class Bundle:
    """What a step was made of, on one process."""

    step: int  # from 0
    samples: int  # over all processes
    batches: tuple[PixelBatch, ...]
    adapter: lora.State
    folder: Path


def write_bundle(run: Run, work: "StepWork", loss: float, gradient_norm: float, folder: Path) -> Path:
    """Every process writes its own part; what cannot be written is no reason to stop."""
    own = folder / f"rank{run.strategy.rank}"
    try:
        own.mkdir(parents=True, exist_ok=True)
        tensors: dict[str, torch.Tensor] = {}
        words = []
        for number, batch in enumerate(work.batches):
            tensors |= {f"{number}.{name}": getattr(batch, name).contiguous() for name in TENSORS
                        if getattr(batch, name) is not None}  # fmt: skip
            tensors |= _of_encoded(batch, str(number))
            words.append({"captions": batch.captions, "places": batch.places, "ids": batch.ids})
        save_file(tensors, own / "batches.safetensors")
        adapter = lora.state(run.strategy.unwrapped(run.adapter))
        # Modules may share a matrix in memory, and a file has it once for each of them.
        save_file({name: tensor.clone() for name, tensor in adapter.items()}, own / "adapter.safetensors")
        facts = {
            "step": run.state.step,
            "samples": work.samples,
            "loss": str(loss),
            "gradient_norm": str(gradient_norm),
            "bucket": work.batches[0].frame[0, 4:].tolist(),  # height, width
            "batches": words,
            "times": [seen.t.tolist() for seen in run.task.seen],
            "version": __version__,
            "torch": torch.__version__,
        }
        (own / "step.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False), "utf-8")
        (own / "run.toml").write_text(to_toml(run.config), "utf-8")
    except (OSError, SafetensorError) as error:
        logger.warning("%s: cannot be written: %s", own, getattr(error, "strerror", None) or error)
    return own


def read_bundle(folder: Path) -> Bundle:
    """A folder that ``write_bundle`` made; anything else is a ``UserError``."""
    try:
        facts: dict[str, Any] = json.loads((folder / "step.json").read_text("utf-8"))
        tensors = load_file(folder / "batches.safetensors")
        adapter = load_file(folder / "adapter.safetensors")
    except (OSError, ValueError) as error:
        raise UserError(f"--replay: {folder}: {error}; name the folder of one process, such as .../rank0") from None
    batches = []
    for number, words in enumerate(facts["batches"]):
        parts: dict[str, Any] = {name: tensors.get(f"{number}.{name}") for name in TENSORS}
        batches.append(PixelBatch(captions=tuple(words["captions"]), places=tuple(words["places"]),
                                  ids=tuple(words["ids"]), **parts, **_encoded(tensors, str(number))))  # fmt: skip
    return Bundle(facts["step"], facts["samples"], tuple(batches), adapter, folder)


def _of_encoded(batch: PixelBatch, number: str) -> dict[str, torch.Tensor]:
    """What came out of a cache: ``0.moments``, ``0.cond.embeds``, and ``0.cond.embeds.1`` for the second of a list."""
    tensors = {} if batch.moments is None else {f"{number}.moments": batch.moments.both.contiguous()}
    for name, value in (batch.cond or {}).items():
        items = {f".{row}": item for row, item in enumerate(value)} if isinstance(value, list) else {"": value}
        tensors |= {f"{number}.cond.{name}{row}": item.contiguous() for row, item in items.items()}
    return tensors


def _encoded(tensors: dict[str, torch.Tensor], number: str) -> dict[str, Any]:
    """The other way round, as arguments for a batch."""
    start = f"{number}.cond."
    cond: Cond = {}
    for name in {key.removeprefix(start).split(".")[0] for key in tensors if key.startswith(start)}:
        rows = itertools.takewhile(tensors.__contains__, (f"{start}{name}.{row}" for row in itertools.count()))
        cond[name] = tensors[start + name] if start + name in tensors else [tensors[row] for row in rows]
    moments = tensors.get(f"{number}.moments")
    return {"moments": None if moments is None else Moments(moments), "cond": cond or None}


def replay(run: Run, bundle: Bundle) -> list[str]:
    """Do the step again with the adapter as it was; say each picture's loss and where numbers end."""
    model = run.strategy.unwrapped(run.adapter)
    lora.load_state(model, bundle.adapter)
    task = replace(run.task, denoiser=model)
    lines = [f"step {bundle.step + 1} of {bundle.folder}"]
    for batch in bundle.batches:
        with run.strategy.accelerator.autocast():
            losses = task(batch, bundle.step)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        for name, loss, t in zip(batch.ids, losses.tolist(), task.seen[-1].t.tolist(), strict=True):
            lines.append(f"  {name}: loss {loss:g} at time {t:.3f}")
    gradients = {name: item.grad for name, item in lora.parameters(model) if item.grad is not None}
    broken = [name for name, gradient in gradients.items() if not bool(torch.isfinite(gradient).all())]
    lines.append(f"gradients: {len(broken)} of {len(gradients)} tensors hold something that is no number"
                 + (f", the first of them {broken[0]}" if broken else ""))  # fmt: skip
    return lines
