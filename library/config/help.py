"""The options as text: ``--help``, docs/options.md, and a TOML file of a run's settings."""

import argparse
import dataclasses
import json
from typing import Any, get_type_hints

from .options import Option, flatten_config, iter_options
from .schema import RunConfig


def format_help(program: str) -> str:
    """What ``--help`` prints."""
    parser = argparse.ArgumentParser(
        prog=program,
        usage=f"{program} --dataset_config FILE [--config_file FILE] [--option value ...]",
        description="Train a LoRA. Every option can also stand in the TOML file that --config_file names; flags win.",
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=110),
    )
    parser.add_argument("--config_file", metavar="FILE", help="TOML file with any of the options below")
    parser.add_argument("--output_config", action="store_true", help="write the settings to config_file and stop")
    for name, title in _list_groups():
        section = parser.add_argument_group(f"{name}: {title}")
        for option in iter_options(RunConfig):
            if option.group == name:
                text = f"{option.help}{_format_default_suffix(option)}".replace("%", "%%")
                action: dict[str, Any] = (
                    {"action": "store_true"} if option.value_type is bool else {"metavar": _format_syntax(option)}
                )
                section.add_argument(f"--{option.name}", help=text, **action)
    return parser.format_help().rstrip()


def format_options_page() -> str:
    """docs/options.md."""
    lines = [
        "# Options",
        "",
        "Written by `python -m library options`; edit `library/config/schema.py` instead.",
        "Each option is a flag (`--network_dim 8`) and a key of the file behind `--config_file` (`network_dim = 8`).",
        "A switch is turned on by `--name` and off by `--no-name`.",
        "Defaults < file < flags. Section names in the file are for the reader only.",
        "",
    ]
    for name, title in _list_groups():
        lines += [f"## {name}", "", title, "", "| option | value | default | meaning |", "|---|---|---|---|"]
        for option in iter_options(RunConfig):
            if option.group == name:
                value, default = _format_syntax(option).replace("|", r"\|"), _format_default(option.default)
                lines.append(
                    f"| `{option.name}` | {value} | {f'`{default}`' if default else ''} | "
                    f"{option.help.replace('|', chr(92) + '|')} |"
                )
        lines.append("")
    return "\n".join(lines)


def format_config_as_toml(config: RunConfig) -> str:
    """Write the settings that differ from the defaults, by group, as a file for ``--config_file``.

    ``toml`` is a dependency of sd-scripts, too, so users have it. Its encoder of strings is replaced: toml 0.10.2, the
    last release, corrupts control characters and a backslash before an x, as in a Windows path.
    """
    import toml

    values = flatten_config(config)
    tables: dict[str, dict[str, Any]] = {}
    for option in iter_options(RunConfig):
        value = values[option.name]
        if value != option.default:
            plain = list(value) if isinstance(value, tuple) else value
            is_plain = isinstance(plain, (bool, int, float, str, list))
            tables.setdefault(option.group, {})[option.name] = plain if is_plain else str(plain)
    encoder = toml.TomlEncoder()
    encoder.dump_funcs[str] = _quote_string
    return str(toml.dumps(tables, encoder))


def _quote_string(text: str) -> str:
    """Write a string as JSON does, which is a TOML basic string but for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _list_groups() -> list[tuple[str, str]]:
    hints = get_type_hints(RunConfig)
    return [(group.name, (hints[group.name].__doc__ or "").strip()) for group in dataclasses.fields(RunConfig)]


def _format_syntax(option: Option) -> str:
    return f"{option.syntax} ..." if option.is_list else option.syntax


def _format_default_suffix(option: Option) -> str:
    default = _format_default(option.default)
    return f" (default: {default})" if default and option.value_type is not bool else ""


def _format_default(value: Any) -> str:
    """Empty for what has no default."""
    if value is None or value == () or value == "":
        return ""
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
