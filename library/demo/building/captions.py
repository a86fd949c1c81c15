"""What is written about a picture of the built-in model's training: its subject, in many wordings.

Words that say nothing about the picture are mixed in, so that the model draws the subject whatever stands beside it.
"""

from collections.abc import Iterator

MANNERS = (
    "ink", "oil", "neon", "retro", "paper", "metal", "glass", "stone", "felt", "comic", "night", "pastel", "wood",
    "lego", "gothic", "modern", "vivid", "origami", "mosaic", "velvet", "chalk", "steam", "pop", "zen",
)  # fmt: skip
QUALITIES = (
    "happy", "small", "big", "old", "new", "pretty", "funny", "shiny", "soft", "simple", "nice", "tiny", "wild",
    "lovely", "strange", "classic",
)  # fmt: skip

STARTS, MIDDLES = ("b", "cl", "d", "fr", "g", "k", "l", "m", "pr", "st", "t", "v"), "aeiouy"
ENDS = ("", "n", "r", "sk", "ly")
NONSENSE = tuple(f"{start}{middle}{end}" for start in STARTS for middle in MIDDLES for end in ENDS)
"""Words of which no vocabulary has heard, for the pieces that unknown words are made of."""


def wordings(subject: str) -> Iterator[str]:
    """Lines of a caption file that is read with ``enable_wildcard``."""
    yield subject
    for _ in range(4):
        yield f"a {subject}"
    yield f"a picture of a {subject}"
    yield f"a {{{'|'.join(QUALITIES)}}} {subject}"
    yield f"a {subject}, {{{'|'.join(MANNERS)}}} style"
    yield f"{{{'|'.join(MANNERS)}}} style, a {subject}"
    yield f"a {subject}, {{{'|'.join(NONSENSE)}}} style"
    yield f"{{|{'|'.join(NONSENSE)}}} {subject} {{|{'|'.join(NONSENSE)}}}"


def words(subjects: list[str]) -> list[str]:
    """Every word that such lines are made of."""
    return sorted({word for text in (*subjects, "a picture of style ,", *MANNERS, *QUALITIES) for word in text.split()})
