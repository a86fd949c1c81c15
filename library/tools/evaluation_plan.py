"""Plan an evaluation: all problems of its arguments, runs, files, prompts and models, before a model is loaded."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..atomic_files import find_write_error
from ..config.options import build_config, flatten_config
from ..config.parser import ParsedConfig
from ..config.schema import RunConfig
from ..config.validate_objective import validate_objective_for_model
from ..dataloader.prepare import PreparedData, prepare_data
from ..dataloader.sample_prompts import Prompt, load_prompts
from ..dataset.validate import validate_dataset_config
from ..distributed.devices import MIXED_PRECISION_DTYPES, get_accelerator_or_host
from ..errors import ConfigError, UserError
from ..evaluation.caption_sets import (
    COMPOSING,
    UNRELATED,
    VALIDATION,
    CaptionChoice,
    CaptionSet,
    build_caption_sets,
    contains_subject,
    find_subject,
    list_training_captions,
    set_sampling,
)
from ..evaluation.embedders import EmbedderChoice
from ..evaluation.pictures import find_unsupported_reason
from ..models.base import Family
from ..models.detect import DetectedModel, build_control_limits, detect_model
from ..models.families import FAMILIES
from ..models.validate_options import validate_prompts
from ..problems import Problem, dedupe_problems
from ..training.network_weights import InitialWeights, MergeableFileReader, read_initial_weights
from .evaluated_runs import (
    SHARED_GROUPS,
    EvaluatedRun,
    find_runs,
    label_runs,
    list_group_options,
    read_run_settings,
)

if TYPE_CHECKING:
    from .evaluate import EvaluateOptions

logger = logging.getLogger(__name__)
SCHEDULER_OPTIONS = ("v_parameterization", "zero_terminal_snr")
"""The options of noise that change what the model's prediction means, and with it the pictures."""


@dataclass(frozen=True)
class EvaluationPlan:
    """Everything that an evaluation needs, checked."""

    options: "EvaluateOptions"
    config: RunConfig
    runs: tuple[EvaluatedRun, ...]
    family: Family
    detected: DetectedModel
    base_weights: InitialWeights
    reader: MergeableFileReader
    prepared: PreparedData
    caption_sets: tuple[CaptionSet, ...]
    device: torch.device
    dtype: torch.dtype
    output_dir: Path

    def describe(self) -> dict[str, Any]:
        """Describe how the pictures were made and compared, for the JSON of the result."""
        options = self.options
        prompt = self.caption_sets[0].prompts[0]
        return {
            "image_model": options.image_model or "colors and edges",
            "text_model": options.text_model or "",
            "num_seeds": options.num_seeds,
            "evaluation_seed": options.evaluation_seed,
            "inference_steps": prompt.num_inference_steps or self.family.facts.sampling.num_inference_steps,
            "inference_scale": self.family.facts.sampling.get_guidance_scale(prompt.cfg_scale),
            "lora_strength": options.lora_strength,
            "captions": {each.group: [prompt.text for prompt in each.prompts] for each in self.caption_sets},
        }


def plan_evaluation(
    words: Sequence[str], options: "EvaluateOptions", own: ParsedConfig, training: ParsedConfig
) -> EvaluationPlan:
    """Check everything that can be checked without pictures, raise with all problems, then scan the pictures."""
    problems = [*own.problems, *(each for each in training.problems if not _is_missing_dataset(each))]
    if not words:
        problems.append(Problem("", "no run and no LoRA file given", "name OUTPUT_DIR/OUTPUT_NAME, or files"))
    runs = find_runs(words, problems)
    config = _merge_settings(runs, training, problems)
    problems += _validate_datasets(config, runs)
    prompts = {
        name: _load_own_prompts(name, getattr(options, f"{name}_prompts"), problems) for name in (COMPOSING, UNRELATED)
    }
    problems += _validate_prompt_sets(prompts)
    problems += EmbedderChoice(options.image_model, options.text_model).find_problems()
    output_dir = _choose_output_dir(options, runs)
    if output_dir is not None and (error := find_write_error(output_dir)):
        problems.append(Problem("evaluation_dir", f"cannot write to {output_dir}: {error}"))
    model = _check_model(config, runs, [*prompts[COMPOSING], *prompts[UNRELATED]], problems)
    if problems or model is None or output_dir is None:
        raise ConfigError(own.locate_problems(training.locate_problems(dedupe_problems(problems))))
    family, detected, base, reader = model
    prepared = prepare_data(
        config.data,
        detected.size_multiple,
        config.cache.cache_dir,
        control_limits=build_control_limits(detected),
        max_side=detected.max_side,
        frame_rule=detected.frame_rule,
    )
    return EvaluationPlan(
        options=options,
        config=config,
        runs=tuple(runs),
        family=family,
        detected=detected,
        base_weights=base,
        reader=reader,
        prepared=prepared,
        caption_sets=tuple(_build_sets(prepared, prompts, options, detected)),
        device=get_accelerator_or_host(),
        dtype=_choose_dtype(config, runs, training),
        output_dir=output_dir,
    )


def _is_missing_dataset(problem: Problem) -> bool:
    """Whether it says that the command line names no pictures, which a run may name."""
    return problem.option == "dataset_config" and problem.text == "missing"


def _merge_settings(runs: Sequence[EvaluatedRun], training: ParsedConfig, problems: list[Problem]) -> RunConfig:
    """Take model and pictures from the runs, which have to agree, unless the command line sets them."""
    given = flatten_config(training.config)
    explicit = {name: given[name] for name in training.explicit}
    replaced = {"model"} if "pretrained_model_name_or_path" in explicit else set()
    replaced |= {"data"} if training.config.data.dataset_option is not None else set()
    shared = list_group_options(*(group for group in SHARED_GROUPS if group not in replaced))
    shared |= {"base_weights", "base_weights_multiplier", "cache_dir", "mixed_precision", *SCHEDULER_OPTIONS}
    found, labels = list[tuple[str, dict[str, Any]]](), label_runs(runs)
    for index, run in enumerate(runs):
        values, run_problems = read_run_settings(run)
        problems += run_problems
        if values.get("train") == "full":
            problems.append(Problem("", f"{labels[index]}: trained a whole model, and not a LoRA"))
        if values.get("slider_prompts") and "data" not in replaced:
            text = f"{labels[index]} was trained from texts alone (slider_prompts), without pictures to compare with"
            problems.append(Problem("dataset_config", text, "give a dataset file of pictures"))
        found += [(labels[index], values)] if run.summary is not None else []
    compared = sorted(shared - explicit.keys() - {"cache_dir", "mixed_precision"})
    for name in compared:
        values_by_run = {label: values.get(name) for label, values in found}
        if len(set(map(repr, values_by_run.values()))) > 1:
            text = ", ".join(f"{label}: {value}" for label, value in values_by_run.items())
            problems.append(Problem(name, f"differs between the runs ({text})", "give the one to use for all"))
    first = found[0][1] if found else {}
    values = {name: value for name, value in first.items() if name in shared and name != "slider_prompts"}
    if "quantize_base" in values:
        logger.info("quantize_base: pictures are generated with the model as it is, without quantizing it")
    dropped = ("quantize_base", "quantized_matmul", "dequantize_base")
    merged: RunConfig = build_config(RunConfig, {n: v for n, v in {**values, **explicit}.items() if n not in dropped})
    return merged


def _validate_datasets(config: RunConfig, runs: Sequence[EvaluatedRun]) -> Iterator[Problem]:
    if config.data.dataset_option is None:
        if any(run.summary is None for run in runs):
            text = "missing; the files belong to no run that says which pictures were trained"
            yield Problem("dataset_config", text, "give the dataset file of the training")
        return
    name = config.data.dataset_option
    path = Path(getattr(config.data, name)).expanduser()
    if not path.exists():
        yield Problem(name, f"{path}: no such file", "start where the run was started, or give the file")
    else:
        yield from validate_dataset_config(config.data)


def _load_own_prompts(kind: str, value: str | None, problems: list[Problem]) -> tuple[Prompt, ...]:
    if value is None:
        return ()
    try:
        return tuple(load_prompts(Path(value).expanduser()))
    except UserError as error:
        problems += (replace(each, option=f"{kind}_prompts") for each in error.problems)
        return ()


def _validate_prompt_sets(prompts: Mapping[str, tuple[Prompt, ...]]) -> Iterator[Problem]:
    for own in prompts.values():
        for prompt in own:
            if prompt.seed is not None:
                text = "the pictures of a caption have several seeds"
                yield replace(prompt.report("seed", text, "remove it, and set --evaluation_seed"), option="")
            if prompt.network_multiplier != 1.0:
                text = "all pictures have the same strength of the LoRA"
                fix = "remove it, and set --lora_strength"
                yield replace(prompt.report("network_multiplier", text, fix), option="")
    if len(prompts[UNRELATED]) == 1:
        yield Problem("unrelated_prompts", "one caption; drift is measured on the scale of several", "add another")


def _choose_output_dir(options: "EvaluateOptions", runs: Sequence[EvaluatedRun]) -> Path | None:
    if options.evaluation_dir is not None:
        return Path(options.evaluation_dir).expanduser()
    return runs[0].folder / f"{runs[0].name}.evaluation" if runs else None


def _check_model(
    config: RunConfig, runs: Sequence[EvaluatedRun], prompts: Sequence[Prompt], problems: list[Problem]
) -> tuple[Family, DetectedModel, InitialWeights, MergeableFileReader] | None:
    """Detect the model and read every LoRA file, on the meta device."""
    try:
        detected = detect_model(config.model)
        family: Family = FAMILIES.get(detected.family)(config.model)
    except UserError as error:
        problems += error.problems
        return None
    if reason := find_unsupported_reason(family):
        problems.append(Problem("pretrained_model_name_or_path", f"{family.facts.title} {reason}"))
        return None
    problems += validate_prompts(prompts, detected)
    objective = validate_objective_for_model(config.noise, config.loss, family.facts.title, detected.prediction_type)
    problems += (each for each in objective if each.option in SCHEDULER_OPTIONS)
    reader = MergeableFileReader(family, detected)
    for file in (file for run in runs for file in run.files):
        problems += reader.read(file.path)[1]
    try:
        adapter = replace(
            RunConfig().adapter,
            base_weights=config.adapter.base_weights,
            base_weights_multiplier=config.adapter.base_weights_multiplier,
        )
        return family, detected, read_initial_weights(adapter, family, detected), reader
    except UserError as error:
        problems += error.problems
        return None


def _build_sets(
    prepared: PreparedData,
    prompts: Mapping[str, tuple[Prompt, ...]],
    options: "EvaluateOptions",
    detected: DetectedModel,
) -> Iterator[CaptionSet]:
    subject = options.subject or find_subject(list_training_captions(prepared))
    named = [prompt.text for prompt in prompts[UNRELATED] if contains_subject(prompt.text, subject)]
    if named:
        fix = "drift is measured without it"
        raise ConfigError(
            Problem("unrelated_prompts", f"{text!r} names the subject {subject!r}", fix) for text in named
        )
    choice = CaptionChoice(
        options.num_captions, subject, prompts[COMPOSING], prompts[UNRELATED], is_demo=detected.is_built_in
    )
    sets = build_caption_sets(prepared, choice, detected.size_multiple)
    logger.info("the subject in captions: %s", subject or "none; give --subject, or --composing_prompts")
    if prepared.validation is None:
        logger.info("no validation pictures (validation_split): likeness is measured on what was trained")
    for found in sets:
        if found.group == VALIDATION and prepared.validation is not None:
            logger.info("%d validation pictures", len(prepared.validation.manifest.samples))
        yield set_sampling(found, options.inference_steps, options.inference_scale, is_demo=detected.is_built_in)


def _choose_dtype(config: RunConfig, runs: Sequence[EvaluatedRun], training: ParsedConfig) -> torch.dtype:
    """Take the precision of the command line, or that of the first run."""
    if "mixed_precision" not in training.explicit:
        for run in runs:
            if run.summary is not None and run.summary.mixed_precision in MIXED_PRECISION_DTYPES:
                return MIXED_PRECISION_DTYPES[run.summary.mixed_precision]
    return MIXED_PRECISION_DTYPES.get(config.distributed.mixed_precision or "no", torch.float32)
