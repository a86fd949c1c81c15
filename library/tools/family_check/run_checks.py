"""``python -m library models --check package.module:Class``: run all checks of a family, a line for each."""

import copy
import logging
import tempfile
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from ...errors import UserError
from ...models.base import Family
from ...models.detect import DetectedModel
from ...models.own_families import load_own_family
from ...problems import Problem
from ...registry import describe_exception
from .adapter_checks import ADAPTER_CHECKS
from .cases import CheckFailedError, CheckSkippedError, TinyCase
from .checks import CHECKS
from .own_case import build_own_case, detect_check_model
from .preview_checks import PREVIEW_CHECKS
from .training_checks import TRAINING_CHECKS

logger = logging.getLogger(__name__)
EXIT_FAILED = 1


def check_family(name: str, path_or_id: str | None) -> Generator[str, None, int]:
    """Run every check on a copy of the family's small model; the exit code is 1 where one fails."""
    with _silence_libraries():
        model = _detect_model(name, path_or_id)
        family = load_own_family(name)()
        yield f"{family.facts.title} ({name}) with {model.path_or_id}: {model.reason}"
        case = _build_case(family, model)
        failed = skipped = 0
        with tempfile.TemporaryDirectory() as folder:
            for title, check in _list_checks(family, case, Path(folder)):
                word, reason = _run_check(check)
                failed += word == "fail"
                skipped += word == "skip"
                yield f"{word}  {title}" + (f": {reason}" if reason else "")
        count = len(CHECKS) + len(PREVIEW_CHECKS) + len(ADAPTER_CHECKS) + len(TRAINING_CHECKS)
        yield f"{count - failed - skipped} of {count} checks passed, {failed} failed, {skipped} could not be made"
        return EXIT_FAILED if failed else 0


def _detect_model(name: str, path_or_id: str | None) -> DetectedModel:
    """Detect the model; problems of the family are those of the argument that names it."""
    try:
        return detect_check_model(name, path_or_id)
    except UserError as error:
        problems = (replace(each, option="check") if each.option == "family" else each for each in error.problems)
        raise UserError(*problems) from None


def _build_case(family: Family, model: DetectedModel) -> TinyCase:
    try:
        return build_own_case(family, model)
    except UserError:
        raise
    except Exception as error:  # whatever the user's code raises
        text = f"{model.family}: its model cannot be prepared for the checks: {describe_exception(error)}"
        raise UserError(Problem("family", text, "see docs/adding_a_family.md")) from error


def _list_checks(family: Family, case: TinyCase, folder: Path) -> Iterator[tuple[str, Callable[[], None]]]:
    """List all checks; each gets a pipeline of its own."""
    for title, check in {**CHECKS, **PREVIEW_CHECKS, **ADAPTER_CHECKS}.items():
        yield title, partial(_check_copy, check, family, case)
    for title, run in TRAINING_CHECKS.items():
        yield title, partial(run, family, case, folder)


def _check_copy(check: Callable[[Family, TinyCase], None], family: Family, case: TinyCase) -> None:
    check(family, copy.deepcopy(case))


def _run_check(check: Callable[[], None]) -> tuple[str, str]:
    """Run a check; return ``pass``, ``fail`` or ``skip``, and the reason."""
    try:
        check()
    except CheckSkippedError as error:
        return "skip", str(error)
    except (CheckFailedError, UserError) as error:
        return "fail", str(error).replace("\n", "; ")
    except Exception as error:  # whatever the user's code raises
        logger.debug("%s", traceback.format_exc())
        return "fail", describe_exception(error)
    return "pass", ""


@contextmanager
def _silence_libraries() -> Iterator[None]:
    """Keep the notices of training and of libraries out of the list of checks."""
    previous = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            logging.disable(previous)
