"""Edits of tag captions: replace, remove, add, deduplicate and sort tags; how often each tag occurs."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase


def split_tags(line: str, separator: str = ",") -> list[str]:
    """Split a caption into tags without the spaces around them; empty tags are dropped."""
    return [tag.strip() for tag in line.split(separator) if tag.strip()]


def count_tags(captions: Iterable[str], separator: str = ",") -> Counter[str]:
    """Count in how many captions each tag occurs."""
    return Counter(tag for text in captions for tag in dict.fromkeys(_split_lines(text, separator)))


def _split_lines(text: str, separator: str) -> list[str]:
    return [tag for line in text.splitlines() for tag in split_tags(line, separator)]


@dataclass(frozen=True)
class TagEdit:
    """Changes to the tags of each caption, which are made in the order of the fields."""

    replace: Mapping[str, str] = field(default_factory=dict)
    """A tag may be replaced by several, with the separator between them."""
    remove: Sequence[str] = ()
    """Tags, or patterns with ``*`` and ``?``."""
    prepend: Sequence[str] = ()
    """Tags at the start; if they are elsewhere in the caption, they are moved."""
    append: Sequence[str] = ()
    """Tags at the end, unless the caption has them."""
    deduplicate: bool = False
    sort: str = "none"
    keep_tokens: int = 0
    """Tags at the start that are not sorted, those of ``prepend`` included."""
    separator: str = ","

    def apply(self, text: str, counts: Mapping[str, int] | None = None) -> str:
        """Edit every line of a caption; one that needs no edit is returned as it is, with its spaces."""
        return "\n".join(self._apply_to_line(line, counts or {}) for line in text.splitlines())

    def _apply_to_line(self, line: str, counts: Mapping[str, int]) -> str:
        before = split_tags(line, self.separator)
        tags = [part for tag in before for part in self._replace_tag(tag)]
        tags = [tag for tag in tags if not any(fnmatchcase(tag, pattern) for pattern in self.remove)]
        if self.prepend:
            tags = [*self.prepend, *(tag for tag in tags if tag not in self.prepend)]
        tags += [tag for tag in self.append if tag not in tags]
        if self.deduplicate:
            tags = list(dict.fromkeys(tags))
        first, rest = tags[: self.keep_tokens], tags[self.keep_tokens :]
        if self.sort == "alphabet":
            rest.sort(key=str.casefold)
        elif self.sort == "frequency":
            rest.sort(key=lambda tag: -counts.get(tag, 0))
        tags = first + rest
        return line if tags == before else f"{self.separator} ".join(tags)

    def _replace_tag(self, tag: str) -> list[str]:
        return split_tags(self.replace[tag], self.separator) if tag in self.replace else [tag]
