"""A folder as people have it: 25 pictures, some of which are turned, broken, twice there, small or without caption."""

import io
import math
from pathlib import Path

from PIL import Image, ImageDraw

EXIF_ORIENTATION = 0x0112


def draw_picture(number: int, size: tuple[int, int] = (320, 256)) -> Image.Image:
    """A figure on a ground that no other number has."""
    width, height = size
    image = Image.linear_gradient("L").rotate(37 * number).resize(size).convert("RGB")
    image = Image.blend(image, Image.new("RGB", size, (53 * number % 256, 97 * number % 256, 151 * number % 256)), 0.6)
    draw = ImageDraw.Draw(image)
    for part in range(2 + number % 5):
        angle = number * 1.7 + part * 2.4
        x, y = width * (0.5 + 0.32 * math.cos(angle)), height * (0.5 + 0.32 * math.sin(angle))
        radius = min(size) * (0.08 + 0.05 * ((number + part) % 4))
        draw.ellipse(
            (x - radius, y - radius, x + radius, y + radius), fill=(255 - 40 * part, 60 * part, 200 - 30 * part)
        )
    return image


def write_faulty_pictures(folder: Path, count: int = 25) -> Path:
    """Write ``count`` pictures, of which the first have a fault each, and their captions."""
    folder.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = 6
    draw_picture(0).save(folder / "00_turned.jpg", exif=exif)
    draw_picture(1).convert("CMYK").save(folder / "01_print.jpg")
    draw_picture(2, (64, 40)).save(folder / "02_small.png")
    draw_picture(3, (600, 120)).save(folder / "03_narrow.png")
    glass = draw_picture(4).convert("RGBA")
    glass.putalpha(Image.radial_gradient("L").resize(glass.size))
    glass.save(folder / "04_glass.png")
    data = io.BytesIO()
    draw_picture(5).save(data, "JPEG")
    (folder / "05_broken.jpg").write_bytes(data.getvalue()[: len(data.getvalue()) // 3])
    draw_picture(7).resize((160, 128)).save(folder / "06_like_07.png")
    for number in range(7, count - 1):
        draw_picture(number).save(folder / f"{number:02}.png")
    (folder / f"{count - 1:02}_copy.png").write_bytes((folder / "08.png").read_bytes())
    for path in sorted(folder.iterdir()):
        if path.name != "09.png":
            path.with_suffix(".txt").write_text(f"picture {path.stem[:2]}\n")
    (folder / ".DS_Store").write_bytes(b"0")
    (folder / "notes.pdf").write_bytes(b"%PDF-1.4")
    return folder
