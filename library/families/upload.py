"""LoRA files sent to the Hugging Face hub as they are written; what cannot be sent is told, and training goes on."""

import logging
import os
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.utils.tqdm import disable_progress_bars

from ..config.schema import SaveConfig

logger = logging.getLogger(__name__)


class Upload:
    """Sends files to one repository, one after the other; the token is HF_TOKEN's or that of ``hf auth login``."""

    def __init__(self, save: SaveConfig, repository: str):
        self.save, self.repository = save, repository
        self.api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
        self.thread = ThreadPoolExecutor(1, "upload") if save.async_upload else None
        self.under_way: list[Future[None]] = []
        self.is_open = False

    def open(self) -> None:
        """Make sure that the repository is there; it is private unless it is said to be public."""
        disable_progress_bars()
        is_private = self.save.huggingface_repo_visibility != "public"
        self.is_open = self._tried("cannot be opened", lambda: self.api.create_repo(
            self.repository, repo_type=self.save.huggingface_repo_type, private=is_private, exist_ok=True))  # fmt: skip

    def send(self, paths: Iterable[Path]) -> None:
        """Send these files, at once or in the background."""
        for path in paths:
            if self.thread is None:
                self._send(path)
            else:
                self.under_way.append(self.thread.submit(self._send, path))

    def settle(self) -> None:
        """Wait for what is still under way."""
        for each in self.under_way:
            each.result()
        self.under_way.clear()

    def _send(self, path: Path) -> None:
        if not self.is_open:
            self.open()
        name = "/".join([*(self.save.huggingface_path_in_repo or "").strip("/").split("/"), path.name]).lstrip("/")
        done = self.is_open and self._tried(f"does not get {path.name}", lambda: self.api.upload_file(
            path_or_fileobj=path, path_in_repo=name, repo_id=self.repository,
            repo_type=self.save.huggingface_repo_type, commit_message=f"Upload {path.name}"))  # fmt: skip
        if done:
            logger.info("uploaded %s to %s", path.name, self.repository)

    def _tried(self, what: str, work: Callable[[], object]) -> bool:
        try:
            work()
        except Exception as error:  # the hub, the network and the library have errors of many kinds
            first = next(iter(str(error).strip().splitlines()), "")
            logger.warning("huggingface_repo_id: %s %s: %s: %s; the file stays on this machine, and training goes on",
                           self.repository, what, type(error).__name__, first)  # fmt: skip
            return False
        return True
