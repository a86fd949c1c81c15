"""Small pictures, and what a dataset file finds of them."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from library.config.schema import DataConfig
from library.data.dataset_config import read_datasets
from library.data.dataset_rules import missing_folders
from library.data.files import Listing, find_all
from library.data.prepare import Prepared, prepare
from library.dataset.schema import flags_of

HEAD = "[[datasets]]\nresolution = 64\n"


def picture(number: int = 0, kind: str = "PNG") -> bytes:
    """Another one for each number."""
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).resize((64, 64)).save(file, kind)
    return file.getvalue()


def write(folder: Path, files: dict[str, str | bytes] | list[str]) -> None:
    """Files by name; of a list, pictures."""
    named = files if isinstance(files, dict) else {name: picture(number) for number, name in enumerate(files)}
    for name, content in named.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def settings(folder: Path, *subsets: str, head: str = HEAD, **options) -> DataConfig:
    text = head + "".join(f"[[datasets.subsets]]\n{subset}\n" for subset in subsets)
    (folder / "set.toml").write_text(text, encoding="utf-8")
    return DataConfig(dataset_config=str(folder / "set.toml"), **options)


def listings(folder: Path, *subsets: str, head: str = HEAD) -> list[Listing]:
    path = Path(str(settings(folder, *subsets, head=head).dataset_config))
    return [listing for _, _, listing in find_all(read_datasets(path, flags_of(DataConfig())).require())]


def listed(folder: Path, subset: str) -> Listing:
    (listing,) = listings(folder, subset)
    return listing


def missing(folder: Path, *subsets: str) -> list[str]:
    """What is told before any picture is looked for."""
    path = Path(str(settings(folder, *subsets).dataset_config))
    return shortened(folder, missing_folders(read_datasets(path, flags_of(DataConfig())).require()))


def prepared(folder: Path, *subsets: str, head: str = HEAD, **options) -> Prepared:
    return prepare(settings(folder, *subsets, head=head, **options), 8)


def captions(listing: Listing) -> dict[str, str]:
    """Caption of each picture by its path or its place in a larger file."""
    return {item.image.file if item.image.part is None else item.image.part.name: item.caption
            for item in listing.found}  # fmt: skip


def shortened(folder: Path, lines) -> list[str]:
    return [line.replace(f"{folder}/", "").replace(str(folder), ".") for line in lines]
