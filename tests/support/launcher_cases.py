"""Helpers of launcher tests: write accelerate's config file, and run the doctor's checks on a command."""

import os
import shlex
from pathlib import Path

import yaml

from library.distributed.launcher_settings import ResolvedSetting
from library.tools.doctor import check_command
from library.tools.doctor_checks import Finding

CONFIG = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "num_processes": 1,
    "num_machines": 1,
    "machine_rank": 0,
    "use_cpu": False,
}
PREFIXES = ("ACCELERATE_", "MASTER_", "OMP_", "PET_", "WORLD_SIZE", "RANK", "LOCAL_", "GROUP_")
TRAIN = "train_lora.py --dataset_config dataset_configs/demo.toml"


def write_accelerate_config(folder: Path, **settings) -> Path:
    path = folder / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**CONFIG, **settings}))
    return path


def use_environment(monkeypatch, home: Path, **variables: str) -> None:
    """Hide the user's own settings from launchers; ``home`` is where accelerate finds its config file."""
    for variable in [name for name in os.environ if name.startswith(PREFIXES)]:
        monkeypatch.delenv(variable)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    for module in ("launch", "config.config_args"):
        path = str(home / "accelerate" / "default_config.yaml")
        monkeypatch.setattr(f"accelerate.commands.{module}.default_config_file", path)


def check_launch_command(command: str) -> tuple[dict[str, ResolvedSetting], str]:
    """Return the resolved settings by name, and the findings, one line each."""
    results = [*check_command(shlex.split(command))]
    settings = {result.name: result for result in results if isinstance(result, ResolvedSetting)}
    findings = [result for result in results if isinstance(result, Finding)]
    return settings, "\n".join(f"{each.value}; {each.fix}" if each.fix else each.value for each in findings)
