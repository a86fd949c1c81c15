"""The files that a user's family is made from: its modules, the modules beside them that these import, its configs.

Imports are read from the source, not from the modules that are loaded: methods import what needs torch when they run,
and which other modules are loaded depends on the program that runs.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .base import Family

PROGRAM = __name__.partition(".")[0]
INSTALLED = {"site-packages", "dist-packages"}


def resolve_config_paths(family: type[Family]) -> dict[str, Any]:
    """The absolute paths of a family's configs by variant; a relative one begins at the module that has the facts.

    What is no path stays as it is.
    """
    owner = next((each for each in family.__mro__ if "facts" in vars(each)), family)
    file = getattr(sys.modules.get(owner.__module__), "__file__", None)
    folder = Path(file).absolute().parent if file is not None else Path.cwd()
    configs = family.facts.pipeline.configs
    return {variant: folder / path if isinstance(path, Path) else path for variant, path in configs.items()}


def find_source_files(family: type[Family]) -> set[Path]:
    """Find the files outside of this program that have the code of a family.

    They are those of its class and its base classes, of all modules of their packages, and of the modules in the same
    folder that these import.  Of installed packages other than its own, they are those beside the base class.
    """
    files = set[Path]()
    own = family.__module__.partition(".")[0]
    for name in {each.__module__ for each in family.__mro__}:
        head = name.partition(".")[0]
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None or head == PROGRAM or head in sys.stdlib_module_names:
            continue
        path = Path(file).absolute()
        folder = path.parents[name.count(".") + (path.name == "__init__.py")]
        near = {path, *(path.parent.glob("*.py") if "." in name else ())}
        if not _is_installed(path):
            files |= _add_imported_files(folder, {*near, *_list_module_files(folder, head)})
        else:
            files |= {*near, *(_list_module_files(folder, head) if head == own else ())}
    return {each for each in files if each.is_file()}  # editors lock files with links to nowhere


def _is_installed(path: Path) -> bool:
    return not INSTALLED.isdisjoint(path.parts)


def _add_imported_files(folder: Path, files: set[Path]) -> set[Path]:
    """Add to files of a folder all that they import from there, directly or not."""
    found, waiting = set(files), list(files)
    while waiting:
        for name in {*_read_imports(waiting.pop())}:
            imported = {*_list_module_files(folder, name)} - found
            found |= imported
            waiting += imported
    return found


def _list_module_files(folder: Path, name: str) -> Iterator[Path]:
    """List the file of a module, or all files of a package and the packages in it."""
    path = folder.joinpath(*name.split("."))
    if (file := path.with_name(f"{path.name}.py")).is_file():
        yield file
    if (path / "__init__.py").is_file():
        yield from (each for each in path.rglob("*.py") if not _is_installed(each.relative_to(folder)))


def _read_imports(path: Path) -> Iterator[str]:
    """Read the absolute names of what a file imports, also in its functions, with the packages that they are in."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # no source, or a module that cannot be imported
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{each.name}" for each in node.names]
        else:
            continue
        for parts in (name.split(".") for name in names):
            if parts[0] != PROGRAM:
                yield from (".".join(parts[:count]) for count in range(1, len(parts) + 1))
