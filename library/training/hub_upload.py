"""Upload LoRA files and checkpoints to the Hugging Face hub as they are saved; a failed upload is a warning."""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.utils.tqdm import disable_progress_bars

from ..config.schema_output import SaveConfig
from ..problems import Problem

logger = logging.getLogger(__name__)


def validate_hub_token() -> Iterator[Problem]:
    """An upload needs a token; without one, it would fail after training."""
    if get_token() is None:
        yield Problem("huggingface_repo_id", "no token for the hub", "run `hf auth login` or set HF_TOKEN")


class HubUploader:
    """Upload files to one repository, one at a time; the token is ``HF_TOKEN`` or that of ``hf auth login``."""

    def __init__(self, config: SaveConfig, repo_id: str):
        self.config, self.repo_id = config, repo_id
        self.api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        self.executor = ThreadPoolExecutor(1, "upload") if config.async_upload else None
        self.pending: list[Future[None]] = []
        self.is_repo_ready = False
        self.lock = Lock()  # checkpoints are uploaded by the thread that writes them, and commits must not overlap

    def create_repo(self) -> None:
        """Create the repository if it does not exist; private unless ``huggingface_repo_visibility`` is public."""
        disable_progress_bars()
        is_private = self.config.huggingface_repo_visibility != "public"
        self.is_repo_ready = self._try_or_warn(
            "cannot be created",
            lambda: self.api.create_repo(
                self.repo_id, repo_type=self.config.huggingface_repo_type, private=is_private, exist_ok=True
            ),
        )

    def upload(self, paths: Iterable[Path]) -> None:
        """Upload files, in the background with ``async_upload``."""
        for path in paths:
            if self.executor is None:
                self._upload_path(path)
            else:
                self.pending.append(self.executor.submit(self._upload_path, path))

    def upload_checkpoint(self, path: Path) -> None:
        """Upload the folder of a checkpoint."""
        self._upload_path(path)

    def wait(self) -> None:
        """Wait for uploads in progress."""
        for future in self.pending:
            future.result()
        self.pending.clear()

    def _upload_path(self, path: Path) -> None:
        """Upload a file or a folder."""
        name = "/".join([*(self.config.huggingface_path_in_repo or "").strip("/").split("/"), path.name]).lstrip("/")
        upload: Callable[..., object] = self.api.upload_folder if path.is_dir() else self.api.upload_file
        source = "folder_path" if path.is_dir() else "path_or_fileobj"
        options: dict[str, Any] = {source: path, "path_in_repo": name, "repo_id": self.repo_id}
        options |= {"repo_type": self.config.huggingface_repo_type, "commit_message": f"Upload {path.name}"}
        with self.lock:
            if not self.is_repo_ready:
                self.create_repo()
            done = self.is_repo_ready and self._try_or_warn(
                f"cannot receive {path.name}",
                lambda: upload(**options),
            )
        if done:
            logger.info("uploaded %s to %s", path.name, self.repo_id)

    def _try_or_warn(self, failure: str, action: Callable[[], object]) -> bool:
        try:
            action()
        except Exception as error:  # hub, network and library raise errors of many types
            first = next(iter(str(error).strip().splitlines()), "")
            logger.warning(
                "huggingface_repo_id: %s %s: %s: %s; the file stays on disk, and training continues",
                self.repo_id,
                failure,
                type(error).__name__,
                first,
            )
            return False
        return True
