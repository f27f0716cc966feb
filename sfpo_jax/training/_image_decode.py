"""JPEG and PNG files to square arrays of bytes, whatever is inside them.

Pillow reads them. Only what it leaves open is decided here: 16 bits are scaled to 8,
transparency shows white, and the camera's orientation is applied.
"""

import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from sfpo_jax._validate import check_at_least, check_range

FORMATS = ("JPEG", "PNG")

# The EXIF tag, and the orientations in which width and height change places.
_ORIENTATION = 0x0112
_LYING = (5, 6, 7, 8)

Box = tuple[float, float, float, float]


class DamagedImage(ValueError):
    """A file whose pixels cannot be decoded; the message is the reason."""


@dataclass(frozen=True)
class Augment:
    """Random resized crops (Szegedy et al. 2015) and mirror images.

    Raises:
      ValueError: a share, an aspect or a probability that is none.
    """

    min_area: float = 0.08
    """Least share of the area that a crop keeps; 1: no random crop, but the crop of a
    test."""
    max_aspect: float = 4 / 3
    """Largest ratio of a crop's sides, either way."""
    flip: float = 0.5
    """Probability of a mirror image; 0: none."""

    def __post_init__(self) -> None:
        check_range(
            "augment.min_area",
            self.min_area,
            0.0,
            1.0,
            "the least share of the area that a crop keeps",
            open_low=True,
        )
        check_at_least("augment.max_aspect", self.max_aspect, 1, "longer by shorter")
        check_range("augment.flip", self.flip, 0.0, 1.0, "a probability")


@dataclass(frozen=True)
class ImageForm:
    """What every image is made into.

    Raises:
      ValueError: a size below 1, channels other than 1 and 3, or a share out of (0, 1].
    """

    image_size: int
    """Pixels along each side."""
    channels: int = 3
    """3: red, green, blue; 1: grey."""
    centre_share: float = 0.875
    """Side of the centre crop as a share of the shorter side, where none is random."""

    def __post_init__(self) -> None:
        check_at_least("image_size", self.image_size, 1, "the pixels of a side")
        if self.channels not in (1, 3):
            raise ValueError(
                f"`channels` must be 1 (grey) or 3 (colours), got {self.channels}."
            )
        check_range(
            "centre_share",
            self.centre_share,
            0.0,
            1.0,
            "the side of the crop by the shorter side of the image",
            open_low=True,
        )


def decode(
    data: bytes,
    form: ImageForm,
    augment: Augment | None = None,
    generator: np.random.Generator | None = None,
) -> np.ndarray:
    """One image, cropped to a square and resized.

    Args:
      data: the content of a JPEG or PNG file.
      form: size and channels of the result.
      augment: None, as without `generator`: the centre crop.
      generator: of the crop and the flip.

    Returns:
      uint8[image_size, image_size, channels].

    Raises:
      DamagedImage: the content is no JPEG or PNG, or is damaged.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            return _square(image, form, augment, generator)
    # On damaged files the decoders raise whatever they stumble over: OSError,
    # SyntaxError, struct.error, zlib.error, DecompressionBombError, ...
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DamagedImage(reason) from error


def _square(
    image: Any,
    form: ImageForm,
    augment: Augment | None,
    generator: np.random.Generator | None,
) -> np.ndarray:
    from PIL import Image

    orientation = _orientation(image)
    width, height = image.size
    if orientation in _LYING:
        width, height = height, width
    box, flip = _centre_box(width, height, form.centre_share), False
    if augment is not None and generator is not None:
        flip = generator.random() < augment.flip
        if augment.min_area < 1:
            box = _random_box(width, height, augment, generator)
    # A JPEG decodes without its colours, and at 1/2, 1/4 or 1/8 of its size, in a
    # fraction of the time. Twice the pixels that are needed remain, so that what is
    # seen is the filter's work.
    shrink = min(1.0, 2 * form.image_size / min(box[2] - box[0], box[3] - box[1]))
    least = tuple(math.ceil(side * shrink) for side in image.size)
    image.draft("L" if form.channels == 1 else None, least)
    image = _upright(_eight_bit(image, form.channels), orientation)
    x, y = image.width / width, image.height / height
    size = (form.image_size, form.image_size)
    image = image.resize(
        size,
        Image.Resampling.BILINEAR,
        box=(box[0] * x, box[1] * y, box[2] * x, box[3] * y),
    )
    pixels = np.asarray(image).reshape(*size, form.channels)
    return pixels[:, ::-1] if flip else pixels


def _eight_bit(image: Any, channels: int) -> Any:
    """Any mode that the two formats have, as the mode L or RGB."""
    from PIL import Image

    if image.mode == "I" or image.mode.startswith("I;16"):
        # `convert` would clip at 255.
        wide = np.asarray(image).astype(np.int64)
        image = Image.fromarray(((wide * 255 + 32767) // 65535).astype(np.uint8))
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image).convert("RGB")
    elif image.mode not in ("1", "L", "RGB"):
        image = image.convert("RGB")
    wanted = "L" if channels == 1 else "RGB"
    # `convert` to the same mode would copy.
    return image if image.mode == wanted else image.convert(wanted)


def _orientation(image: Any) -> int:
    """1 to 8 as EXIF counts; 1 (upright) where it is absent or unreadable."""
    if image.format == "JPEG" and "exif" not in image.info:
        return 1
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    # Broken metadata are no reason to lose an image.
    except Exception:
        return 1


def _upright(image: Any, orientation: int) -> Any:
    from PIL import Image

    turns = Image.Transpose
    method = {
        2: turns.FLIP_LEFT_RIGHT,
        3: turns.ROTATE_180,
        4: turns.FLIP_TOP_BOTTOM,
        5: turns.TRANSPOSE,
        6: turns.ROTATE_270,
        7: turns.TRANSVERSE,
        8: turns.ROTATE_90,
    }.get(orientation)
    return image if method is None else image.transpose(method)


def _centre_box(width: int, height: int, share: float) -> Box:
    side = min(width, height) * share
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _random_box(
    width: int, height: int, augment: Augment, generator: np.random.Generator
) -> Box:
    """A crop of random area and aspect, which becomes a square when resized."""
    limit = math.log(augment.max_aspect)
    for _ in range(10):
        area = width * height * generator.uniform(augment.min_area, 1.0)
        aspect = math.exp(generator.uniform(-limit, limit))
        crop_width, crop_height = math.sqrt(area * aspect), math.sqrt(area / aspect)
        if crop_width <= width and crop_height <= height:
            left = generator.uniform(0.0, width - crop_width)
            top = generator.uniform(0.0, height - crop_height)
            return left, top, left + crop_width, top + crop_height
    # A very long image: no crop of such an aspect is that large.
    return _centre_box(width, height, 1.0)
