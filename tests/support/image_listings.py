"""Small images, and the listings of a dataset file that points to them."""

import io
from pathlib import Path

import numpy as np
from PIL import Image
from problem_lines import format_lines

from library.config.schema_data import DataConfig
from library.dataloader.prepare import PreparedData, prepare_data
from library.dataset.dataset_config import parse_dataset_config
from library.dataset.listing import SubsetListing
from library.dataset.schema import collect_flag_defaults
from library.dataset.sources import list_all_images
from library.dataset.validate import validate_paths

HEAD = "[[datasets]]\nresolution = 64\n"


def encode_image(number: int = 0, kind: str = "PNG") -> bytes:
    """Encode a different image for each number."""
    file = io.BytesIO()
    pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).resize((64, 64)).save(file, kind)
    return file.getvalue()


def write_files(folder: Path, files: dict[str, str | bytes] | list[str]) -> None:
    """Write files by name; of a list of names, images."""
    named = files if isinstance(files, dict) else {name: encode_image(number) for number, name in enumerate(files)}
    for name, content in named.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def make_config(folder: Path, *subsets: str, head: str = HEAD, **options) -> DataConfig:
    text = head + "".join(f"[[datasets.subsets]]\n{subset}\n" for subset in subsets)
    (folder / "set.toml").write_text(text, encoding="utf-8")
    return DataConfig(dataset_config=str(folder / "set.toml"), **options)


def list_subsets(folder: Path, *subsets: str, head: str = HEAD) -> list[SubsetListing]:
    path = Path(str(make_config(folder, *subsets, head=head).dataset_config))
    return list_all_images(parse_dataset_config(path, collect_flag_defaults(DataConfig())).require_valid())


def list_subset(folder: Path, subset: str) -> SubsetListing:
    (listing,) = list_subsets(folder, subset)
    return listing


def find_missing(folder: Path, *subsets: str) -> list[str]:
    """Problems that are reported before any image is listed."""
    path = Path(str(make_config(folder, *subsets).dataset_config))
    return strip_folder(
        folder,
        format_lines(validate_paths(parse_dataset_config(path, collect_flag_defaults(DataConfig())).require_valid())),
    )


def prepare_subsets(folder: Path, *subsets: str, head: str = HEAD, **options) -> PreparedData:
    return prepare_data(make_config(folder, *subsets, head=head, **options), 8)


def get_captions(listing: SubsetListing) -> dict[str, str]:
    """Map the path of each image, or its name in a larger file, to its caption."""
    return {
        item.image.file if item.image.part is None else item.image.part.name: item.caption for item in listing.images
    }


def strip_folder(folder: Path, lines) -> list[str]:
    return [str(line).replace(f"{folder}/", "").replace(str(folder), ".") for line in lines]
