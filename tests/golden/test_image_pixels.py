"""Images are decoded to the pixels that a viewer shows, and resized as in sd-scripts."""

import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from odd_images import encode_png
from PIL import Image

from library.dataloader.buckets import BucketAssignment
from library.dataloader.images import resize_and_crop, resize_area, resize_image
from library.dataset.image_decoding import load_inpainting_mask, load_rgb_image
from library.dataset.image_inspection import inspect_image

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)
TRANSPOSED = {
    1: None,
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_90",
    7: "TRANSVERSE",
    8: "ROTATE_270",
}
"""EXIF orientation -> how the stored image is transposed."""


def build_image(width: int = 30, height: int = 20) -> Image.Image:
    """An image with four different corners."""
    image = Image.new("RGB", (width, height), (90, 90, 90))
    image.paste(RED, (0, 0, width // 2, height // 2))
    image.paste(BLUE, (width // 2, height // 2, width, height))
    return image


@pytest.mark.parametrize("orientation", TRANSPOSED)
@pytest.mark.parametrize("ending", ["png", "jpg", "webp"])
def test_all_eight_exif_orientations_are_applied(tmp_path: Path, orientation: int, ending: str):
    method = TRANSPOSED[orientation]
    transposed = build_image() if method is None else build_image().transpose(Image.Transpose[method])
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{ending}"
    transposed.save(path, exif=exif, quality=100)
    assert inspect_image(path).size == (30, 20) == load_rgb_image(path).size
    actual = np.asarray(load_rgb_image(path)).astype(int)
    assert np.abs(actual - np.asarray(build_image())).mean() < 8  # JPEG blurs the edges


def test_transparent_pixels_become_white(tmp_path: Path):
    half = build_image().convert("RGBA")
    half.putalpha(Image.linear_gradient("L").resize((30, 20)).point(lambda value: 255 if value > 127 else 0))
    half.save(tmp_path / "rgba.png")
    pixels = load_rgb_image(tmp_path / "rgba.png")
    assert (pixels.getpixel((2, 2)), pixels.getpixel((28, 18))) == (WHITE, BLUE)

    palette = Image.new("P", (4, 4))
    palette.putpalette([*RED, *BLUE])
    palette.putpixel((3, 3), 1)
    palette.save(tmp_path / "p.png", transparency=0)
    assert load_rgb_image(tmp_path / "p.png").getpixel((0, 0)) == WHITE
    assert load_rgb_image(tmp_path / "p.png").getpixel((3, 3)) == BLUE

    Image.new("LA", (4, 4), (10, 128)).save(tmp_path / "la.png")
    assert load_rgb_image(tmp_path / "la.png").getpixel((0, 0)) == (132, 132, 132)

    Image.new("RGB", (4, 4), RED).save(tmp_path / "key.png", transparency=RED)
    assert load_rgb_image(tmp_path / "key.png").getpixel((0, 0)) == WHITE


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L with a transparent value"])
def test_white_on_transparent_is_a_mask_of_the_white(mode: str, tmp_path: Path):
    path = tmp_path / "mask.png"
    if mode == "P":
        mask = Image.new("P", (30, 20))
        mask.putpalette([255, 255, 255, 255, 255, 255])
        mask.paste(1, (0, 0, 10, 20))
        mask.save(path, transparency=0)
    elif mode == "L with a transparent value":
        mask = Image.new("L", (30, 20), 254)
        mask.paste(255, (0, 0, 10, 20))
        mask.save(path, transparency=254)
    else:
        mask = Image.new(mode, (30, 20), (255, 255, 255, 0) if mode == "RGBA" else (255, 0))
        mask.paste((255, 255, 255, 255) if mode == "RGBA" else (255, 255), (0, 0, 10, 20))
        mask.save(path)
    assert Image.open(path).mode == mode.split(" ")[0]
    pixels = np.asarray(load_inpainting_mask(path))
    assert pixels.shape == (20, 30, 3)
    assert (pixels[:, :10] == 255).all() and (pixels[:, 10:] == 0).all()
    opaque = tmp_path / "opaque.png"
    build_image().save(opaque)
    assert (np.asarray(load_inpainting_mask(opaque)) == np.asarray(load_rgb_image(opaque))).all()


def test_other_image_modes_are_converted_without_changing_the_brightness(tmp_path: Path):
    deep = np.array([[0, 257 * 100, 65535]], np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert np.asarray(load_rgb_image(tmp_path / "deep.png"))[0, :, 0].tolist() == [0, 100, 255]
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "cmyk.jpg", quality=100)
    assert np.abs(np.asarray(load_rgb_image(tmp_path / "cmyk.jpg")).astype(int) - RED).max() < 4
    Image.new("1", (8, 8), 1).save(tmp_path / "one.png")
    assert load_rgb_image(tmp_path / "one.png").getpixel((0, 0)) == WHITE
    Image.new("L", (8, 8), 77).save(tmp_path / "gray.bmp")
    assert load_rgb_image(tmp_path / "gray.bmp").getpixel((0, 0)) == (77, 77, 77)


@given(st.integers(1, 40), st.integers(1, 40), st.data())
def test_area_resizing_is_the_exact_mean_of_the_covered_pixels(width: int, height: int, data):
    size = data.draw(st.tuples(st.integers(1, width), st.integers(1, height)))
    image = np.random.default_rng(width * 41 + height).integers(0, 256, (height, width, 3), np.uint8)
    # every pixel enlarged until both grids fit, then averaged in whole pixels
    fine = image.repeat(size[1], axis=0).repeat(size[0], axis=1).astype(np.float64)
    exact = fine.reshape(size[1], height, size[0], width, 3).mean(axis=(1, 3))
    assert np.abs(resize_area(image, size) - exact).max() <= 0.51


@pytest.mark.parametrize(
    ("size", "new_size", "checksum"),
    [
        ((192, 192), (96, 96), 2807713854),
        ((288, 288), (96, 96), 2731795736),
        ((100, 280), (69, 192), 2114376265),
        ((192, 90), (96, 30), 144900610),
        ((384, 384), (64, 64), 2868371862),
        ((300, 200), (300, 77), 4190333173),
        ((1500, 1001), (777, 519), 1131093994),
    ],
)
def test_area_resizing_rounds_as_opencv_does(size, new_size, checksum):
    """The checksums are those of ``cv2.resize`` with ``INTER_AREA`` of OpenCV 4.10, with which sd-scripts shrinks."""
    count = size[0] * size[1] * 3
    image = ((np.arange(count, dtype=np.int64) * 2654435761 >> 7) % 256).astype(np.uint8).reshape(*size[::-1], 3)
    assert zlib.crc32(resize_area(image, new_size).tobytes()) == checksum


def test_resizing_is_area_when_shrinking_and_lanczos_when_a_side_grows():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8))
    assert (resize_image(image, (17, 20), None) == resize_area(np.asarray(image), (17, 20))).all()
    assert (resize_image(image, (30, 11), None) == resize_area(np.asarray(image), (30, 11))).all()
    assert (resize_image(image, (31, 10), None) == np.asarray(image.resize((31, 10), Image.Resampling.LANCZOS))).all()
    assert (resize_image(image, (9, 9), "bicubic") == np.asarray(image.resize((9, 9), Image.Resampling.BICUBIC))).all()
    assert (resize_image(image, (40, 9), "area") == np.asarray(image.resize((40, 9), Image.Resampling.BILINEAR))).all()
    assert (resize_image(image, (30, 20), "nearest") == np.asarray(image)).all()


def test_the_image_is_cropped_at_the_requested_position():
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 30, 3), np.uint8))
    cropped = resize_and_crop(image, BucketAssignment((16, 16), (30, 20), (7, 2)), (5, 3), None)
    assert (cropped == np.asarray(image)[3:19, 5:21]).all()


def test_broken_image_files_are_reported_and_not_raised(tmp_path: Path):
    build_image(300, 200).save(tmp_path / "whole.jpg")
    data = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "cut.jpg").write_bytes(data[: len(data) // 2])
    build_image(300, 200).save(tmp_path / "whole.png")
    data = (tmp_path / "whole.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(data[: len(data) // 2])
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "gone.png").symlink_to(tmp_path / "nowhere")
    expected = {
        "cut.jpg": "truncated",
        "cut.png": "truncated",
        "empty.png": "is empty",
        "text.png": "is not an image",
        "gone.png": "cannot be read",
    }
    for name, problem in expected.items():
        assert problem in str(inspect_image(tmp_path / name).problem), name
    assert inspect_image(tmp_path / "whole.jpg").problem is None


@pytest.mark.parametrize("limit", [Image.MAX_IMAGE_PIXELS, None], ids=["as it is", "none"])
def test_an_image_of_too_many_pixels_is_reported_and_not_decoded(tmp_path: Path, monkeypatch, limit):
    """Independent of Pillow's limit; the files contain no pixels, so decoding them would fail."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    (tmp_path / "huge.png").write_bytes(encode_png(60_000, 60_000))
    assert "3,600,000,000 pixels" in str(inspect_image(tmp_path / "huge.png").problem)
    (tmp_path / "large.png").write_bytes(encode_png(15_000, 12_000))
    assert "180,000,000 pixels" in str(inspect_image(tmp_path / "large.png").problem)
