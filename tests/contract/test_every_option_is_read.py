"""Every accepted option is read by code that acts on it, and every option of sd-scripts is accounted for."""

import ast
import functools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from problem_lines import format_lines

from library.config import parse_config
from library.config.kohya_compat import KOHYA_OPTIONS, NoEffectOption, OptionAlias, SecretOption
from library.config.options import iter_options
from library.config.schema import RunConfig
from library.dataset.schema import DATASET_KEYS

ROOT = Path(__file__).resolve().parents[2]
KOHYA = json.loads((ROOT / "tests" / "data" / "kohya_options.json").read_text())
SCRIPTS = {
    "sdxl_train_network": "SDXL",
    "flux_train_network": "FLUX.1",
    "sd3_train_network": "SD3",
    "lumina_train_network": "Lumina",
    "hunyuan_image_train_network": "HunyuanImage",
    "anima_train_network": "Anima",
}
"""The scripts that have the options of train_network.py and more, and their models."""
PAGE = ROOT / "docs" / "sd_scripts_options.md"
GROUPS = {option.group for option in iter_options(RunConfig)}
HOLDERS = GROUPS | {f"{group}_config" for group in GROUPS} | {"config", "settings", "options", "subset", "dataset"}
"""Names of the objects that hold options: ``run.config.train.seed``, ``subset.flip_aug``."""
IN_FILES = {key.flag: name for name, key in DATASET_KEYS.items() if key.flag is not None}
"""Options that have another name in dataset files."""

RECORDED = {option.name for option in iter_options(RunConfig) if option.group == "save" and option.metadata_key}
"""Options that are for the metadata of LoRA files alone, which adapters/metadata.py reads by their ``metadata_key``."""


def sources() -> list[tuple[Path, str]]:
    return [(path.relative_to(ROOT / "library"), path.read_text("utf-8")) for path in (ROOT / "library").rglob("*.py")]


def find_reads(files: Iterable[tuple[Path, str]]) -> set[str]:
    """Names of options that are read; checking or describing them, as in ``config``, does not count."""
    return set().union(*(_read_in(path, source) for path, source in files))


@functools.cache
def _read_in(path: Path, source: str) -> frozenset[str]:
    tree = ast.parse(source)
    if path.parts[0] != "config":
        return frozenset((*_attributes(tree, HOLDERS), *_tables(tree)))
    # Reading a property of a schema counts as reading the options that it is computed from.
    return frozenset(_attributes(tree, {"self"}) if path.stem.startswith("schema") else ())


def _attributes(tree: ast.AST, holders: set[str]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _last(node.value) in holders:
            yield node.attr


def _last(node: ast.AST) -> str:
    if isinstance(node, ast.Call):
        return _last(node.func)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _tables(tree: ast.AST) -> Iterator[str]:
    """String constants of a module that reads options by name: ``getattr(loss, name)``."""
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"
    ]
    names = [call.args[1] for call in calls if _last(call.args[0]) in HOLDERS]
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    values = [value for value in constants if isinstance(value, str)]
    for name in names:
        if isinstance(name, ast.JoinedStr):  # f"metadata_{name}"
            yield from (
                f"{name.values[0].value}{value}" for value in values if isinstance(name.values[0], ast.Constant)
            )
        elif not isinstance(name, ast.Constant):
            yield from values


def find_unread(names: Iterable[str], files: Iterable[tuple[Path, str]]) -> list[str]:
    names_read = find_reads(files)
    return [name for name in names if name not in names_read and IN_FILES.get(name) not in names_read]


def test_every_option_is_read_by_code_that_acts_on_it():
    names_read = find_unread([option.name for option in iter_options(RunConfig)], sources())

    assert [name for name in names_read if not _has_one_value_only(name) and name not in RECORDED] == []


def _has_one_value_only(name: str) -> bool:
    """Whether the option has one allowed value only."""
    problems = format_lines(parse_config(["--dataset_config", str(ROOT / "pyproject.toml"), f"--no-{name}"]).problems)
    return any(problem.startswith(f"--{name}:") for problem in problems)


@pytest.mark.parametrize(
    "name",
    (
        "network_dim max_grad_norm flip_aug save_every_n_steps cache_precision train_batch_size min_snr_gamma vae seed"
    ).split(),
)
def test_an_option_that_is_never_read_is_found(name):
    other = IN_FILES.get(name, name)
    word = re.compile(rf"(?<=[.\"])({name}|{other})\b")
    modified_sources = [
        (path, text if path.parts[0] == "config" else word.sub("something_else", text)) for path, text in sources()
    ]

    assert name in find_unread([option.name for option in iter_options(RunConfig)], modified_sources)
    assert find_unread(["a_new_option_that_is_not_built"], sources()) == ["a_new_option_that_is_not_built"]


def list_scripts() -> dict[str, str]:
    """The scripts of sd-scripts that have each option."""
    scripts = dict.fromkeys(KOHYA["train_network"], "all")
    for script, model in SCRIPTS.items():
        for name in KOHYA["script_additions"][script]:
            scripts[name] = f"{scripts[name]}, {model}" if name in scripts else model
    return dict(sorted(scripts.items()))


def list_option_status() -> dict[str, tuple[str, str]]:
    """The status of each LoRA option of sd-scripts, and its note."""
    ours = {option.name: option for option in iter_options(RunConfig)}
    status = {}
    for name in list_scripts():
        if name in ours or name in ("config_file", "output_config"):
            default = ours[name].kohya_default if name in ours else ""
            status[name] = ("supported", f"default there: {default}" if default else "")
            continue
        verdict = KOHYA_OPTIONS[name]
        if isinstance(verdict, OptionAlias):
            value = "" if verdict.value in (None, True) else f" {verdict.value}"
            status[name] = ("alias", f"the same as `{verdict.option}{value}`")
        elif isinstance(verdict, SecretOption):
            status[name] = ("supported", f"sets `{verdict.variable}` of this process; stored nowhere")
        elif isinstance(verdict, NoEffectOption):
            status[name] = ("no effect", verdict.reason)
        else:
            reason = verdict.reason.removeprefix("not supported: ")
            status[name] = ("not supported", reason)
    return status


def format_page() -> str:
    """docs/sd_scripts_options.md."""
    status, scripts = list_option_status(), list_scripts()
    count = Counter(fate for fate, _ in status.values())
    refused = {name: reason for name, (fate, reason) in status.items() if fate == "not supported"}
    lines = [
        "# The options of sd-scripts",
        "",
        "Generated by `python tests/contract/test_every_option_is_read.py`; edit `library/config/kohya_compat.py`.",
        "",
        f"Of the {len(status)} options of `train_network.py`, `{'.py`, `'.join(SCRIPTS)}.py`,"
        f" {count['supported']} are supported under the same name, {count['alias']} are aliases, {count['no effect']}"
        f" have no effect on the result and are named in one notice, and {len(refused)} are not supported:",
        "",
        "| option | why not |",
        "|---|---|",
        *(f"| `{name}` | {reason} |" for name, reason in refused.items()),
        "",
        "## All options",
        "",
        "| option | scripts | status | meaning |",
        "|---|---|---|---|",
        *(f"| `{name}` | {scripts[name]} | {fate} | {what} |" for name, (fate, what) in status.items()),
        "",
    ]
    return "\n".join(lines)


def test_every_option_of_the_seven_scripts_of_sd_scripts_is_accounted_for_and_documented():
    assert len(list_option_status()) == len({*KOHYA["train_network"], *KOHYA["family_additions"]}) == 253
    assert PAGE.read_text("utf-8") == format_page(), "run: python tests/contract/test_every_option_is_read.py"


if __name__ == "__main__":
    PAGE.write_text(format_page(), "utf-8")
