"""``python -m library test [SUITE ...]``: linter, type checker and tests of a checkout, for those without make.

The Makefile calls this, so a suite is defined here and nowhere else.
"""

import os
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from ..errors import UserError
from ..name_suggestions import suggest_name

ROOT = Path(__file__).resolve().parents[2]
PLATFORMS = ("win32", "darwin")
_PYTEST = ("pytest", "-n", "2", "--dist", "worksteal")
_LINT = (("ruff", "check", "."), ("ruff", "format", "--check", "."), ("mypy",))
_QUICK = (_PYTEST,)
_SLOW = (*_PYTEST, "-m", "slow and not programs and not pairs")
_PAIRS = ("pytest", "tests/pairs", *_PYTEST[1:], "-m", "pairs")
_PLATFORMS = tuple(("mypy", "--platform", name, "--cache-dir", f".mypy_cache/{name}") for name in PLATFORMS)

SUITES: Mapping[str, tuple[str, Sequence[Sequence[Sequence[str]]]]] = {
    "default": ("lint and quick side by side, since the type checker has one thread", (_LINT, _QUICK)),
    "lint": ("linter, format and types", (_LINT,)),
    "lint-platforms": ("types of the code for Windows and macOS", (_PLATFORMS,)),
    "quick": ("the quick tests", (_QUICK,)),
    "slow": ("the other tests, beside lint-platforms", (_PLATFORMS, (_SLOW,))),
    "daily": (
        "an eighth of the slow tests and of their rows, in eight days all, and the pairs: for continuous integration",
        ((*_PLATFORMS, _PAIRS), ((*_SLOW, "--days", "8"),)),
    ),
    "pairs": (
        "today's slice of the runs in which every pair of settings is, in 48 days all",
        ((_PAIRS,),),
    ),
    "windows": (
        "the quick tests by the rules of Windows: processes are spawned, and no open file is replaced (on Linux)",
        (((*_PYTEST, "--start_method", "spawn", "--refuse_open_files"),),),
    ),
    "programs": ("the slow tests of benchmarks/", (((*_PYTEST, "-m", "programs"),),)),
}
"""The name of a suite, what it is, and its commands: sequences of modules of Python that run side by side."""
ALL = ("default", "slow", "programs")


def run_test(argv: Sequence[str]) -> Generator[str, None, int]:
    """Run suites one after the other; return 1 at the first that fails."""
    if set(argv) & {"--help", "-h"}:
        yield _format_usage()
        return 0
    names = [name for word in argv or ["default"] for name in (ALL if word == "all" else [word])]
    _check_suites(names)
    for name in names:
        failed = run_suite(SUITES[name][1])
        if failed:
            yield f"library test: failed: {', '.join(failed)}"
            return 1
    yield f"library test: {', '.join(names)}: no failures"
    return 0


def run_suite(chains: Sequence[Sequence[Sequence[str]]]) -> list[str]:
    """Run chains of commands side by side, each until its first failure; return the commands that failed."""
    with ThreadPoolExecutor(len(chains)) as pool:
        return [command for failed in pool.map(_run_chain, chains) for command in failed]


def _run_chain(commands: Sequence[Sequence[str]]) -> list[str]:
    # Some containers set it; without cached bytecode each of the many processes compiles the package again.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    for command in commands:
        if subprocess.call([sys.executable, "-m", *command], cwd=ROOT, env=environment):
            return [" ".join(command)]
    return []


def _check_suites(names: Sequence[str]) -> None:
    """Report suites that do not exist, and what is needed to run tests."""
    problems = [
        f"no suite {name!r}{suggest_name(name, SUITES)}; available: {', '.join((*SUITES, 'all'))}"
        for name in names
        if name not in SUITES
    ]
    if not (ROOT / "tests").is_dir():
        problems.append("the tests are part of a checkout of the repository, not of the installed package")
    elif missing := [name for name in ("pytest", "xdist", "ruff", "mypy") if find_spec(name) is None]:
        problems.append(f"missing packages: {', '.join(missing)}; install them with: pip install -e '.[test,web]'")
    if problems:
        raise UserError(*problems)


def _format_usage() -> str:
    lines = ["usage: python -m library test [SUITE ...]", "", "Linter, type checker and tests of a checkout.", ""]
    lines += [f"  {name:<15} {what}" for name, (what, _) in SUITES.items()]
    return "\n".join([*lines, f"  {'all':<15} {', '.join(ALL)}"])
