"""Emoji from the packages that contain them, and images composed of them."""

import io
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Size = tuple[int, int]
Color = tuple[int, int, int]
WHITE: Color = (255, 255, 255)


def load_noto(font: Path) -> dict[int, Image.Image]:
    """Load the bitmaps of NotoColorEmoji.ttf by code point."""
    from fontTools.ttLib import TTFont  # type: ignore[import-not-found,unused-ignore]

    opened: Any = TTFont(font)
    strike, names = opened["CBDT"].strikeData[0], opened.getBestCmap()
    glyphs = {code: strike[name] for code, name in names.items() if name in strike}
    return {code: _crop_transparent_border(Image.open(io.BytesIO(glyph.imageData))) for code, glyph in glyphs.items()}


def load_directory(directory: Path, suffix: str) -> dict[int, Image.Image]:
    """Load images whose file names are code points in hexadecimal digits."""
    images = {}
    for path in sorted(directory.glob(f"*{suffix}")):
        digits = path.name.removesuffix(suffix).removesuffix("-fe0f")
        if "-" not in digits:
            images[int(digits, 16)] = _crop_transparent_border(Image.open(path))
    return images


def _crop_transparent_border(image: Image.Image) -> Image.Image:
    image = image.convert("RGBA")
    return image.crop(image.getchannel("A").point(lambda alpha: 255 * (alpha > 16)).getbbox())


def compose(
    emoji: Image.Image,
    size: Size,
    background: Image.Image | Color,
    *,
    margin: float = 0.05,
    position: tuple[float, float] = (0.5, 0.5),
) -> Image.Image:
    """Paste the emoji onto a background, as large as fits; ``position`` is relative to the free space."""
    canvas = background.copy() if isinstance(background, Image.Image) else Image.new("RGB", size, background)
    available = [round(side * (1 - 2 * margin)) for side in size]
    scale = min(available[0] / emoji.width, available[1] / emoji.height)
    scaled = (max(1, round(emoji.width * scale)), max(1, round(emoji.height * scale)))
    resized = emoji.resize(scaled, Image.Resampling.LANCZOS)
    left, top = (round((side - part) * share) for side, part, share in zip(size, scaled, position, strict=True))
    canvas.paste(resized, (left, top), resized)
    return canvas


def draw_radial_gradient(size: Size, inner: Color, outer: Color) -> Image.Image:
    x, y = np.linspace(-1, 1, size[0])[None, :], np.linspace(-1, 1, size[1])[:, None]
    share = np.clip(np.sqrt(x**2 + y**2) / 1.4, 0, 1)[..., None]
    blended = (1 - share) * np.array(inner) + share * np.array(outer)
    return Image.fromarray(blended.round().astype(np.uint8))


def draw_random_image(
    styles: Mapping[str, Mapping[int, Image.Image]], codes: list[int], size: Size, rng: random.Random
) -> Image.Image:
    """Draw a random emoji in a random style and position, half of the time on white."""
    style = styles[rng.choice(sorted(styles))]
    emoji = style[rng.choice(codes)]
    first, second = ((rng.randrange(256), rng.randrange(256), rng.randrange(256)) for _ in range(2))
    kind = rng.random()
    background: Any = WHITE if kind < 0.5 else first if kind < 0.75 else draw_radial_gradient(size, first, second)
    if rng.random() < 0.3:
        emoji = emoji.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    margin = rng.choice((0.03, 0.05, 0.05, 0.15, 0.25))
    return compose(emoji, size, background, margin=margin, position=(rng.random(), rng.random()))
