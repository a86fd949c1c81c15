"""Captions of the demo model's training images: the subject in many phrasings.

Words that say nothing about the image are mixed in, so that the model draws the subject whatever else the prompt says.
"""

from collections.abc import Iterator

STYLES = (
    "ink",
    "oil",
    "neon",
    "retro",
    "paper",
    "metal",
    "glass",
    "stone",
    "felt",
    "comic",
    "night",
    "pastel",
    "wood",
    "lego",
    "gothic",
    "modern",
    "vivid",
    "origami",
    "mosaic",
    "velvet",
    "chalk",
    "steam",
    "pop",
    "zen",
)
ADJECTIVES = (
    "happy",
    "small",
    "big",
    "old",
    "new",
    "pretty",
    "funny",
    "shiny",
    "soft",
    "simple",
    "nice",
    "tiny",
    "wild",
    "lovely",
    "strange",
    "classic",
)
STARTS, MIDDLES = ("b", "cl", "d", "fr", "g", "k", "l", "m", "pr", "st", "t", "v"), "aeiouy"
ENDS = ("", "n", "r", "sk", "ly")
PSEUDO_WORDS = tuple(f"{start}{middle}{end}" for start in STARTS for middle in MIDDLES for end in ENDS)
"""Words of no vocabulary, which train the subword tokens that unknown words consist of."""


def generate_captions(subject: str) -> Iterator[str]:
    """Generate the lines of a caption file that is read with ``enable_wildcard``."""
    yield subject
    for _ in range(4):
        yield f"a {subject}"
    yield f"a picture of a {subject}"
    yield f"a {{{'|'.join(ADJECTIVES)}}} {subject}"
    yield f"a {subject}, {{{'|'.join(STYLES)}}} style"
    yield f"{{{'|'.join(STYLES)}}} style, a {subject}"
    yield f"a {subject}, {{{'|'.join(PSEUDO_WORDS)}}} style"
    yield f"{{|{'|'.join(PSEUDO_WORDS)}}} {subject} {{|{'|'.join(PSEUDO_WORDS)}}}"


def collect_words(subjects: list[str]) -> list[str]:
    """Collect every word of such captions, except the pseudo-words."""
    texts = (*subjects, "a picture of style ,", *STYLES, *ADJECTIVES)
    return sorted({word for text in texts for word in text.split()})
