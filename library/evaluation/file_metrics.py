"""The metrics of one LoRA file, from the embeddings of its pictures, of the base model's, and of the dataset's."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from .caption_sets import COMPOSING, TRAINING, UNRELATED, VALIDATION
from .embedding_metrics import (
    Array,
    compute_caption_distance,
    compute_copying,
    compute_distances,
    compute_mean_similarity,
    compute_mutual_similarity,
    compute_natural_nearness,
    compute_nearest_similarity,
    compute_seed_distances,
)
from .seed_bootstrap import Estimate, MeanStatistic, PairStatistic, Resampler, ShareStatistic, Statistic

LIKENESS, COPYING, DRIFT = "likeness", "copying", "drift"
COMPOSED_LIKENESS = "composed likeness"
DIVERSITY, NEAREST = "diversity", "nearest training picture"
TRAINING_SIMILARITY, VALIDATION_SIMILARITY = "similarity to training", "similarity to validation"
FOLLOWING, COMPOSED_FOLLOWING = "prompt following", "composed prompt following"
FOLLOWING_CHANGE = "prompt following, change"

METRICS: Mapping[str, str] = {
    LIKENESS: "0: pictures of the base model, 1: as alike as real pictures are to each other",
    COPYING: "0: as near to one training picture as a picture that was not trained on, 1: equal to one",
    DRIFT: "of captions without the subject; 0: as without the LoRA, 1: as for another caption",
    COMPOSED_LIKENESS: "likeness with captions that put the subject into something new",
    DIVERSITY: "mean distance between the seeds of a caption",
    NEAREST: "similarity to the training picture that is nearest",
    TRAINING_SIMILARITY: "mean similarity to the training pictures, of their captions",
    VALIDATION_SIMILARITY: "mean similarity to the validation pictures, of their captions",
    FOLLOWING: "similarity of picture and caption, of training and validation captions",
    COMPOSED_FOLLOWING: "similarity of picture and caption, of captions with something new",
    FOLLOWING_CHANGE: "what the LoRA changes of prompt following, of captions without the subject",
}
"""What each metric is, in the order of the tables."""


@dataclass(frozen=True)
class EmbeddedPictures:
    """The embeddings of generated pictures by kind of caption: (captions, seeds, embedding)."""

    pictures: Mapping[str, Array]
    texts: Mapping[str, Array] = field(default_factory=dict)
    """Similarities of pictures and captions (captions, seeds); empty without a model of texts and pictures."""

    def join(self, *groups: str) -> Array:
        """Return the pictures of several kinds of captions, one below the other."""
        return np.concatenate([self.pictures[group] for group in groups if group in self.pictures])


@dataclass(frozen=True)
class Reference:
    """What the pictures of all LoRA files are compared with."""

    training: Array  # (pictures, embedding)
    validation: Array | None
    base: EmbeddedPictures

    @property
    def real_pictures(self) -> Array:
        """The pictures that likeness is measured against: those that were not trained on, if there are any."""
        return self.training if self.validation is None else self.validation

    @property
    def natural_nearness(self) -> float:
        return compute_natural_nearness(self.training, self.validation)

    @property
    def real_likeness(self) -> float:
        """How alike real pictures are: those of ``real_pictures`` among themselves, or to all if there is one."""
        if self.validation is not None:
            return float(compute_mean_similarity(self.validation, self.training).mean())
        return compute_mutual_similarity(self.training)


@dataclass(frozen=True)
class MetricStatistic:
    """A metric as a statistic that can be resampled, and the group whose seeds it depends on."""

    statistic: Statistic
    group: str


def build_statistics(pictures: EmbeddedPictures, reference: Reference) -> dict[str, MetricStatistic]:
    """Build every metric of the pictures of one LoRA file that can be computed."""
    statistics: dict[str, MetricStatistic] = {}
    subject = [group for group in (TRAINING, VALIDATION) if group in pictures.pictures]
    if subject:
        statistics |= _build_subject_statistics(pictures, reference, subject)
    if COMPOSING in pictures.pictures:
        share = _build_likeness(pictures.pictures[COMPOSING], reference.base.pictures[COMPOSING], reference)
        statistics[COMPOSED_LIKENESS] = MetricStatistic(share, COMPOSING)
    if UNRELATED in pictures.pictures:
        on, off = pictures.pictures[UNRELATED], reference.base.pictures[UNRELATED]
        drift = MeanStatistic(compute_distances(on, off), compute_caption_distance(off))
        statistics[DRIFT] = MetricStatistic(drift, UNRELATED)
    statistics |= _build_text_statistics(pictures, reference, subject)
    return {name: each for name in METRICS if (each := statistics.get(name)) is not None and _is_known(each)}


def _build_subject_statistics(
    pictures: EmbeddedPictures, reference: Reference, groups: list[str]
) -> dict[str, MetricStatistic]:
    on, off, key = pictures.join(*groups), reference.base.join(*groups), "+".join(groups)
    found = {
        LIKENESS: MetricStatistic(_build_likeness(on, off, reference), key),
        COPYING: MetricStatistic(
            MeanStatistic(compute_copying(on, reference.training, reference.natural_nearness)), key
        ),
        NEAREST: MetricStatistic(MeanStatistic(compute_nearest_similarity(on, reference.training)), key),
        DIVERSITY: MetricStatistic(PairStatistic(compute_seed_distances(on)), key),
    }
    places = (
        (TRAINING, TRAINING_SIMILARITY, reference.training),
        (VALIDATION, VALIDATION_SIMILARITY, reference.validation),
    )
    for group, name, real in places:
        if group in pictures.pictures and real is not None:
            similarity = compute_mean_similarity(pictures.pictures[group], real)
            found[name] = MetricStatistic(MeanStatistic(similarity), group)
    return found


def _build_likeness(on: Array, off: Array, reference: Reference) -> ShareStatistic:
    real = reference.real_pictures
    similarity, base = (compute_mean_similarity(each, real) for each in (on, off))
    return ShareStatistic(similarity, base, reference.real_likeness)


def _build_text_statistics(
    pictures: EmbeddedPictures, reference: Reference, groups: list[str]
) -> dict[str, MetricStatistic]:
    texts, base, found = pictures.texts, reference.base.texts, dict[str, MetricStatistic]()
    if groups and all(group in texts for group in groups):
        values = np.concatenate([texts[group] for group in groups])
        found[FOLLOWING] = MetricStatistic(MeanStatistic(values), "+".join(groups))
    if COMPOSING in texts:
        found[COMPOSED_FOLLOWING] = MetricStatistic(MeanStatistic(texts[COMPOSING]), COMPOSING)
    if UNRELATED in texts:
        change = MeanStatistic(texts[UNRELATED] - base[UNRELATED])
        found[FOLLOWING_CHANGE] = MetricStatistic(change, UNRELATED)
    return found


def _is_known(metric: MetricStatistic) -> bool:
    """Whether the metric is a number: with one seed there are no pairs, with one picture nothing is natural."""
    captions, seeds = metric.statistic.shape
    if isinstance(metric.statistic, PairStatistic) and seeds < 2:
        return False
    value = Resampler(num_resamples=1).estimate(metric.statistic, metric.group).value
    return bool(captions) and bool(np.isfinite(value))


@dataclass(frozen=True)
class FileMetrics:
    """The metrics of one LoRA file of a run."""

    run: str
    step: int
    file: str
    statistics: Mapping[str, MetricStatistic]
    validation_loss: float | None = None
    """The loss that the run recorded at this step."""

    def estimate_all(self, resampler: Resampler) -> dict[str, Estimate]:
        """Estimate every metric with its confidence interval."""
        return {name: resampler.estimate(each.statistic, each.group) for name, each in self.statistics.items()}
