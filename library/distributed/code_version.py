"""Which code runs here: this package by its sources, others by their versions."""

import hashlib
from importlib import metadata
from pathlib import Path

from .. import __version__

COMPARED_PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate")
PACKAGE_DIR = Path(__file__).resolve().parents[1]


def compute_code_version() -> str:
    """The version, and a hash of every source file, because a clone may be of any day."""
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(PACKAGE_DIR.rglob("*.py"), key=lambda path: path.relative_to(PACKAGE_DIR).as_posix()):
        text = path.read_bytes().replace(b"\r\n", b"\n")  # as git writes them on another system
        digest.update(f"{path.relative_to(PACKAGE_DIR).as_posix()} {len(text)}\n".encode())
        digest.update(text)
    return f"{__version__} {digest.hexdigest()}"


def get_package_versions() -> dict[str, str]:
    """Those that change what is computed, without what they were built for: machines may have other devices."""
    return {name: metadata.version(name).partition("+")[0] for name in COMPARED_PACKAGES}
