"""Run a planned evaluation: load the model, generate and embed the pictures of each LoRA file, and judge the steps."""

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..errors import FileError
from ..evaluation.caption_sets import CaptionSet
from ..evaluation.embedding_metrics import Array, normalize_embeddings
from ..evaluation.picture_features import FeatureEmbedder
from ..evaluation.pictures import PictureGenerator, PictureRows, load_reference_pictures
from ..evaluation.result_chart import ExamplePictures
from ..evaluation.seed_bootstrap import Resampler
from ..evaluation.step_metrics import PictureSet, Reference, StepMetrics, build_statistics
from ..evaluation.verdict import Verdict, judge_steps
from ..log import ProgressBar
from ..models.embedding_models import EmbeddingModel
from ..training.network_weights import merge_base_weights
from ..training.temporary_merge import merge_temporarily
from .evaluated_runs import EvaluatedFile, label_runs
from .evaluation_plan import EvaluationPlan

logger = logging.getLogger(__name__)
Embedder = EmbeddingModel | FeatureEmbedder


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation has found."""

    verdict: Verdict
    resampler: Resampler
    examples: ExamplePictures
    num_pictures: int


@dataclass
class _Evaluator:
    """Holds the loaded models while pictures are generated."""

    plan: EvaluationPlan
    generator: PictureGenerator
    image_model: Embedder
    text_model: EmbeddingModel | None
    progress: ProgressBar
    text_embeddings: dict[str, Array] = field(default_factory=dict)

    def evaluate(self, name: str) -> tuple[PictureSet, dict[str, PictureRows]]:
        """Generate, save and embed the pictures of all captions with the model as it is."""
        pictures, texts, images = dict[str, Array](), dict[str, Array](), dict[str, PictureRows]()
        for captions in self.plan.caption_sets:
            rows: PictureRows = []
            for row in self.generator.generate_set(captions):
                self._save(name, captions, len(rows), row)
                rows.append(row)
                self.progress.update({"file": name}, len(row))
            images[captions.group] = rows
            pictures[captions.group] = np.stack([self.image_model.embed_pictures(row) for row in rows])
            if self.text_model is not None:
                texts[captions.group] = self._compare_with_texts(self.text_model, captions, rows)
        return PictureSet(pictures, texts), images

    def _compare_with_texts(self, model: EmbeddingModel, captions: CaptionSet, rows: PictureRows) -> Array:
        """Compute the cosine of each picture with its caption."""
        if captions.group not in self.text_embeddings:
            self.text_embeddings[captions.group] = model.embed_texts([prompt.text for prompt in captions.prompts])
        texts = normalize_embeddings(self.text_embeddings[captions.group])
        images = normalize_embeddings(np.stack([model.embed_pictures(row) for row in rows]))
        cosines: Array = (images * texts[:, None]).sum(axis=-1)
        return cosines

    def _save(self, name: str, captions: CaptionSet, index: int, row: Sequence[Image.Image]) -> None:
        folder = self.plan.output_dir / "pictures" / name.replace("/", "_")
        folder.mkdir(parents=True, exist_ok=True)
        for number, image in enumerate(row):
            image.save(folder / f"{captions.group}_{index + 1:02d}_seed{number + 1}.png")


def evaluate_plan(plan: EvaluationPlan) -> EvaluationResult:
    """Evaluate every file; the embedding models are loaded first, as they are small and may fail."""
    image_model, text_model = _load_embedders(plan)
    training, count = load_reference_pictures(plan.prepared)
    validation = None if plan.prepared.validation is None else load_reference_pictures(plan.prepared.validation)[0]
    if count > len(training):
        logger.info("%d of %d training pictures are compared with", len(training), count)
    files = [(label, run, file) for label, run in zip(_list_labels(plan), plan.runs, strict=True) for file in run.files]
    pipe = _load_pipeline(plan)
    per_file = sum(len(each.prompts) for each in plan.caption_sets) * plan.options.num_seeds
    total = per_file * (len(files) + 1)
    generator = PictureGenerator(
        plan.family, pipe, plan.device, plan.dtype, plan.options.num_seeds, plan.options.evaluation_seed
    )
    steps, examples = list[StepMetrics](), dict[str, Mapping[str, PictureRows]]()
    with ProgressBar(total, 0, "generating", enabled=True, unit="picture", log_first_and_last=False) as progress:
        evaluator = _Evaluator(plan, generator, image_model, text_model, progress)
        base, base_images = evaluator.evaluate("base")
        embedded = (None if images is None else image_model.embed_pictures(images) for images in (training, validation))
        reference = _build_reference(*embedded, base=base)
        for label, run, file in files:
            with _merge_file(plan, pipe, file):
                pictures, images = evaluator.evaluate(f"{label} {file.path.stem}")
            loss = run.find_validation_loss(file.step)
            metrics = build_statistics(pictures, reference)
            steps.append(StepMetrics(label, file.step, file.path.name, metrics, loss))
            examples[f"{label} {file.step}"] = images
    resampler = Resampler(plan.options.evaluation_seed)
    shown = ExamplePictures(plan.caption_sets, training, base_images, [examples[f"{s.run} {s.step}"] for s in steps])
    return EvaluationResult(judge_steps(steps, resampler), resampler, shown, total)


def _list_labels(plan: EvaluationPlan) -> list[str]:
    labels = label_runs(plan.runs)
    return [labels[index] for index in range(len(plan.runs))]


def _load_embedders(plan: EvaluationPlan) -> tuple[Embedder, EmbeddingModel | None]:
    options = plan.options
    image_model: Embedder = FeatureEmbedder()
    if options.image_model is not None:
        image_model = EmbeddingModel("image_model", options.image_model, plan.device)
    elif not plan.detected.is_built_in:
        logger.warning("no --image_model: pictures are compared by colors and edges only, which says little of photos")
    if options.text_model is not None:
        return image_model, EmbeddingModel("text_model", options.text_model, plan.device)
    reads_texts = isinstance(image_model, EmbeddingModel) and image_model.reads_texts
    if not reads_texts:
        logger.info("no --text_model: prompt following is not measured")
    return image_model, image_model if isinstance(image_model, EmbeddingModel) and reads_texts else None


def _build_reference(training: Array | None, validation: Array | None, base: PictureSet) -> Reference:
    if training is None or not len(training):
        raise FileError([])
    return Reference(training, validation, base)


def _load_pipeline(plan: EvaluationPlan) -> Any:
    """Load the model; only the denoiser and the VAE stay on the device."""
    facts, pipe = plan.family.facts, plan.family.load(plan.detected, plan.dtype)
    merge_base_weights(pipe, plan.base_weights)
    for name in facts.components:
        module = getattr(pipe, name)
        if isinstance(module, torch.nn.Module):
            module.requires_grad_(False).eval()
            if name not in facts.text.components:
                module.to(plan.device)
    return pipe


def _merge_file(plan: EvaluationPlan, pipe: Any, file: EvaluatedFile) -> AbstractContextManager[None]:
    content, problems = plan.reader.read(file.path)
    if content is None or problems:  # it has changed since it was checked
        raise FileError(problems)
    if not plan.options.lora_strength:
        return nullcontext()
    return merge_temporarily(pipe, content, plan.options.lora_strength)
