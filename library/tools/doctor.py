"""``python -m library doctor [--json] [-- accelerate launch ... train_lora.py ...]``: what works here, what counts."""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..config import load_options
from ..errors import ConfigError
from .doctor_finding import Finding

if TYPE_CHECKING:
    from ..distributed.claims import Verdict

USAGE = "usage: python -m library doctor [--json] [-- accelerate launch ... train_lora.py ...]"


def run(argv: list[str]) -> tuple[str, int]:
    """The report, and 1 when something that training needs is broken."""
    own, _, command = _split(argv)
    if set(own) & {"--help", "-h"}:
        return USAGE, 0
    if unknown := [word for word in own if word != "--json"]:
        raise ConfigError([f"{unknown[0]}: unexpected; {USAGE}"])
    findings, verdicts = examine(command)
    is_broken = any(finding.is_broken for finding in findings) or any(verdict.is_error for verdict in verdicts)
    text = as_json(findings, verdicts) if "--json" in own else as_text(findings, verdicts)
    return text, int(is_broken)


def examine(command: Sequence[str]) -> tuple[list[Finding], "list[Verdict]"]:
    """Look at everything; at the packages first, because all the rest is done with them."""
    from . import doctor_packages

    packages = doctor_packages.packages()
    if any(finding.is_broken for finding in packages):
        rest = Finding("everything else", "not looked at while packages are broken", needed=False)
        return [*packages, rest], []
    from ..distributed.devices import this_machine
    from . import doctor_checks as checks

    problems, verdicts = of_command(command) if command else ([], [])
    machine = this_machine(os.environ)
    return [*problems, *packages, *checks.toolkit(machine), *checks.machine_facts(machine),
            *checks.places(checks.working_folder(), os.environ), *checks.trials(machine)], verdicts  # fmt: skip


def of_command(words: Sequence[str]) -> tuple[list[Finding], "list[Verdict]"]:
    """Which setting counts in a command as it is typed; and what is wrong with the training options in it."""
    from ..distributed.contradictions import sources_of
    from ..distributed.launch_command import parse_launch
    from ..distributed.verdicts import verdicts

    launch = parse_launch(words, os.environ)
    script = next((index for index, word in enumerate(words) if Path(word).name == "train_lora.py"), None)
    if launch is None and script is None:
        raise ConfigError([f"not a command that starts training: {' '.join(words)}; expected accelerate launch, "
                           "torchrun, or python train_lora.py"])  # fmt: skip
    arguments = list(launch.arguments) if launch is not None else list(words[(script or 0) + 1 :])
    loaded = load_options(arguments)
    sources = sources_of(launch, os.environ, loaded.config, loaded.places, is_typed=True)
    findings = [Finding("training options", problem, False, "see docs/options.md") for problem in loaded.problems]
    return findings, verdicts(sources)


def as_text(findings: Sequence[Finding], verdicts: "Sequence[Verdict]") -> str:
    """For people: the table of settings, then a line for each check, then what to do."""
    lines = [*_table(verdicts), *[_line(finding) for finding in findings]]
    broken = [finding for finding in findings if finding.is_broken]
    errors = [verdict.contradiction for verdict in verdicts if verdict.is_error]
    count = len(broken) + len(errors)
    return "\n".join([*lines, "", f"{count} broken" if count else "nothing that training needs is broken"])


def as_json(findings: Sequence[Finding], verdicts: "Sequence[Verdict]") -> str:
    """For machines."""
    is_fine = not any(finding.is_broken for finding in findings) and not any(verdict.is_error for verdict in verdicts)
    shown = [dataclasses.asdict(replace(finding, fix="" if finding.ok else finding.fix)) for finding in findings]
    settings = [dataclasses.asdict(verdict) for verdict in verdicts]
    return json.dumps({"ok": is_fine, "findings": shown, "settings": settings}, indent=2)


def _line(finding: Finding) -> str:
    mark = "ok" if finding.ok else "BROKEN" if finding.needed else "no"
    fix = f"  -> {finding.fix}" if finding.fix and not finding.ok else ""
    return f"{mark:<7} {finding.name}: {finding.value}{fix}"


def _table(verdicts: "Sequence[Verdict]") -> list[str]:
    if not verdicts:
        return []
    widths = (max(len(verdict.setting) for verdict in verdicts), max(len(verdict.value) for verdict in verdicts))
    lines = ["which setting counts:"]
    for verdict in verdicts:
        lines.append(f"  {verdict.setting:<{widths[0]}}  {verdict.value:<{widths[1]}}  {verdict.winner}")
        lines += [f"  {'':<{widths[0]}}  {'':<{widths[1]}}  lost: {claim.place} says {claim.value}"
                  for claim in verdict.losers]  # fmt: skip
        if verdict.contradiction:
            mark = "ERROR" if verdict.is_error else "discouraged"
            lines += [f"  {mark}: {verdict.contradiction}"]
    return [*lines, ""]


def _split(argv: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    words = list(argv)
    at = words.index("--") if "--" in words else len(words)
    return words[:at], at < len(words), words[at + 1 :]
