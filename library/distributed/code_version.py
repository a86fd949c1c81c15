"""Which code runs here: this package by its sources, others by their versions."""

import hashlib
from importlib import metadata
from pathlib import Path

from .. import __version__

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate")
FOLDER = Path(__file__).resolve().parents[1]


def code_version() -> str:
    """The version, and a hash of every source file, because a clone may be of any day."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(FOLDER.rglob("*.py"), key=lambda path: path.relative_to(FOLDER).as_posix()):
        text = path.read_bytes().replace(b"\r\n", b"\n")  # as git writes them on another system
        digest.update(f"{path.relative_to(FOLDER).as_posix()} {len(text)}\n".encode())
        digest.update(text)
    return f"{__version__} {digest.hexdigest()}"


def package_versions() -> dict[str, str]:
    """Those that change what is computed, without what they were built for: machines may have other devices."""
    return {name: metadata.version(name).partition("+")[0] for name in PACKAGES}
