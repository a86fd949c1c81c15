"""Captions in JSON objects, one object for each picture, as img2dataset writes them."""

from .columns import caption_column, lines_in
from .table import parsed

ENDING = ".json"


class ColumnError(Exception):
    """Which column is the caption cannot be told: a matter of the subset, not of one picture."""


class JsonCaptions:
    """The first object decides which of its keys is the caption."""

    def __init__(self, wanted: str | None):
        self.wanted = wanted
        self.column: str | None = None

    def lines(self, text: str, place: str) -> list[str]:
        """The caption in one object; empty when there is none, ``ValueError`` when it is no text."""
        values = parsed(text, place)
        if self.column is None:
            try:
                self.column = caption_column(list(values), self.wanted)
            except ValueError as error:
                raise ColumnError(f"{place}: {error}") from None
        try:
            return lines_in(values.get(self.column))
        except ValueError as error:
            raise ValueError(f"{place}: {self.column} {error}") from None
