"""Images and captions in tar shards, as webdataset and img2dataset write them; read in place, nothing is unpacked."""

import json
import re
import tarfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from ..problems import Place, Problem, report_file
from ..storage.filesystems import RemoteOutage
from ..storage.remote_path import is_remote
from .caption_files import (
    FALLBACK_EXTENSION,
    JSON_EXTENSION,
    CaptionColumnError,
    JsonCaptionReader,
    decode_utf8,
    split_lines,
)
from .controls import sort_control_members
from .file_discovery import resolve_shards
from .image_ref import ByteRange, ImageRef
from .listing import IMAGE_EXTENSIONS, ImageCaption, SubsetListing, format_count, is_image_file
from .schema import SubsetConfig

_COMPRESSIONS = {
    b"\x1f\x8b": ("gzip", "gunzip"),
    b"BZh": ("bzip2", "bunzip2"),
    b"\xfd7zXZ": ("xz", "unxz"),
    b"(\xb5/\xfd": ("zstd", "unzstd"),
}
_INDEX_NAME = "tar index 1"
_MAX_TEXT_BYTES = 2**16
_WINDOWS_DRIVE = re.compile(r"[A-Za-z]:[\\/]")


@dataclass
class TarIndex:
    """The files in a tar file, and a message for each member that cannot be used."""

    members: list[ByteRange] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    texts: dict[int, bytes] = field(default_factory=dict)  # small members of a remote file, by their offset


def load_tar_index(path: Path) -> TarIndex:
    """Read the headers of a tar file; those of a remote one, with its captions, once as long as it does not change."""
    remote = path if is_remote(path) else None
    if remote is None:
        return read_tar_index(path)
    try:
        data = remote.read_derived(_INDEX_NAME)
        if data is not None:
            return _parse_index(data)
    except RemoteOutage:
        raise
    except OSError as error:
        return TarIndex(problems=[report_file(path, f"cannot be read: {error}")])
    index = read_tar_index(path, keeps_texts=True)
    if not index.problems:
        remote.write_derived(_INDEX_NAME, _format_index(index))
    return index


def _format_index(index: TarIndex) -> bytes:
    members = [[member.name, member.offset, member.length] for member in index.members]
    texts = {offset: data.decode("latin-1") for offset, data in index.texts.items()}
    return zlib.compress(json.dumps([members, texts]).encode())


def _parse_index(data: bytes) -> TarIndex:
    members, texts = json.loads(zlib.decompress(data))
    ranges = [ByteRange(*member) for member in members]
    return TarIndex(ranges, texts={int(offset): text.encode("latin-1") for offset, text in texts.items()})


def read_tar_index(path: Path, *, keeps_texts: bool = False) -> TarIndex:
    """Read the headers of a tar file, and with ``keeps_texts`` its small members that are not images."""
    index = TarIndex()
    try:
        with path.open("rb") as file:
            start = file.read(6)
        names = next((names for magic, names in _COMPRESSIONS.items() if start.startswith(magic)), None)
        if names is not None:
            index.problems.append(
                report_file(
                    path,
                    f"is compressed ({names[0]}), but images are read in place from plain tar files:"
                    f" {names[1]} {path.name}",
                )
            )
            return index
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for info in _iterate_headers(tar, path, index):
                _add_member(info, path, index)
                is_text = info.isreg() and info.size <= _MAX_TEXT_BYTES and not is_image_file(info.name)
                if keeps_texts and is_text:
                    file.seek(info.offset_data)
                    index.texts[info.offset_data] = file.read(info.size)
    except RemoteOutage as error:  # no fault of the file, whose images are not left out
        raise RemoteOutage(f"{path}: {error}") from error
    except tarfile.ReadError as error:
        index.problems.append(
            report_file(path, f"is not a tar file: {error}") if start else report_file(path, "is empty")
        )
    except OSError as error:
        index.problems.append(report_file(path, f"cannot be read: {error.strerror}"))
    return index


def _iterate_headers(tar: tarfile.TarFile, path: Path, index: TarIndex) -> Iterator[tarfile.TarInfo]:
    """Yield each header, then check for the end mark: tarfile takes a damaged header for the end of the archive."""
    size = path.stat().st_size
    previous = "its start"
    while True:
        try:
            info = tar.next()
        except tarfile.ReadError as error:
            index.problems.append(report_file(path, f"cannot be read after {previous} ({error})", "the rest is lost"))
            return
        if info is None:
            break
        tar.members.clear()  # type: ignore[attr-defined]  # tarfile keeps all headers in memory
        previous = info.name
        missing = info.offset_data + info.size - size
        if info.isreg() and missing > 0:
            index.problems.append(
                report_file(path, f"is truncated in {previous}, {missing} bytes missing", "the rest is lost")
            )
            return
        yield info
    with path.open("rb") as file:
        file.seek(tar.offset)
        block = file.read(tarfile.BLOCKSIZE)
    if not block:
        index.problems.append(report_file(path, f"has no end mark after {previous}", "it may be truncated"))
    elif len(block) < tarfile.BLOCKSIZE:
        index.problems.append(report_file(path, f"is truncated after {previous}", "the rest is lost"))
    elif block.strip(b"\0"):
        index.problems.append(
            report_file(path, f"is damaged after {previous}, at byte {tar.offset}", "the rest is lost")
        )


def _add_member(info: tarfile.TarInfo, path: Path, index: TarIndex) -> None:
    name = info.name.removeprefix("./")
    if info.isdir():
        return
    if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/") or _WINDOWS_DRIVE.match(name):
        problem = f"member {info.name!r} has a path outside the archive; pack it again with relative paths"
    elif name.rpartition("/")[2].startswith("."):  # such as "._a.png", which macOS adds
        return
    elif info.issym() or info.islnk():
        problem = f"member {name!r} is a link to {info.linkname!r}; pack it again with --dereference --hard-dereference"
    elif not info.isreg() or info.issparse():
        problem = f"member {name!r} is not a regular file; remove it"
    else:
        index.members.append(ByteRange(name, info.offset_data, info.size))
        return
    index.problems.append(report_file(path, problem))


Sample = dict[str, ByteRange]
"""The members of one sample by extension: what follows the first dot of the name, in lower case."""


def list_webdataset_images(subset: SubsetConfig, dataset: int, index: int) -> SubsetListing:
    """List every image of the shards of ``webdataset``, in the order of shards and members."""
    listing = SubsetListing(subset, dataset, index, expected_source=" or ".join(subset.normalized_caption_extensions))
    shards = resolve_shards(subset)
    listing.problems += shards.problems
    json_reader = JsonCaptionReader(subset.caption_column)
    unused: Counter[str] = Counter()
    for path in shards.files:
        tar_index = load_tar_index(path)
        listing.missing += tar_index.problems
        samples = _group_by_key(tar_index.members, path, listing)
        try:
            with path.open("rb") as file:
                unused += _add_samples(
                    path, file, tar_index.texts, samples=samples, json_reader=json_reader, listing=listing
                )
        except RemoteOutage:
            raise
        except OSError as error:
            listing.missing.append(report_file(path, f"cannot be read: {error.strerror}"))
        except CaptionColumnError as error:
            listing.add_problem("webdataset", str(error))
            listing.mark_used("caption_column")
            break
    content = ", ".join(f"{count} {extension}" for extension, count in unused.most_common(4)) or "no members"
    if not listing.images and not listing.problems and not listing.missing:
        extensions = " ".join(IMAGE_EXTENSIONS)
        files = format_count(len(shards.files), "file")
        listing.add_problem("webdataset", f"no images in {files} ({content}); image extensions are {extensions}")
    elif unused:
        listing.notes.append(f"{subset.source}: members that are not used: {content}")
    listing.add_caption_notes(subset.source)
    listing.mark_unused("caption_column", f"no effect: no captions were read from {JSON_EXTENSION} in {subset.source}")
    if json_reader.column is not None:
        listing.mark_used("caption_column")
    return listing


def _group_by_key(members: Sequence[ByteRange], path: Path, listing: SubsetListing) -> Mapping[str, Sample]:
    """Group members into samples by their key: the path up to the first dot of the name."""
    samples: dict[str, Sample] = {}
    for member in members:
        folder, slash, name = member.name.rpartition("/")
        stem, dot, extension = name.partition(".")
        sample = samples.setdefault(f"{folder}{slash}{stem}", {})
        if dot + extension.lower() in sample:
            listing.missing.append(report_file(path, f"duplicate member {member.name!r}", "rename it"))
        sample.setdefault(dot + extension.lower(), member)
    return samples


def _find_extensions(sample: Iterable[str], wanted: Sequence[str]) -> list[str]:
    """Return the extensions of a sample that are among those wanted, or else those that end so (``.v1.png``)."""
    extensions = list(sample)
    exact = [extension for extension in extensions if extension in wanted]
    return exact or [extension for extension in extensions if extension.endswith(tuple(wanted))]


def _add_samples(
    path: Path,
    file: BinaryIO,
    texts: Mapping[int, bytes],
    samples: Mapping[str, Sample],
    json_reader: JsonCaptionReader,
    listing: SubsetListing,
) -> Counter[str]:
    """Add the images of one shard; return the extensions of the members that are not used."""
    caption_extensions = _choose_caption_extensions(listing.subset, samples)
    folder, unused = path.parent, Counter[str]()
    for key, sample in samples.items():
        try:
            controls = sort_control_members(sample)
        except ValueError as error:
            listing.missing.append(report_file(path, f"key {key!r}: {error}"))
            continue
        images = _find_extensions([each for each in sample if each not in controls], IMAGE_EXTENSIONS)
        text, wanted = None, ""
        for wanted in caption_extensions:
            if matches := _find_extensions(sample, [wanted]):
                text = matches[0]
                break
        unused.update(extension for extension in sample if extension not in (text, *images[:1], *controls))
        if len(images) > 1:
            names = ", ".join(images)
            listing.missing.append(
                report_file(
                    path, f"several images with the key {key!r}: {names}", "rename them to differ before the first dot"
                )
            )
        if len(images) != 1:
            continue
        image = sample[images[0]]
        caption = ImageCaption()
        if text is not None:
            data = _read_member(sample[text], file, texts)
            place = Place(str(path), part=f"member {sample[text].name!r}")
            caption = _parse_caption(data, place, wanted, json_reader)
        own = tuple(ImageRef(folder, path.name, sample[extension]) for extension in controls)
        listing.add_image(ImageRef(folder, path.name, image), image.name, caption, own)
    return unused


def _choose_caption_extensions(subset: SubsetConfig, samples: Mapping[str, Sample]) -> Sequence[str]:
    """Return those that are set; if none is set and the shard has no .caption, .txt, or else .json."""
    extensions = [extension.lower() for extension in subset.normalized_caption_extensions if extension]
    fallbacks = [[FALLBACK_EXTENSION], [JSON_EXTENSION]] if subset.caption_extension is None else []
    for candidates in [extensions, *fallbacks]:
        if any(_find_extensions(sample, candidates) for sample in samples.values()):
            return candidates
    return extensions


def _read_member(member: ByteRange, file: BinaryIO, texts: Mapping[int, bytes]) -> bytes:
    if member.offset in texts:
        return texts[member.offset]
    file.seek(member.offset)
    return file.read(member.length)


def _parse_caption(data: bytes, place: Place, extension: str, json_reader: JsonCaptionReader) -> ImageCaption:
    try:
        text = decode_utf8(data)
    except ValueError as error:
        return ImageCaption(problem=Problem("", str(error), place=place))
    if extension == JSON_EXTENSION:
        try:
            return ImageCaption(json_reader.read_lines(text), extension)
        except ValueError as error:
            return ImageCaption(problem=Problem("", str(error), place=place))
        except CaptionColumnError as error:
            raise CaptionColumnError(f"{place}: {error}") from None
    lines = split_lines(text)
    if not lines:
        return ImageCaption(
            problem=Problem("", "is empty", "write a caption, or remove it if the image has none", place)
        )
    return ImageCaption(lines, extension)
