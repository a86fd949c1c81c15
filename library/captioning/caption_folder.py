"""Images of a folder with the caption files beside them, which are replaced atomically."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..atomic_files import write_atomic
from ..dataset.caption_files import CaptionFiles, decode_utf8
from ..dataset.file_discovery import walk_directory
from ..dataset.listing import IMAGE_EXTENSIONS, is_image_file
from ..errors import FileError
from ..name_suggestions import suggest_name
from ..problems import Place, Problem, report_file


@dataclass(frozen=True)
class CaptionedImage:
    """An image, and its caption file, which may not exist yet."""

    image: Path
    caption_file: Path
    text: str | None
    """Content of the file; ``None`` if there is none."""

    @property
    def has_caption(self) -> bool:
        return bool(self.text and self.text.strip())


def list_captioned_images(folders: Sequence[Path], extension: str, *, recursive: bool) -> list[CaptionedImage]:
    """List the images of the folders; raise with all problems."""
    found, problems = list[CaptionedImage](), list[Problem]()
    for folder in folders:
        if not folder.is_dir():
            problems.append(_report_missing_folder(folder))
            continue
        tree = walk_directory(folder, recursive=recursive)
        names = list(filter(is_image_file, tree.files))
        problems += tree.problems
        if not names and not tree.problems:
            hint = "; add --recursive to search its folders" if tree.folders and not recursive else ""
            problems.append(report_file(folder, f"no images ({' '.join(IMAGE_EXTENSIONS)}){hint}"))
        found += _read_captions(folder, names, CaptionFiles(tree.files, (extension,)), extension, problems)
    problems += _find_shared_files(found)
    if problems:
        raise FileError(problems)
    return found


def _report_missing_folder(folder: Path) -> Problem:
    place = Place(str(folder))
    if folder.exists():
        return Problem("", "is a file", "give the folder of the images", place)
    siblings = [path.name for path in folder.parent.iterdir()] if folder.parent.is_dir() else []
    return Problem("", f"no such folder{suggest_name(folder.name, siblings)}", place=place)


def _read_captions(
    folder: Path, names: Sequence[str], files: CaptionFiles, extension: str, problems: list[Problem]
) -> Iterator[CaptionedImage]:
    for name in names:
        image = folder / name
        match = files.find(name)
        if match is None:
            yield CaptionedImage(image, image.with_suffix(extension), None)
            continue
        path = folder / match[0]
        try:
            yield CaptionedImage(image, path, decode_utf8(path.read_bytes()))
        except OSError as error:
            problems.append(report_file(path, f"cannot be read: {error.strerror}"))
        except ValueError as error:
            problems.append(report_file(path, str(error)))


def _find_shared_files(images: Sequence[CaptionedImage]) -> Iterator[Problem]:
    first: dict[Path, Path] = {}
    for each in images:
        other = first.setdefault(each.caption_file, each.image)
        if other != each.image:
            text, place = f"is the caption file of {other.name} and {each.image.name}", Place(str(each.caption_file))
            yield Problem("", text, "rename one of them", place)


def write_caption(path: Path, text: str) -> None:
    """Replace a caption file; readers see the old text or the new one."""
    try:
        write_atomic(path, f"{text}\n".encode())
    except OSError as error:
        raise FileError([report_file(path, f"cannot be written: {error.strerror or error}")]) from None
