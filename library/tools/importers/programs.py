"""The programs whose files are imported: how each file is recognized, and what reads it.

Files of sd-scripts and musubi-tuner need no import: config/kohya_compat.py and config/musubi_compat.py recognize them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import UserError
from ...problems import report_file
from .ai_toolkit import import_ai_toolkit, is_ai_toolkit
from .diffusion_pipe import import_diffusion_pipe, is_diffusion_pipe, is_directory_list
from .imported import ImportedConfig
from .kohya_gui import import_kohya_gui, is_kohya_gui
from .onetrainer import import_onetrainer, is_concept_list, is_onetrainer, is_sample_list
from .simpletuner import import_simpletuner, is_lycoris_config, is_simpletuner
from .simpletuner_data import is_backend_list
from .source_file import PROGRAMS, SourceFile


def is_run_file(content: Any) -> bool:
    """Whether this has options of sd-scripts or musubi-tuner, which need no translation."""
    if not isinstance(content, dict):
        return False
    tables = (table for table in content.values() if isinstance(table, dict))
    return "network_module" in content or any("network_module" in table for table in tables)


@dataclass(frozen=True)
class Program:
    """A program whose files are read."""

    name: str
    matches: Callable[[Any], bool]
    """Tells by its content whether a file is the main file of this program."""
    import_files: Callable[[Any, Path, Sequence[SourceFile]], ImportedConfig]
    """The content of the main file, its path, and the other files that were given."""


IMPORTED_PROGRAMS = (
    Program("ai-toolkit", is_ai_toolkit, lambda content, path, others: import_ai_toolkit(content, path)),
    Program("diffusion-pipe", is_diffusion_pipe, import_diffusion_pipe),
    Program("OneTrainer", is_onetrainer, import_onetrainer),
    Program("SimpleTuner", is_simpletuner, import_simpletuner),
    Program("kohya_ss", is_kohya_gui, lambda content, path, others: import_kohya_gui(content, path)),
)

COMPANION_FILES: Sequence[tuple[Callable[[Any], bool], str]] = (
    (is_directory_list, "a dataset file of diffusion-pipe; give the training file, too"),
    (is_concept_list, "the concepts of OneTrainer; give the configuration, too"),
    (is_backend_list, "a dataloader configuration of SimpleTuner; give config.json, too"),
    (is_lycoris_config, "a LyCORIS configuration of SimpleTuner; give config.json, too"),
    (is_sample_list, "the samples of OneTrainer; give the configuration, too"),
    (is_run_file, "a run file of sd-scripts or musubi-tuner, which needs no import; give it to --config_file"),
)
"""Files that belong to a configuration, or need no import."""


def import_sources(sources: Sequence[SourceFile]) -> tuple[SourceFile, ImportedConfig]:
    """Find the main file among those given, and import it."""
    found = [
        (source, program) for source in sources for program in IMPORTED_PROGRAMS if program.matches(source.content)
    ]
    if len(found) > 1:
        raise UserError(
            *(report_file(source.path, "one configuration at a time", "give it alone") for source, _ in found[1:])
        )
    companions = {source.path: _describe_companion(source.content) for source in sources}
    if not found:
        expected = f"not a training configuration of {PROGRAMS}"
        raise UserError(*(report_file(source.path, companions[source.path] or expected) for source in sources))
    main, program = found[0]
    others = [source for source in sources if source is not main]
    if strangers := [source for source in others if not companions[source.path]]:
        raise UserError(*(report_file(each.path, f"not a dataset file of {PROGRAMS}") for each in strangers))
    try:
        return main, program.import_files(main.content, main.path, others)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(
            report_file(main.path, f"a value has another form than {program.name} writes: {error}")
        ) from error


def _describe_companion(content: Any) -> str:
    return next((title for matches, title in COMPANION_FILES if matches(content)), "")
