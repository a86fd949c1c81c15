"""Which experiment tracker is used, and whether it can be."""

import os
from collections.abc import Iterator
from pathlib import Path

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

from ..config.schema import LogConfig
from ..errors import ConfigError, UserError

PACKAGES = {"comet_ml": "comet_ml", "mlflow": "mlflow", "aim": "aim", "clearml": "clearml", "dvclive": "dvclive",
            "swanlab": "swanlab", "trackio": "trackio", "wandb": "wandb", "tensorboard": "tensorboard"}  # fmt: skip
"""What to install for each."""


def wanted(log: LogConfig) -> str | None:
    """The tracker's name for accelerate; a folder without a tracker means tensorboard."""
    if log.log_with == "none" or (log.log_with is None and log.logging_dir is None):
        return None
    return log.log_with or "tensorboard"


def problems(log: LogConfig) -> Iterator[str]:
    """Why the tracker cannot work on this machine."""
    name = wanted(log)
    if name is None or name == "all":
        return
    if name not in {str(known) for known in LOGGER_TYPE_TO_CLASS}:
        yield f"--log_with: this version of accelerate does not know {name}"
    elif name not in {str(known) for known in get_available_trackers()}:
        yield f"--log_with: {name} is not installed; pip install {PACKAGES[name]}"
    elif LOGGER_TYPE_TO_CLASS[name].requires_logging_directory and log.logging_dir is None:
        yield f"--log_with: {name} needs a --logging_dir to write to"


def open_folder(log: LogConfig, directory: Path | None) -> None:
    """Make the run's folder, and see that wandb will let us in; on the one process that talks to trackers."""
    if directory is not None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--logging_dir: {directory} cannot be made: {error.strerror}") from None
        os.environ["WANDB_DIR"] = str(directory)  # wandb reads it when its run starts
    if wanted(log) in ("wandb", "all"):
        _check_wandb()


def _check_wandb() -> None:
    """A run that would stop and ask for a key must say so at once; offline runs need none."""
    if os.environ.get("WANDB_MODE", "").lower() in ("offline", "disabled", "dryrun"):
        return
    import wandb

    if not wandb.login(prompt=False, verify=False):
        raise ConfigError(["--log_with: wandb is not logged in; run `wandb login`, set WANDB_API_KEY, or set "
                           "WANDB_MODE=offline"])  # fmt: skip
