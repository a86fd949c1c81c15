"""The family of docs/adding_a_family.md: its files as the page has them, written to a folder outside of the program."""

import re
import sys
from contextlib import contextmanager
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "adding_a_family.md"
MODULE, FAMILY = "pixart_alpha", "pixart_alpha:PixArtAlpha"
SOURCE = f"random:{FAMILY}:tiny"


def read_example_files():
    """The files of the page by name: blocks of code after a line with nothing but a name."""
    blocks = re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return dict(blocks)


def write_example(folder):
    """Write the files of the page."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in read_example_files().items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@contextmanager
def forget_modules(*names):
    """Forget modules of a user and the folders that they were found in, before and after."""
    path = list(sys.path)
    for name in names:
        sys.modules.pop(name, None)
    try:
        yield
    finally:
        sys.path[:] = path
        for name in names:
            sys.modules.pop(name, None)
