"""Save the vectors of a new word as an embedding file, as A1111, ComfyUI, diffusers and sd-scripts read it.

The file has a tensor (vectors, width) for each text encoder: ``emb_params`` where the model has one, ``clip_l`` and
``clip_g`` where it has two.  In pivotal tuning it is beside the LoRA file, which may contain the vectors as well.
"""

import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ..adapters import file_writer
from ..adapters.kohya_diffusers_comfyui_keys import EMBEDDING_PREFIX
from ..adapters.metadata import add_model_hashes
from ..config.schema import AdapterConfig
from ..errors import UserError
from ..models.facts import FamilyFacts
from ..problems import report_file
from .adapter_parts import AdapterPart
from .save_adapter import AdapterFile, SaveAdapter
from .save_weights import SaveWeights, reserve_disk_space
from .state import TrainingRun
from .token_embeddings import collect_vectors

logger = logging.getLogger(__name__)
EMBEDDING_SUFFIX = "_emb"
"""The end of the names of embedding files beside LoRA files, before the extension."""


class SaveEmbedding(SaveWeights):
    """Save the embedding file."""

    title = "embedding file"

    def _save_files(self, run: TrainingRun, path: Path) -> list[Path]:
        save_vectors(self, run, path)
        return [path]


class SavePivotalTuning(SaveAdapter):
    """Save the LoRA file, and beside it the embedding file of the word that was trained with it."""

    title = "LoRA and embedding file"

    def _save_files(self, run: TrainingRun, path: Path) -> list[Path]:
        embedding_path = path.with_name(f"{path.stem}{EMBEDDING_SUFFIX}{path.suffix}")
        save_vectors(self, run, embedding_path)  # first: it refuses vectors that are NaN or Inf
        return [*super()._save_files(run, path), embedding_path]

    def _build_file(self, run: TrainingRun, model: nn.Module, part: AdapterPart) -> AdapterFile:
        file = super()._build_file(run, model, part)
        config = run.config.adapter
        start = f"{EMBEDDING_PREFIX}{config.token_string}."  # of network_weights: vectors that are no longer those
        file = replace(file, tensors={key: each for key, each in file.tensors.items() if not key.startswith(start)})
        if not config.bundle_emb:
            return file
        bundle = file_writer.cast_tensors(
            build_bundle(model, config, run.task.family.facts), self.config.save_precision
        )
        return replace(file, tensors=file.tensors | bundle)


def build_bundle(modules: nn.Module, config: AdapterConfig, facts: FamilyFacts) -> dict[str, Tensor]:
    """Build the tensors of a LoRA file that hold the vectors, under OneTrainer's names."""
    start = f"{EMBEDDING_PREFIX}{config.token_string}."
    vectors = collect_vectors(modules, facts).values()
    keys = facts.text.embedding_keys.values()
    return {f"{start}{key}": tensor.cpu().contiguous() for key, tensor in zip(keys, vectors, strict=True)}


def save_vectors(saver: SaveWeights, run: TrainingRun, path: Path) -> None:
    """Write the embedding file on the main rank, and verify it."""
    run.strategy.comm.run_on_main(lambda: _write_file(saver, run, path))
    logger.info("saved %s", path)


def _write_file(saver: SaveWeights, run: TrainingRun, path: Path) -> None:
    vectors = collect_vectors(run.strategy.unwrap_model(run.model), run.task.family.facts)
    tensors = {key: tensor.cpu().contiguous() for key, tensor in vectors.items()}
    if unusable := [key for key, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]:
        raise UserError(report_file(path, f"not written: {unusable[0]} has NaN or Inf"))
    tensors = file_writer.cast_tensors(tensors, saver.config.save_precision)
    if run.state.step < run.plan.steps:
        reserve_disk_space(path, sum(each.nbytes for each in tensors.values()), run)
    metadata = add_model_hashes(tensors, saver.build_metadata(run, as_embedding=True))
    file_writer.write_embedding_file(path, tensors, metadata)
