"""Split a command line into the options of a tool and the options of training that it takes as well."""

from collections.abc import Sequence
from difflib import get_close_matches

from ..config import RunConfig
from ..config.kohya_compat import KOHYA_OPTIONS
from ..config.options import iter_options
from ..config.parser import COMMAND_OPTIONS


def split_arguments(argv: Sequence[str], arguments: type) -> tuple[list[str], list[str]]:
    """Split into the tool's arguments, the options of ``arguments``, and those of training.

    A misspelled option goes to the one that it resembles.
    """
    own = {option.name for option in iter_options(arguments)}
    training = {*(option.name for option in iter_options(RunConfig)), *KOHYA_OPTIONS, *COMMAND_OPTIONS}
    tool_argv, training_argv = list[str](), list[str]()
    target = training_argv
    for word in argv:
        if word.startswith("--"):
            name = word[2:].partition("=")[0].removeprefix("no-")
            closest = get_close_matches(name, [name] if name in training else [*own, *training], n=1, cutoff=0.7)
            target = tool_argv if closest and closest[0] in own else training_argv
        target.append(word)
    return tool_argv, training_argv
