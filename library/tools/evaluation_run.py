"""Run a planned evaluation: load the model, generate and embed the pictures of each LoRA file, and judge the steps."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..adapters.kohya_diffusers_comfyui_keys import AdapterFileContents
from ..errors import FileError
from ..evaluation.caption_sets import CaptionSet
from ..evaluation.embedders import EmbedderChoice, PictureEmbedder
from ..evaluation.embedding_metrics import Array
from ..evaluation.file_metrics import LIKENESS, EmbeddedPictures, FileMetrics, Reference, build_statistics
from ..evaluation.pictures import EncodedCaption, PictureGenerator, PictureRows, load_reference_pictures
from ..evaluation.result_chart import CELL, ExamplePictures
from ..evaluation.seed_bootstrap import MIN_SHARE_OF_ROOM, Resampler, ShareStatistic
from ..evaluation.verdict import EvaluationVerdict, judge_steps
from ..log import ProgressBar
from ..models.loading import describe_dequantized
from ..models.scheduler_overrides import override_scheduler
from ..problems import Problem
from ..training.network_weights import merge_base_weights
from ..training.temporary_merge import merge_temporarily
from .evaluated_runs import EvaluatedFile, label_runs
from .evaluation_plan import EvaluationPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation has found."""

    verdict: EvaluationVerdict
    resampler: Resampler
    examples: ExamplePictures
    num_pictures: int


@dataclass
class _Evaluator:
    """Holds the loaded models while pictures are generated."""

    plan: EvaluationPlan
    generator: PictureGenerator
    embedder: PictureEmbedder
    progress: ProgressBar
    base_captions: dict[str, list[EncodedCaption]] = field(default_factory=dict)
    """What the text encoders of the base model make of the captions of each kind."""

    def evaluate(self, name: str, *, changes_texts: bool = False) -> tuple[EmbeddedPictures, dict[str, PictureRows]]:
        """Generate, save and embed the pictures of all captions with the model as it is; return small ones to show.

        ``changes_texts``: its text encoders are not those of the base model.
        """
        pictures, texts, images = dict[str, Array](), dict[str, Array](), dict[str, PictureRows]()
        self._clear(name)
        for captions in self.plan.caption_sets:
            rows: PictureRows = []
            for row in self.generator.generate_set(captions, self._encode(captions, changes_texts=changes_texts)):
                self._save(name, captions, len(rows), row)
                rows.append(row)
                self.progress.update({"file": name}, len(row))
            images[captions.group] = [[_shrink(row[0])] for row in rows]
            pictures[captions.group] = np.stack([self.embedder.image_model.embed_pictures(row) for row in rows])
            pairs = zip(rows, captions.prompts, strict=True)
            found = [self.embedder.compare_with_texts(row, [prompt.text] * len(row)) for row, prompt in pairs]
            cosines = [each for each in found if each is not None]
            texts |= {captions.group: np.stack(cosines)} if cosines else {}
        return EmbeddedPictures(pictures, texts), images

    def _encode(self, captions: CaptionSet, *, changes_texts: bool) -> list[EncodedCaption]:
        if changes_texts:
            return self.generator.encode_set(captions)
        if captions.group not in self.base_captions:
            self.base_captions[captions.group] = self.generator.encode_set(captions)
        return self.base_captions[captions.group]

    def _get_folder(self, name: str) -> Path:
        return self.plan.output_dir / "pictures" / name  # of a label with folders, a folder in these

    def _clear(self, name: str) -> None:
        """Remove the pictures of an earlier evaluation, which may have had more captions or seeds."""
        self._get_folder(name).mkdir(parents=True, exist_ok=True)
        for path in self._get_folder(name).glob("*_seed*.png"):
            path.unlink()

    def _save(self, name: str, captions: CaptionSet, index: int, row: Sequence[Image.Image]) -> None:
        for number, image in enumerate(row):
            image.save(self._get_folder(name) / f"{captions.group}_{index + 1:02d}_seed{number + 1}.png")


def evaluate_plan(plan: EvaluationPlan) -> EvaluationResult:
    """Evaluate every file; the embedding models are loaded first, as they are small and may fail."""
    choice = EmbedderChoice(plan.options.image_model, plan.options.text_model)
    embedder = PictureEmbedder.load(choice, plan.device, is_demo=plan.detected.is_built_in)
    image_model = embedder.image_model
    training, count = load_reference_pictures(plan.prepared)
    validation = None if plan.prepared.validation is None else load_reference_pictures(plan.prepared.validation)[0]
    if not training:
        raise FileError([Problem("dataset_config", "has no training picture besides regularization images")])
    if count > len(training):
        logger.info("%d of %d training pictures are compared with", len(training), count)
    files = [(label, run, file) for label, run in zip(_list_labels(plan), plan.runs, strict=True) for file in run.files]
    pipe = _load_pipeline(plan)
    per_file = sum(len(each.prompts) for each in plan.caption_sets) * plan.options.num_seeds
    total = per_file * (len(files) + 1)
    generator = PictureGenerator(
        plan.family, pipe, plan.device, plan.dtype, num_seeds=plan.options.num_seeds, seed=plan.options.evaluation_seed
    )
    steps, examples = list[FileMetrics](), list[Mapping[str, PictureRows]]()
    with ProgressBar(total, 0, "generating", enabled=True, unit="picture", log_first_and_last=False) as progress:
        evaluator = _Evaluator(plan, generator, embedder, progress)
        base, base_images = evaluator.evaluate("base")
        held_out = None if validation is None else image_model.embed_pictures(validation)
        reference = Reference(image_model.embed_pictures(training), held_out, base)
        for label, run, file in files:
            content = _read_file(plan, file)
            changes_texts = _changes_text_encoders(content, plan)
            with merge_temporarily(pipe, content, plan.options.lora_strength):
                pictures, images = evaluator.evaluate(f"{label} {file.path.stem}", changes_texts=changes_texts)
            loss = run.find_validation_loss(file.step)
            metrics = build_statistics(pictures, reference)
            steps.append(FileMetrics(label, file.step, file.path.name, metrics, loss))
            examples.append(images)
    if any(not _reaches_ceiling(each) for each in steps):
        logger.warning(
            "real pictures are hardly more like each other than those of the base model are like them: likeness 1 is "
            "%d %% of the way from the base model to equality instead",
            round(100 * MIN_SHARE_OF_ROOM),
        )
    resampler = Resampler(plan.options.evaluation_seed)
    shown = ExamplePictures(plan.caption_sets, training, base_images, examples)
    return EvaluationResult(judge_steps(steps, resampler), resampler, shown, total)


def _reaches_ceiling(step: FileMetrics) -> bool:
    found = step.statistics.get(LIKENESS)
    return found is None or not isinstance(found.statistic, ShareStatistic) or found.statistic.reaches_ceiling


def _list_labels(plan: EvaluationPlan) -> list[str]:
    labels = label_runs(plan.runs)
    return [labels[index] for index in range(len(plan.runs))]


def _load_pipeline(plan: EvaluationPlan) -> Any:
    """Load the model; only the denoiser and the VAE stay on the device."""
    if plan.detected.stored_formats:
        logger.info(
            "%s", describe_dequantized(plan.detected, plan.dtype, "as pictures are generated with whole weights")
        )
    facts, pipe = plan.family.facts, plan.family.load(plan.detected, plan.dtype)
    pipe.scheduler = override_scheduler(pipe.scheduler, plan.config.noise)  # as build_objective, for previews
    merge_base_weights(pipe, plan.base_weights)
    for name in facts.components:
        module = getattr(pipe, name)
        if isinstance(module, torch.nn.Module):
            module.requires_grad_(False).eval()
            if name not in facts.text.components:
                module.to(plan.device)
    return pipe


def _read_file(plan: EvaluationPlan, file: EvaluatedFile) -> AdapterFileContents:
    content, problems = plan.reader.read(file.path)
    if content is None or problems:  # it has changed since it was checked
        raise FileError(problems)
    return content


def _changes_text_encoders(content: AdapterFileContents, plan: EvaluationPlan) -> bool:
    changed = {module.partition(".")[0] for module in content.alphas}
    changed |= {fused.component for fused in content.fused.values()}
    return bool(changed & set(plan.family.facts.text.components))


def _shrink(image: Image.Image) -> Image.Image:
    """Return a copy of at most the size in which the chart shows it."""
    small = image.copy()
    small.thumbnail((CELL, CELL))
    return small
