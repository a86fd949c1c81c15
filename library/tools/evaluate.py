"""``python -m library evaluate RUN_OR_FILE ...``: which step of a run is the best, and which of several runs."""

import json
import logging
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..config import parse_config
from ..config.options import define_option, iter_options
from ..log import configure_logging, format_duration
from ..training.preflight import load_settings
from .argument_split import split_arguments

if TYPE_CHECKING:
    from ..config.parser import ParsedConfig
    from .evaluation_plan import EvaluationPlan

logger = logging.getLogger(__name__)
USAGE = "usage: python -m library evaluate RUN_OR_FILE ... [--option value ...]"
HELP = f"""{USAGE}

Generate pictures with each saved step of one or several runs, and measure likeness, copying of single training
pictures and drift of other captions, with confidence intervals. RUN is OUTPUT_DIR/OUTPUT_NAME or an OUTPUT_DIR, FILE a
LoRA file. Model and pictures are those of the run; options of training such as --dataset_config and
--pretrained_model_name_or_path replace them, and are needed for files without a run.

"""


@dataclass(frozen=True)
class EvaluateOptions:
    """The options of this tool."""

    image_model: str | None = define_option(
        None,
        "folder or hub id of a model that embeds pictures (facebook/dinov2-base, openai/clip-vit-large-patch14);"
        " default: colors and edges, for drawings such as those of the demo model only",
    )
    text_model: str | None = define_option(
        None,
        "folder or hub id of a CLIP or SigLIP model for prompt following; default: image_model, if it reads texts",
    )
    num_captions: int = define_option(4, "captions of each kind", minimum=2)
    num_seeds: int = define_option(4, "pictures of each caption; one gives no confidence intervals", minimum=1)
    evaluation_seed: int = define_option(0, "seed of the noise of all pictures", minimum=0)
    subject: str | None = define_option(
        None, "how captions name the subject; default: the words that all training captions have"
    )
    composing_prompts: str | None = define_option(
        None, "prompt file (.txt, .toml, .json): the subject with new things; default: made of the subject"
    )
    unrelated_prompts: str | None = define_option(
        None, "prompt file: captions without the subject, which should not change; default: general ones"
    )
    inference_steps: int | None = define_option(
        None, "sampling steps of each picture; default: that of the model family", minimum=1, maximum=1000
    )
    inference_scale: float | None = define_option(
        None, "scale of classifier-free guidance; default: that of the model family", minimum=0.0
    )
    lora_strength: float = define_option(1.0, "strength of the LoRA, as in other programs")
    evaluation_dir: str | None = define_option(
        None, "folder of the result; default: NAME.evaluation beside the first run"
    )
    recorded: bool = define_option(
        False, "judge what the runs have measured themselves (--evaluate_every_n_steps), without new pictures"
    )
    json: bool = define_option(False, "print JSON instead of the table")


@dataclass(frozen=True)
class _Arguments:
    evaluate: EvaluateOptions = field(default_factory=EvaluateOptions)


def run_evaluate(argv: Sequence[str]) -> tuple[str, int] | Generator[str, None, int]:
    """Evaluate runs or files."""
    if not argv or set(argv) & {"--help", "-h"}:
        return _format_help(), 0
    count = next((index for index, word in enumerate(argv) if word.startswith("--")), len(argv))
    tool_argv, training_argv = split_arguments(argv[count:], _Arguments)
    own, training = parse_config(tool_argv, _Arguments), load_settings(training_argv)
    options: EvaluateOptions = cast(Any, own.config).evaluate
    configure_logging(simple=True)
    if options.recorded:
        return _judge_recorded(argv[:count], options, own, training)
    from .evaluation_plan import plan_evaluation  # imports torch

    plan = plan_evaluation(argv[:count], options, own, training)
    own.log_notices()
    training.log_notices()
    return _run_plan(plan, options)


def _judge_recorded(
    words: Sequence[str], options: EvaluateOptions, own: "ParsedConfig", training: "ParsedConfig"
) -> Generator[str, None, int]:
    from .recorded_evaluation import compare_recorded

    result = compare_recorded(words, options.evaluation_dir, own, training)
    if options.json:
        yield result.json
        return 0
    yield result.table
    yield result.sentence
    yield f"chart: {result.chart}"
    return 0


def _run_plan(plan: "EvaluationPlan", options: EvaluateOptions) -> Generator[str, None, int]:
    from ..evaluation.result_chart import draw_result
    from ..evaluation.result_table import export_verdict, format_table, list_missing_metrics
    from .evaluation_run import evaluate_plan

    started_at = time.monotonic()
    result = evaluate_plan(plan)
    verdict, resampler = result.verdict, result.resampler
    seconds = time.monotonic() - started_at
    settings = {**plan.describe(), "seconds": round(seconds, 1)}
    exported = json.dumps(export_verdict(verdict, resampler, settings), indent=1, ensure_ascii=False)
    table = "\n".join(format_table(verdict, resampler))
    sentence = verdict.format_sentence()
    folder = plan.output_dir
    (folder / "evaluation.json").write_text(exported + "\n", encoding="utf-8")
    (folder / "evaluation.txt").write_text(f"{sentence}\n\n{table}\n", encoding="utf-8")
    draw_result(verdict, resampler, result.examples).save(folder / "evaluation.png", optimize=True)
    if options.json:
        yield exported
        return 0
    yield table
    if missing := list_missing_metrics(verdict):
        yield f"not measured: {', '.join(missing)}"
    yield sentence
    yield f"{result.num_pictures} pictures in {format_duration(seconds)}; chart: {folder / 'evaluation.png'}"
    return 0


def get_default_dir(folder: Path, name: str) -> Path:
    """Return the folder of the result of a run."""
    return folder / f"{name}.evaluation"


def _format_help() -> str:
    lines = [f"  --{option.name:<20} {option.syntax:<12} {option.help}" for option in iter_options(_Arguments)]
    return HELP + "\n".join(lines)
