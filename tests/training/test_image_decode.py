"""Every kind of file becomes the bytes that it shows."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sfpo_jax.training._image_decode import Augment, DamagedImage, ImageForm, decode

FORM = ImageForm(8, 3, 1.0)
GREY = ImageForm(8, 1, 1.0)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def means(data: bytes, form: ImageForm = FORM) -> list[int]:
    pixels = decode(data, form)
    assert (pixels.dtype, pixels.shape) == (np.uint8, (8, 8, form.channels))
    return pixels.mean((0, 1)).round().astype(int).tolist()


def test_grey_and_colours_become_what_is_asked_for() -> None:
    grey = encoded(Image.new("L", (9, 8), 90), "JPEG")
    assert (means(grey), means(grey, GREY)) == ([90, 90, 90], [90])
    colour = encoded(Image.new("RGB", (8, 9), (200, 100, 50)))
    assert means(colour) == [200, 100, 50]
    # ITU-R 601: 0.299 r + 0.587 g + 0.114 b.
    assert means(colour, GREY) == [124]


def test_cmyk_shows_its_colours() -> None:
    data = encoded(Image.new("CMYK", (8, 8), (255, 0, 0, 0)), "JPEG")
    red, green, blue = means(data)
    assert red < 5 < 250 < min(green, blue)
    assert means(data, GREY)[0] > 170


def test_sixteen_bits_are_scaled() -> None:
    ramp = np.linspace(0, 65535, 64).round().astype(np.uint16).reshape(8, 8)
    data = encoded(Image.fromarray(ramp))
    expected = np.rint(ramp / 257.0)
    for form in (FORM, GREY):
        for channel in range(form.channels):
            np.testing.assert_array_equal(decode(data, form)[..., channel], expected)


@pytest.mark.parametrize("mode", ["1", "P", "LA", "RGBA"])
def test_other_modes_show_their_pixels(mode: str) -> None:
    image = Image.new("RGB", (8, 8), (255, 255, 255))
    image.paste((0, 0, 0), (0, 0, 4, 8))
    for form in (FORM, GREY):
        pixels = decode(encoded(image.convert(mode)), form)
        assert (pixels[:, :4].max(), pixels[:, 4:].min()) == (0, 255)


def test_transparency_shows_white() -> None:
    assert means(encoded(Image.new("RGBA", (8, 8), (0, 0, 0, 0)))) == [255] * 3
    half = encoded(Image.new("LA", (8, 8), (0, 128)))
    assert means(half, GREY) == [127]
    palette = Image.new("P", (8, 8), 3)
    palette.putpalette([10, 20, 30] * 4)
    assert means(encoded(palette, transparency=3)) == [255] * 3
    assert means(encoded(palette, transparency=b"\xff" * 4)) == [10, 20, 30]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_the_cameras_orientation_is_applied(orientation: int, kind: str) -> None:
    shown = np.zeros((16, 16), np.uint8)
    shown[:8, :8], shown[:8, 8:], shown[8:, :8] = 240, 160, 80
    # How a camera so held stores what it shows: the inverse of each turn.
    stored = {
        1: shown,
        2: shown[:, ::-1],
        3: shown[::-1, ::-1],
        4: shown[::-1],
        5: shown.T,
        6: np.rot90(shown, 1),
        7: np.rot90(shown, 2).T,
        8: np.rot90(shown, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(np.ascontiguousarray(stored))
    pixels = decode(encoded(image, kind, exif=exif), ImageForm(16, 1, 1.0))
    np.testing.assert_allclose(pixels[..., 0].astype(int), shown.astype(int), atol=3)


def test_a_large_jpeg_is_shrunk_in_place() -> None:
    # Left black, right white: the border stays in the middle at 1/8 of the size.
    image = Image.new("L", (640, 512))
    image.paste(255, (320, 0, 640, 512))
    row = decode(encoded(image, "JPEG"), ImageForm(32, 1, 1.0))[16, :, 0]
    assert row[:15].max() < 10 < 245 < row[17:].min()


def test_the_centre_is_cropped() -> None:
    pixels = np.zeros((20, 40), np.uint8)
    pixels[5:15, 15:25] = 200
    data = encoded(Image.fromarray(pixels))
    assert decode(data, ImageForm(10, 1, 0.5)).min() == 200
    assert decode(data, ImageForm(20, 1, 1.0))[0, 0, 0] == 0


def test_damaged_files_are_named_with_a_reason() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for kind in ("JPEG", "PNG"):
        data = encoded(Image.fromarray(noise), kind)
        assert decode(data, FORM).shape == (8, 8, 3)
        for kept in (len(data) // 2, len(data) // 4, 30, 0):
            with pytest.raises(DamagedImage, match=r"\w"):
                decode(data[:kept], FORM)
    with pytest.raises(DamagedImage):
        decode(b"no image", FORM)


def draw(augment: Augment, data: bytes, position: int) -> np.ndarray:
    return decode(data, FORM, augment, np.random.default_rng([0, position]))


def test_crops_are_of_the_shares_and_aspects_asked_for() -> None:
    # Pixel (x, y) holds (x, y): the corners of a crop can be read.
    x, y = np.meshgrid(np.arange(200), np.arange(200))
    data = encoded(Image.fromarray(np.stack([x, y, 0 * x], -1).astype(np.uint8)))
    augment = Augment(min_area=0.2, max_aspect=2.0, flip=0.0)
    areas, aspects = [], []
    for position in range(300):
        crop = draw(augment, data, position).astype(float)
        # Centres of the outer pixels lie 7/8 of the crop apart.
        width = (crop[0, -1, 0] - crop[0, 0, 0]) * 8 / 7
        height = (crop[-1, 0, 1] - crop[0, 0, 1]) * 8 / 7
        areas.append(width * height / 200**2)
        aspects.append(width / height)
    assert 0.18 < min(areas) < 0.3 and 0.8 < max(areas) < 1.05
    assert 0.45 < min(aspects) < 0.65 and 1.6 < max(aspects) < 2.2


def test_flips_come_as_often_as_asked_for() -> None:
    ramp = np.tile(np.arange(8, dtype=np.uint8) * 30, (8, 1))
    data = encoded(Image.fromarray(ramp))
    for flip, low, high in ((0.0, 0, 0), (0.5, 70, 130), (1.0, 200, 200)):
        augment = Augment(min_area=1.0, flip=flip)
        mirrored = sum(draw(augment, data, p)[0, 0, 0] > 100 for p in range(200))
        assert low <= mirrored <= high


def test_a_very_long_image_is_cropped_all_the_same() -> None:
    data = encoded(Image.new("RGB", (300, 2), (9, 9, 9)))
    assert (draw(Augment(min_area=0.9), data, 0) == 9).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ImageForm(0), "`image_size` must be at least 1, got 0"),
        (lambda: ImageForm(8, 4), "`channels` must be 1.*or 3.*got 4"),
        (lambda: ImageForm(8, 3, 0.0), r"`centre_share` must lie in \(0, 1\], got 0"),
        (lambda: Augment(min_area=0.0), r"`augment.min_area` must lie in \(0, 1\]"),
        (lambda: Augment(max_aspect=0.5), "`augment.max_aspect` must be at least 1"),
        (lambda: Augment(flip=2.0), r"`augment.flip` must lie in \[0, 1\], got 2"),
    ],
)
def test_values_out_of_range_are_refused(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
