"""``python -m library models``: every model family, its size, and how it can be trained; the checks of a user's own."""

import json
import re
from collections.abc import Generator, Sequence
from typing import Any

from ..errors import UserError
from ..models.families import CONTROL_FAMILIES, FAMILY_FACTS
from ..name_suggestions import suggest_name
from ..problems import report_argument

USAGE = "usage: python -m library models [--json | --markdown | --check package.module:Class | --download ID]"
MODEL_OPTION = "--pretrained_model_name_or_path"
HELP = f"""{USAGE}

  --json      a list of objects with name, title, kind, parameters, sources, strategies,
              control_images (fewest, most), control, notes
  --markdown  the table of docs/models.md
  --check package.module:Class [{MODEL_OPTION} PATH]
              check a family of your own, or one of this program by its name, as the tests of this program do:
              a line for each check, exit code 1 if one fails. The model is the configuration "tiny" of the
              family, or a small one in a folder; see docs/adding_a_family.md
  --download ID
              download a diffusers model of the hub into its cache, as a run does when it starts; what an
              interruption leaves is gone on with. HF_ENDPOINT, HF_HOME and HF_TOKEN are those of huggingface_hub

parameters are those of the published denoiser, the largest where there are several sizes. --family NAME and
random:NAME take the name."""


def run_models(argv: Sequence[str]) -> tuple[str, int] | Generator[str, None, int]:
    """List the families as text, JSON or Markdown, or check one of the user's own."""
    forms = {"--json": format_json, "--markdown": format_markdown}
    if set(argv) & {"--help", "-h"}:
        return HELP, 0
    if any(word.partition("=")[0] == "--check" for word in argv):
        return _run_check(argv)
    if argv and argv[0].partition("=")[0] == "--download":
        return _run_download(argv)
    for word in argv:
        if word not in forms:
            raise UserError(report_argument(word, f"unknown option{suggest_name(word, forms) or f'; {USAGE}'}"))
    if len(argv) > 1:
        raise UserError(f"one of --json and --markdown; {USAGE}")
    return (forms[argv[0]] if argv else format_text)(list_models()), 0


def _run_download(argv: Sequence[str]) -> tuple[str, int]:
    """Download one model."""
    words = [part for word in argv for part in word.split("=", 1)]
    if len(words) != 2 or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", words[1]):
        raise UserError(report_argument("--download", f"expects the id of one model, such as OWNER/NAME; {USAGE}"))
    from ..models.model_download import download_model

    return f"{words[1]} is in {download_model(words[1])}", 0


def _run_check(argv: Sequence[str]) -> Generator[str, None, int]:
    """Parse the arguments of ``--check``, and check the family."""
    known, values = ("--check", MODEL_OPTION), dict[str, str]()
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for name, value in zip(words[::2], [*words[1::2], ""][: len(words[::2])], strict=True):
        if name not in known:
            raise UserError(report_argument(name, f"unknown option{suggest_name(name, known) or f'; {USAGE}'}"))
        if not value or value.startswith("--"):
            raise UserError(report_argument(name, f"no value; {USAGE}"))
        if name in values:
            raise UserError(report_argument(name, "it is given twice"))
        values[name] = value
    from .family_check.run_checks import check_family

    return check_family(values["--check"], values.get(MODEL_OPTION))


def list_models() -> list[dict[str, Any]]:
    """An object for each family, in the order of the table."""
    return [
        {
            "name": name,
            "title": facts.title,
            "kind": facts.pipeline.kind,
            "parameters": facts.pipeline.num_parameters,
            "sources": ["folder", "hub", *(("file",) if facts.detection.keys else ()), "random"],
            "strategies": list(facts.blocks.list_strategies()),
            "lora_targets": facts.lora.targets_of,
            "control_images": list(facts.control.num_images),
            "control": list(CONTROL_FAMILIES.get(name, ())),
            "notes": facts.notes,
        }
        for name, facts in FAMILY_FACTS.items()
    ]


def format_text(models: Sequence[dict[str, Any]]) -> str:
    """Format a line for each family."""
    rows = [(model["name"], model["title"], _format_count(model["parameters"]), model["kind"]) for model in models]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    notes = (f"  ({model['notes']})" if model["notes"] else "" for model in models)
    return "\n".join(line + note for line, note in zip(lines, notes, strict=True))


def format_json(models: Sequence[dict[str, Any]]) -> str:
    """Format the list as JSON."""
    return json.dumps(models, indent=1, ensure_ascii=False)


def format_markdown(models: Sequence[dict[str, Any]]) -> str:
    """Format the table of docs/models.md."""
    lines = [
        "| model | `--family` | parameters | single file | layers trained as in | besides DDP, FSDP and DeepSpeed "
        "| control images | `--control` |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in models:
        title = model["title"] + (f" ({model['notes']})" if model["notes"] else "")
        count, file = _format_count(model["parameters"]), "yes" if "file" in model["sources"] else "no"
        others = ", ".join(name for name in model["strategies"] if name not in ("ddp", "fsdp", "deepspeed"))
        layers = model["lora_targets"] or "own choice"
        images, control = _format_range(*model["control_images"]), ", ".join(model["control"])
        cells = (title, f"`{model['name']}`", count, file, layers, others, images, control)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _format_range(fewest: int, most: int) -> str:
    if not most:
        return ""
    return str(most) if fewest == most else f"{fewest or 'none'} to {most}"


def _format_count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B"
