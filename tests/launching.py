"""What the tests of launching share: a file of accelerate's, and the table of settings for a command."""

import shlex
from pathlib import Path

import yaml

from library.config import load_options
from library.distributed.claims import Verdict
from library.distributed.contradictions import sources_of
from library.distributed.launch_command import parse_launch
from library.distributed.verdicts import verdicts

FILE = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "num_processes": 1, "num_machines": 1,
        "machine_rank": 0, "use_cpu": False}  # fmt: skip


def file_of(folder: Path, **settings) -> Path:
    path = folder / "accelerate" / "default_config.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump({**FILE, **settings}))
    return path


def table(command: str, environment: dict[str, str], places: bool = True) -> dict[str, Verdict]:
    launch = parse_launch(shlex.split(command), environment)
    arguments = launch.arguments if launch else shlex.split(command)[2:]
    loaded = load_options(list(arguments))
    sources = sources_of(launch, environment, loaded.config, loaded.places if places else {})
    return {verdict.setting: verdict for verdict in verdicts(sources)}
