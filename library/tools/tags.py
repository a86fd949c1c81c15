"""``python -m library tags count|edit|duplicates FOLDER...``: tags of caption files, and images that are alike."""

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from ..captioning.caption_folder import CaptionedImage, list_captioned_images, write_caption
from ..captioning.near_duplicates import find_near_duplicates
from ..captioning.tag_edits import TagEdit, count_tags, split_tags
from ..config import parse_config
from ..config.options import define_option, iter_options
from .validate_arguments import check_tags_arguments

USAGE = "usage: python -m library tags count|edit|duplicates FOLDER... [--option value ...]"
COMMANDS = {
    "count": "list the tags, the most frequent first",
    "edit": "replace, remove, add, deduplicate and sort tags; with --dry_run, only show what would change",
    "duplicates": "list images that are alike, by perceptual hash",
}


@dataclass(frozen=True)
class TagsOptions:
    """The options of this tool."""

    caption_extension: str = define_option(".txt", "extension of caption files")
    caption_separator: str = define_option(",", "separator of tags")
    recursive: bool = define_option(False, "search the folders inside")
    min_count: int = define_option(1, "count: leave out tags of fewer captions", minimum=1)
    replace: tuple[str, ...] = define_option((), 'edit: "old=new"; new may be several tags')
    remove: tuple[str, ...] = define_option((), "edit: tags to remove; * and ? stand for any characters")
    prepend: tuple[str, ...] = define_option((), "edit: tags at the start; tags that are there are moved")
    append: tuple[str, ...] = define_option((), "edit: tags at the end, unless the caption has them")
    deduplicate: bool = define_option(False, "edit: keep only the first of equal tags")
    sort: Literal["none", "alphabet", "frequency"] = define_option("none", "edit: order of the tags")
    keep_tokens: int = define_option(0, "edit: tags at the start that are not sorted", minimum=0)
    dry_run: bool = define_option(False, "edit: print the difference, write nothing")
    max_distance: int = define_option(6, "duplicates: bits of 64 that may differ", minimum=0, maximum=16)


@dataclass(frozen=True)
class _Arguments:
    tags: TagsOptions = field(default_factory=TagsOptions)


def run_tags(argv: Sequence[str]) -> tuple[str, int] | Generator[str, None, int]:
    """Run one command."""
    if not argv or set(argv) & {"--help", "-h"}:
        return _format_help(), 0
    command, *rest = argv
    count = next((index for index, word in enumerate(rest) if word.startswith("--")), len(rest))
    folders, own = [Path(word).expanduser() for word in rest[:count]], parse_config(rest[count:], _Arguments)
    options: TagsOptions = cast(Any, own.config).tags
    check_tags_arguments(command, COMMANDS, options, folders=folders, own=own, usage=USAGE)
    images = list_captioned_images(folders, options.caption_extension, recursive=options.recursive)
    commands = {"count": _list_counts, "edit": _edit_tags, "duplicates": _list_duplicates}
    return commands[command](images, options)


def _list_counts(images: Sequence[CaptionedImage], options: TagsOptions) -> Generator[str, None, int]:
    captions = [image.text for image in images if image.text]
    counts = count_tags(captions, options.caption_separator)
    for tag, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if count >= options.min_count:
            yield f"{count:>7}  {tag}"
    yield f"{len(counts)} tags in {len(captions)} captions of {len(images)} images"
    return 0


def _edit_tags(images: Sequence[CaptionedImage], options: TagsOptions) -> Generator[str, None, int]:
    replace = dict(text.split("=", 1) for text in options.replace)
    separator = options.caption_separator
    edit = TagEdit(
        replace={old.strip(): new.strip() for old, new in replace.items()},
        remove=options.remove,
        prepend=[tag for text in options.prepend for tag in split_tags(text, separator)],
        append=[tag for text in options.append for tag in split_tags(text, separator)],
        deduplicate=options.deduplicate,
        sort=options.sort,
        keep_tokens=options.keep_tokens,
        separator=separator,
    )
    captions = [(image, image.text) for image in images if image.text is not None]
    counts = count_tags((text for _, text in captions), separator) if options.sort == "frequency" else None
    changed = 0
    for image, text in captions:
        edited = edit.apply(text, counts)
        if edited == text.rstrip("\n"):
            continue
        changed += 1
        if options.dry_run:
            yield f"{image.caption_file}:"
            yield from (f"  - {line}" for line in text.splitlines())
            yield from (f"  + {line}" for line in edited.splitlines())
        else:
            write_caption(image.caption_file, edited)
    what = "would change; nothing was written" if options.dry_run else "changed"
    yield f"{changed} of {len(captions)} captions {what}"
    return 0


def _list_duplicates(images: Sequence[CaptionedImage], options: TagsOptions) -> Generator[str, None, int]:
    groups, problems = find_near_duplicates([image.image for image in images], options.max_distance)
    yield from problems
    for group in groups:
        yield f"alike ({group.distance} of 64 bits differ):" if group.distance else "alike (no bit differs):"
        yield from (
            f"  {width}x{height}  {path}" for path, (width, height) in zip(group.images, group.sizes, strict=True)
        )
    count = sum(len(group.images) for group in groups)
    yield f"{count} of {len(images)} images are alike, in {len(groups)} groups"
    return 1 if problems else 0


def _format_help() -> str:
    lines = [f"  --{option.name:<18} {option.syntax:<24} {option.help}" for option in iter_options(_Arguments)]
    commands = [f"  {name:<11} {what}" for name, what in COMMANDS.items()]
    return "\n".join([USAGE, "", *commands, "", *lines])
