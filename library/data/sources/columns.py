"""Which column of a table holds captions, and what a cell of it says."""

from collections.abc import Iterable, Sequence
from typing import Any

from ...registry import did_you_mean
from ..caption_files import lines_of

CAPTION_COLUMNS = ("text", "caption", "prompt")
"""Names that mean captions by themselves."""


def caption_column(columns: Sequence[str], wanted: str | None) -> str:
    """The column of captions; ``ValueError`` names the columns when it is not to be told."""
    if wanted is not None:
        return known(columns, wanted, "caption_column")
    found = [name for name in CAPTION_COLUMNS if name in columns]
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"captions may stand in {' or '.join(found)}; say which: caption_column = {found[0]!r}")
    raise ValueError(f"no column is called {', '.join(CAPTION_COLUMNS)}; there are {', '.join(columns) or 'none'};"
                     " say which holds captions: caption_column = 'NAME'")  # fmt: skip


def known(columns: Sequence[str], wanted: str, key: str) -> str:
    """``wanted``, if it is one of the columns."""
    if wanted not in columns:
        hint = did_you_mean(wanted, columns)
        raise ValueError(f"has no column {wanted!r}, which {key} names; there are {', '.join(columns) or 'none'}{hint}")
    return wanted


def lines_in(cell: Any) -> list[str]:
    """The lines of a caption, or the several captions of a list; empty for a cell without text."""
    texts = cell if isinstance(cell, Iterable) and not isinstance(cell, (str, bytes, dict)) else [cell]
    lines: list[str] = []
    for text in texts:
        if text is not None and not isinstance(text, str):
            raise ValueError(f"is no text: {text!r:.80}")
        lines += lines_of(text or "")
    return lines
