"""The evaluation callback: likeness, copying and drift of pictures that the model in memory generates.

It measures what ``python -m library evaluate`` measures of files (docs/evaluate.md), with the pictures distributed over
the ranks as previews are, and judges by the same rule.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..adapters.injection import disable_adapters
from ..cache.model_fingerprint import compute_quick_model_fingerprint
from ..config.schema_output import EvaluateConfig
from ..dataloader.batch import Cond
from ..dataloader.prepare import PreparedData
from ..dataloader.run_plan import RunPlan
from ..dataloader.sample_prompts import Prompt
from ..distributed.devices import HOST
from ..evaluation.caption_sets import CaptionChoice, CaptionSet, build_caption_sets, set_sampling
from ..evaluation.embedders import EmbedderChoice, PictureEmbedder
from ..evaluation.embedding_metrics import Array
from ..evaluation.file_metrics import EmbeddedPictures, Reference, build_statistics
from ..evaluation.pictures import derive_picture_seed, load_reference_pictures
from ..evaluation.recorded_steps import RECORD_END, Basis, RecordedStep, RecordFile
from ..evaluation.result_table import format_estimate
from ..evaluation.seed_bootstrap import Resampler
from ..evaluation.verdict import judge_steps
from ..models.detect import DetectedModel
from ..models.sampling import use_eval_mode
from ..models.training_adapter import bypass_training_adapter
from ..optim.optimizers import use_eval_weights
from .preview import ALL_RANKS_TIMEOUT_SECONDS, move_image_encoders
from .state import TrainingRun, is_interval_reached

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)
EVALUATION_SEED = 0
"""The seed of the noise, which does not depend on the run's seed, so that runs can be compared."""


@dataclass(frozen=True)
class PlannedPicture:
    """A picture to generate: its caption, and its place among those of a kind."""

    group: str
    caption: int
    number: int
    prompt: Prompt

    @property
    def seed(self) -> int:
        return derive_picture_seed(EVALUATION_SEED, self.group, self.caption, self.number)


EmbeddedPicture = tuple[Array, float | None]
"""The embedding of a picture, and its similarity to its caption."""


def _plan_caption_sets(config: EvaluateConfig, prepared: PreparedData, detected: DetectedModel) -> list[CaptionSet]:
    """Choose the captions of the evaluations of a run."""
    choice = CaptionChoice(config.evaluation_captions, config.evaluation_subject, is_demo=detected.is_built_in)
    sets = build_caption_sets(prepared, choice, detected.size_multiple)
    steps = config.evaluation_sampling_steps
    return [set_sampling(each, steps, None, is_demo=detected.is_built_in) for each in sets]


def is_evaluation_due(config: EvaluateConfig, plan: RunPlan, step: int) -> bool:
    """Whether the run is evaluated after step ``step``, counted from 1: every n steps or epochs, and at the end."""
    return config.is_active and (
        step >= plan.steps
        or is_interval_reached(plan, step, steps=config.evaluate_every_n_steps)
        or is_interval_reached(plan, step, epochs=config.evaluate_every_n_epochs)
    )


class RunEvaluation:
    """Generate and embed pictures of the base model once, and of the trained one every n steps or epochs."""

    id = "evaluation"
    is_deferrable = True

    def __init__(
        self,
        config: EvaluateConfig,
        prepared: PreparedData,
        detected: DetectedModel,
        output: tuple[Path, str],
        started_at: float,
    ):
        self.config, self.prepared, self.detected = config, prepared, detected
        self.caption_sets = _plan_caption_sets(config, prepared, detected)
        self.path, self.started_at = output[0] / f"{output[1]}{RECORD_END}", started_at
        self.pictures = [
            PlannedPicture(captions.group, caption, number, prompt)
            for captions in self.caption_sets
            for caption, prompt in enumerate(captions.prompts)
            for number in range(config.evaluation_pictures)
        ]
        self.resampler = Resampler(EVALUATION_SEED)
        self.embedder: PictureEmbedder | None = None
        self.base: EmbeddedPictures | None = None
        self.reference: Reference | None = None
        self.file: RecordFile | None = None
        self.basis: Basis = {}

    @property
    def prompts(self) -> list[Prompt]:
        """The captions of all pictures."""
        return [prompt for captions in self.caption_sets for prompt in captions.prompts]

    def should_run(self, run: TrainingRun) -> bool:
        return is_evaluation_due(self.config, run.plan, run.state.step)

    def measure_base(self, run: TrainingRun) -> None:
        """Measure the base model, with the adapters disabled; call it before training changes its weights."""
        choice = EmbedderChoice(self.config.evaluation_image_model, self.config.evaluation_text_model, "evaluation_")
        self.embedder = PictureEmbedder.load(choice, HOST, is_demo=self.detected.is_built_in)
        with disable_adapters(run.strategy.unwrap_model(run.model)):
            self.base = self._generate_and_embed(run)

    def on_train_begin(self, run: TrainingRun) -> None:
        if self.base is None:
            self.measure_base(run)
        self.basis = self._describe_basis()
        if run.strategy.comm.is_main:
            self.file = RecordFile(self.path, self.started_at, run.state.step if run.state.samples else 0)
        if self.base is not None and self.embedder is not None:
            self.reference = _embed_reference(run, self.prepared, self.embedder, self.base)

    def __call__(self, run: TrainingRun) -> None:
        reference = self.reference
        pictures = None if reference is None else self._generate_and_embed(run)
        if reference is None or pictures is None:
            return
        statistics = build_statistics(pictures, reference)
        values = dict[str, float]()
        for name, each in statistics.items():
            estimate = self.resampler.estimate(each.statistic, each.group)
            key = f"evaluation/{name.replace(',', '').replace(' ', '_')}"
            values[key] = estimate.value
            if estimate.low is not None and estimate.high is not None:
                values |= {f"{key}/low": estimate.low, f"{key}/high": estimate.high}
        run.metric_logger.log_values(run, values)
        if self.file is not None:
            self.file.append(RecordedStep(run.state.step, self.started_at, self.basis, statistics))
            self._log_verdict(run, self.file.steps)

    def _log_verdict(self, run: TrainingRun, steps: Sequence[RecordedStep]) -> None:
        """Log what was measured, and after the last step which one is the best, by the rule for LoRA files."""
        name = run.config.save.output_name
        steps = [each for each in steps if each.basis == self.basis]  # a resumed run may be measured otherwise
        verdict = judge_steps([each.to_metrics(name, "", None) for each in steps], self.resampler)
        latest = verdict.steps[-1]
        estimates = latest.metrics.estimate_all(self.resampler)
        numbers = ", ".join(f"{metric} {format_estimate(estimate)}" for metric, estimate in estimates.items())
        logger.info("evaluation after step %d: %s: %s", run.state.step, latest.describe(), numbers)
        if run.state.step >= run.plan.steps:
            logger.info("evaluation: %s", verdict.format_sentence())

    def _describe_basis(self) -> Basis:
        """Describe what is measured with, without paths: two runs are compared only where it is equal."""
        real = [self.prepared, *([] if self.prepared.validation is None else [self.prepared.validation])]
        hashes = [
            sorted({sample.content_hash for sample in each.manifest.samples if not sample.is_reg}) for each in real
        ]
        captions = {
            each.group: [
                [prompt.text, prompt.width, prompt.height, prompt.num_inference_steps, prompt.cfg_scale]
                for prompt in each.prompts
            ]
            for each in self.caption_sets
        }
        return {
            "model": compute_quick_model_fingerprint(self.detected),
            "training pictures": hashes[0],
            "validation pictures": hashes[1:],
            "captions": captions,
            "pictures of each caption": self.config.evaluation_pictures,
            "image model": _get_name(self.config.evaluation_image_model),
            "text model": _get_name(self.config.evaluation_text_model),
        }

    def _generate_and_embed(self, run: TrainingRun) -> EmbeddedPictures | None:
        """Generate the pictures on all ranks; None where one fails, such as out of memory: the run goes on."""
        model = run.strategy.unwrap_model(run.model)
        modes = use_eval_mode(model), bypass_training_adapter(model)
        drawn, failure = dict[int, EmbeddedPicture](), ""
        with use_eval_weights(run.optimizer), run.strategy.evaluate(), modes[0], modes[1]:
            try:
                drawn = self._embed(run, dict(self._generate_for_rank(run)))
            except Exception as error:
                if run.strategy.has_collective_forward and not run.strategy.comm.all_ranks_reached(
                    f"evaluation after step {run.state.step}", ALL_RANKS_TIMEOUT_SECONDS
                ):
                    raise  # the other ranks wait in a collective
                failure = str(error) or type(error).__name__
        found = run.strategy.comm.all_gather_object((drawn, failure))
        if failures := [text for _, text in found if text]:
            logger.warning("evaluation after step %d failed and is skipped: %s", run.state.step, failures[0])
            return None
        return self._join({index: picture for part, _ in found for index, picture in part.items()})

    def _generate_for_rank(self, run: TrainingRun) -> "Iterator[tuple[int, Image]]":
        """Generate the pictures of this rank, or all of them where the forward pass is collective."""
        task, strategy, texts = run.task, run.strategy, dict[str, tuple[Cond, Cond]]()
        with strategy.accelerator.autocast(), move_image_encoders(task):
            for index, picture in enumerate(self.pictures):
                is_mine = index % strategy.comm.world_size == strategy.comm.rank
                if not (is_mine or strategy.has_collective_forward):
                    continue
                prompt = picture.prompt
                if prompt.text not in texts:
                    cond = task.encode_text([prompt.text], [[]])
                    texts = {prompt.text: (cond, task.encode_text([prompt.negative_prompt], [[]], is_negative=True))}
                cond, negative = texts[prompt.text]
                generator = torch.Generator().manual_seed(picture.seed)
                image = task.family.generate_image(
                    task.pipe, prompt, cond, negative_cond=negative, generator=generator, sampler=prompt.sampler
                )
                if is_mine:
                    yield index, image

    def _embed(self, run: TrainingRun, images: "Mapping[int, Image]") -> dict[int, EmbeddedPicture]:
        if self.embedder is None or not images:
            return {}
        with self.embedder.use_device(run.task.to_device.device):
            rows = self.embedder.image_model.embed_pictures(list(images.values()))
            texts = [self.pictures[index].prompt.text for index in images]
            cosines = self.embedder.compare_with_texts(list(images.values()), texts)
        values = [None] * len(rows) if cosines is None else cosines.tolist()
        return dict(zip(images, zip(rows, values, strict=True), strict=True))

    def _join(self, drawn: Mapping[int, EmbeddedPicture]) -> EmbeddedPictures:
        """Put the pictures of all ranks in their places: (captions, pictures of a caption, embedding)."""
        pictures, texts = dict[str, Array](), dict[str, Array]()
        for captions in self.caption_sets:
            shape = len(captions.prompts), self.config.evaluation_pictures
            rows = [drawn[index] for index, each in enumerate(self.pictures) if each.group == captions.group]
            pictures[captions.group] = np.stack([row for row, _ in rows]).reshape(*shape, -1)
            cosines = [value for _, value in rows if value is not None]
            if len(cosines) == len(rows):
                texts[captions.group] = np.asarray(cosines).reshape(shape)
        return EmbeddedPictures(pictures, texts)


def _embed_reference(
    run: TrainingRun, prepared: PreparedData, embedder: PictureEmbedder, base: EmbeddedPictures
) -> Reference:
    """Embed pictures of the dataset on the main rank."""

    def embed(data: PreparedData) -> Array:
        return embedder.image_model.embed_pictures(load_reference_pictures(data)[0])

    def embed_all() -> tuple[Array, Array | None]:
        with embedder.use_device(run.task.to_device.device):
            return embed(prepared), None if prepared.validation is None else embed(prepared.validation)

    training, validation = run.strategy.comm.run_on_main_and_broadcast(embed_all)
    return Reference(training, validation, base)


def _get_name(model: str | None) -> str:
    """Return the last part of a path or hub id."""
    return "" if model is None else Path(model).name
