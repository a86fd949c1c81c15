"""Download a checkpoint from the Hugging Face hub (``--resume_from_huggingface``)."""

import logging
import os
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.utils.tqdm import disable_progress_bars

from ..config.validate import HUB_CHECKPOINT_PATTERN
from ..errors import UserError
from ..problems import Problem

logger = logging.getLogger(__name__)


def download_checkpoint(name: str) -> Path:
    """Download the folder that ``OWNER/NAME/FOLDER:REVISION:TYPE`` names, and return where it is on this machine."""
    match = HUB_CHECKPOINT_PATTERN.fullmatch(name)
    if match is None:
        raise UserError(Problem("resume", f"{name!r} is no checkpoint on the hub", "expected OWNER/NAME/FOLDER"))
    disable_progress_bars()
    logger.info("downloading the checkpoint %s of %s", match["folder"], match["repo"])
    try:
        root = snapshot_download(
            match["repo"],
            repo_type=match["type"] or "model",
            revision=match["revision"],
            allow_patterns=[f"{match['folder']}/*"],
            endpoint=os.environ.get("HF_ENDPOINT"),
        )
    except Exception as error:  # hub, network and library raise errors of many types
        first = next(iter(str(error).strip().splitlines()), "")
        cause = f"{type(error).__name__}: {first}"
        fix = "check the name, the network, and HF_TOKEN for a private repository"
        raise UserError(Problem("resume", f"{name}: cannot be downloaded: {cause}", fix)) from error
    path = Path(root) / match["folder"]
    if not path.is_dir():
        raise UserError(
            Problem("resume", f"{match['repo']} has no folder {match['folder']}", "name that of a checkpoint")
        )
    return path
