"""Batches: endless, shuffled by a seed and shifted for training; in order for a test.

Images travel as the bytes they are stored in. The model's own program makes floats of
them and enlarges them (`preprocess`), so a step moves 1 byte a pixel of the source.
"""

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data.images import Images

# The label of rows that only fill up the last batch of a test.
PADDING = -1


class Batch(NamedTuple):
    """One step's examples."""

    images: np.ndarray | jax.Array  # uint8[b, h, w, c]
    labels: np.ndarray | jax.Array  # int32[b], PADDING where there is no image


class Normalization(NamedTuple):
    """Mean and standard deviation of a channel, of bytes scaled to [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


def training_batches(
    data: Images, batch_size: int, *, seed: int, shift: int = 0
) -> Iterator[Batch]:
    """Endless batches, every example once before any comes again.

    Args:
      data: the training images.
      batch_size: examples of a batch; may exceed the number of images.
      seed: of order and shifts; equal seeds give equal batches, whoever trains.
      shift: an image moves by up to this many pixels along each axis; its edge is
        repeated.
    """
    generator = np.random.default_rng(seed)
    order = np.zeros(0, np.int64)
    while True:
        while len(order) < batch_size:
            order = np.concatenate([order, generator.permutation(len(data.labels))])
        places, order = order[:batch_size], order[batch_size:]
        images = data.images[places]
        if shift:
            images = _shifted(images, shift, generator)
        yield Batch(images, data.labels[places])


def test_batches(data: Images, batch_size: int) -> list[Batch]:
    """All images in order; the last batch is filled up with rows of label PADDING."""
    batches = []
    for start in range(0, len(data.labels), batch_size):
        part = slice(start, start + batch_size)
        images, labels = data.images[part], data.labels[part]
        missing = batch_size - len(labels)
        images = np.pad(images, ((0, missing), (0, 0), (0, 0), (0, 0)))
        labels = np.pad(labels, (0, missing), constant_values=PADDING)
        batches.append(Batch(images, labels))
    return batches


def normalization(images: np.ndarray) -> Normalization:
    """Statistics of uint8[n, h, w, c]; a channel without contrast gets std 1."""
    channels = images.shape[-1]
    # A histogram is exact and needs no float copy of the images.
    levels = np.arange(256) / 255.0
    means, stds = [], []
    for channel in range(channels):
        counts = np.bincount(images[..., channel].ravel(), minlength=256)
        mean = float(counts @ levels / counts.sum())
        variance = float(counts @ (levels - mean) ** 2 / counts.sum())
        means.append(mean)
        stds.append(variance**0.5 or 1.0)
    return Normalization(tuple(means), tuple(stds))


def preprocess(
    images: np.ndarray | jax.Array,
    scale: Normalization,
    image_size: int,
    channels: int,
) -> jax.Array:
    """Bytes to what a model reads: normalised, enlarged, its channels made up.

    Args:
      images: uint8[b, s, s, c]; `image_size` is a multiple of s.
      scale: of each of the c channels.
      image_size: pixels along each side of the result; pixels are repeated.
      channels: of the result, c or, from a single one, any number.

    Returns:
      float32[b, image_size, image_size, channels].
    """
    mean = jnp.asarray(scale.mean, jnp.float32).reshape(1, 1, 1, -1)
    std = jnp.asarray(scale.std, jnp.float32).reshape(1, 1, 1, -1)
    x = (jnp.asarray(images, jnp.float32) / np.float32(255) - mean) / std
    factor = image_size // images.shape[1]
    x = jnp.repeat(jnp.repeat(x, factor, axis=1), factor, axis=2)
    return jnp.broadcast_to(x, (*x.shape[:3], channels))


def check_shapes(data: Images, image_size: int, channels: int) -> None:
    """Raises ValueError where `preprocess` cannot make these images fit a model."""
    height, width, depth = data.images.shape[1:]
    if height != width:
        raise ValueError(
            f"`data.source` must hold square images, got {height} x {width} pixels: "
            "crop or pad them in the file."
        )
    if image_size % height:
        near = max(1, round(image_size / height)) * height
        raise ValueError(
            f"`model.image_size` must be a multiple of the {height} pixels of "
            f"`data.source`, got {image_size}: pixels are repeated whole, take {near}."
        )
    if depth not in (1, channels):
        raise ValueError(
            f"`model.channels` must be {depth}, the channels of `data.source`, got "
            f"{channels}: only a single channel can be repeated."
        )


def _shifted(
    images: np.ndarray, shift: int, generator: np.random.Generator
) -> np.ndarray:
    """Each image moved by its own whole number of pixels, edges repeated."""
    count, height, width, _ = images.shape
    moves = generator.integers(-shift, shift + 1, (2, count, 1))
    rows = np.clip(np.arange(height)[None] + moves[0], 0, height - 1)
    columns = np.clip(np.arange(width)[None] + moves[1], 0, width - 1)
    which = np.arange(count)[:, None, None]
    return images[which, rows[:, :, None], columns[:, None, :]]
