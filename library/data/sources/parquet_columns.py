"""Which columns of a parquet file hold pictures and captions, told by their names and types."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...dataset.schema import SubsetConfig
from .columns import caption_column, known

IMAGE_COLUMN = "image"


@dataclass(frozen=True)
class Columns:
    """Which columns of one file are used."""

    image: str
    caption: str
    has_paths: bool  # the pictures are files, of which the column has the paths


def columns_of(schema: Any, subset: SubsetConfig) -> Columns:
    """Of a file with this Arrow schema; ``ValueError`` names the columns when it is not to be told."""
    kinds = {item.name: str(item.type) for item in schema}
    image = _image_column(kinds, subset.image_column)
    caption = caption_column([name for name in kinds if name != image], subset.caption_column)
    if not _may_be_pictures(kinds[image]):
        raise ValueError(f"column {image!r} holds {kinds[image]}, no pictures; name another one with image_column")
    if not _may_be_text(kinds[caption]):
        raise ValueError(f"column {caption!r} holds {kinds[caption]}, no text; name another one with caption_column")
    return Columns(image, caption, "binary" not in kinds[image] and not kinds[image].startswith("struct<"))


def _image_column(kinds: Mapping[str, str], wanted: str | None) -> str:
    """The named one, or ``image``, or the only one that holds bytes."""
    if wanted is not None:
        return known(list(kinds), wanted, "image_column")
    if IMAGE_COLUMN in kinds:
        return IMAGE_COLUMN
    found = [name for name, kind in kinds.items() if "binary" in kind and _may_be_pictures(kind)]
    if len(found) == 1:
        return found[0]
    described = ", ".join(f"{name} ({kind})" for name, kind in kinds.items()) or "none"
    raise ValueError(f"no column is called {IMAGE_COLUMN}; there are {described}; say which holds pictures:"
                     " image_column = 'NAME'")  # fmt: skip


def _may_be_pictures(kind: str) -> bool:
    """Bytes, paths, or a pair of these."""
    if kind.startswith("struct<"):
        return "bytes: " in kind or "path: " in kind
    return "list<" not in kind and ("binary" in kind or "string" in kind)


def _may_be_text(kind: str) -> bool:
    return kind == "null" or ("string" in kind and not kind.startswith("struct<"))
