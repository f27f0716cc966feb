"""Batches: endless, shuffled by a seed and shifted for training; in order for a test.

Images travel as the bytes they are stored in. The model's own program makes floats of
them and enlarges them (`preprocess`), so a step moves 1 byte a pixel of the source.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.data.images import Images
from sfpo_jax.training import PADDING as PADDING
from sfpo_jax.training import ImageBatch, check_identity

# Those in memory and those of a folder are alike to whoever trains.
Batch = ImageBatch


class Normalization(NamedTuple):
    """Mean and standard deviation of a channel, of bytes scaled to [0, 1]."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


class TrainingBatches(Iterator[Batch]):
    """Endless batches, every example once before any comes again.

    With several hosts each gets its share of the rows.

    Args:
      data: the training images.
      batch_size: examples of a batch; may exceed the number of images.
      seed: of order and shifts; equal seeds give equal batches, whoever trains.
      shift: an image moves by up to this many pixels along each axis; its edge is
        repeated.
    """

    def __init__(
        self, data: Images, batch_size: int, *, seed: int, shift: int = 0
    ) -> None:
        self._data = data
        self._identity = {
            "images": len(data.labels),
            "batch_size": batch_size,
            "seed": seed,
            "shift": shift,
        }
        self._batch_size, self._seed, self._shift = batch_size, seed, shift
        self._restart()

    def __next__(self) -> Batch:
        places, moves = self._draw()
        own = _own_rows(len(places))
        places, moves = places[own], None if moves is None else moves[:, own]
        images = self._data.images[places]
        if moves is not None:
            images = _shifted(images, moves)
        return Batch(images, self._data.labels[places])

    def get_state(self) -> dict[str, Any]:
        """Where the batches stand: a few numbers that JSON can hold."""
        return {"next_batch": self._count, "stream": dict(self._identity)}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Goes on as the batches did that `get_state` was asked.

        Raises:
          ValueError: the state of other batches.
        """
        check_identity(state, self._identity)
        self._restart()
        # Drawing again without touching an image takes some microseconds a batch.
        while self._count < state["next_batch"]:
            self._draw()

    def _restart(self) -> None:
        self._generator = np.random.default_rng(self._seed)
        self._order = np.zeros(0, np.int64)
        self._count = 0

    def _draw(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Which images come next, and how far each moves: int64[2, b, 1] or None."""
        size, total = self._batch_size, len(self._data.labels)
        while len(self._order) < size:
            more = self._generator.permutation(total)
            self._order = np.concatenate([self._order, more])
        places, self._order = self._order[:size], self._order[size:]
        self._count += 1
        if not self._shift:
            return places, None
        limits = (-self._shift, self._shift + 1)
        return places, self._generator.integers(*limits, (2, size, 1))


def training_batches(
    data: Images, batch_size: int, *, seed: int, shift: int = 0
) -> TrainingBatches:
    """`TrainingBatches` of these arguments."""
    return TrainingBatches(data, batch_size, seed=seed, shift=shift)


def test_batches(data: Images, batch_size: int) -> list[Batch]:
    """All images in order; the last batch is filled up with rows of label PADDING."""
    batches = []
    for start in range(0, len(data.labels), batch_size):
        part = slice(start, start + batch_size)
        images, labels = data.images[part], data.labels[part]
        missing = batch_size - len(labels)
        images = np.pad(images, ((0, missing), (0, 0), (0, 0), (0, 0)))
        labels = np.pad(labels, (0, missing), constant_values=PADDING)
        own = _own_rows(batch_size)
        batches.append(Batch(images[own], labels[own]))
    return batches


def _own_rows(batch_size: int) -> slice:
    """Those of this host, of a batch of all."""
    share = batch_size // jax.process_count()
    return slice(share * jax.process_index(), share * (jax.process_index() + 1))


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


def _shifted(images: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """Each image moved by its own whole number of pixels, edges repeated."""
    count, height, width, _ = images.shape
    rows = np.clip(np.arange(height)[None] + moves[0], 0, height - 1)
    columns = np.clip(np.arange(width)[None] + moves[1], 0, width - 1)
    which = np.arange(count)[:, None, None]
    return images[which, rows[:, :, None], columns[:, None, :]]
