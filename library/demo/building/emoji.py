"""Emoji out of the packages they come in, and pictures made of them."""

import io
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Size = tuple[int, int]
Colour = tuple[int, int, int]
WHITE: Colour = (255, 255, 255)


def noto(font: Path) -> dict[int, Image.Image]:
    """The bitmaps of NotoColorEmoji.ttf by code point."""
    from fontTools.ttLib import TTFont  # type: ignore[import-not-found,unused-ignore]

    opened: Any = TTFont(font)
    strike, names = opened["CBDT"].strikeData[0], opened.getBestCmap()
    found = {}
    for code, name in names.items():
        glyph = strike.get(name)
        if glyph is not None:
            found[code] = _cropped(Image.open(io.BytesIO(glyph.imageData)))
    return found


def files(folder: Path, ending: str) -> dict[int, Image.Image]:
    """Pictures that are called by their code point in hexadecimal digits."""
    found = {}
    for path in sorted(folder.glob(f"*{ending}")):
        digits = path.name.removesuffix(ending).removesuffix("-fe0f")
        if "-" not in digits:
            found[int(digits, 16)] = _cropped(Image.open(path))
    return found


def _cropped(picture: Image.Image) -> Image.Image:
    """Without the transparent border."""
    picture = picture.convert("RGBA")
    return picture.crop(picture.getchannel("A").point(lambda alpha: 255 * (alpha > 16)).getbbox())


def composed(emoji: Image.Image, size: Size, ground: Image.Image | Colour, *, margin: float = 0.05,
             at: tuple[float, float] = (0.5, 0.5)) -> Image.Image:  # fmt: skip
    """The emoji as large as fits on a ground; ``at`` says where, if there is room."""
    canvas = ground.copy() if isinstance(ground, Image.Image) else Image.new("RGB", size, ground)
    room = [round(side * (1 - 2 * margin)) for side in size]
    scale = min(room[0] / emoji.width, room[1] / emoji.height)
    drawn = emoji.resize((max(1, round(emoji.width * scale)), max(1, round(emoji.height * scale))),
                         Image.Resampling.LANCZOS)  # fmt: skip
    left, top = (round((whole - part) * share) for whole, part, share in zip(size, drawn.size, at, strict=True))
    canvas.paste(drawn, (left, top), drawn)
    return canvas


def glow(size: Size, inner: Colour, outer: Colour) -> Image.Image:
    """A ground that changes from the middle outwards."""
    x, y = np.linspace(-1, 1, size[0])[None, :], np.linspace(-1, 1, size[1])[:, None]
    share = np.clip(np.sqrt(x**2 + y**2) / 1.4, 0, 1)[..., None]
    blended = (1 - share) * np.array(inner) + share * np.array(outer)
    return Image.fromarray(blended.round().astype(np.uint8))


def any_picture(styles: Mapping[str, Mapping[int, Image.Image]], codes: list[int], size: Size,
                draw: random.Random) -> Image.Image:  # fmt: skip
    """A random emoji in a random style and place, half of the time on white."""
    style = styles[draw.choice(sorted(styles))]
    emoji = style[draw.choice(codes)]
    first, second = ((draw.randrange(256), draw.randrange(256), draw.randrange(256)) for _ in range(2))
    kind = draw.random()
    ground: Any = WHITE if kind < 0.5 else first if kind < 0.75 else glow(size, first, second)
    if draw.random() < 0.3:
        emoji = emoji.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return composed(emoji, size, ground, margin=draw.choice((0.03, 0.05, 0.05, 0.15, 0.25)),
                    at=(draw.random(), draw.random()))  # fmt: skip
