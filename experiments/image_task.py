"""What every task on images reads of its batches."""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp

from experiments.data.batches import Batch, check_shapes, normalization, preprocess
from experiments.data.images import Dataset


class ImageSizes(Protocol):
    """What a model says of the images it reads."""

    @property
    def image_size(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def classes(self) -> int: ...


def image_reader(
    model: ImageSizes, dataset: Dataset
) -> Callable[[Batch], tuple[jax.Array, jax.Array]]:
    """batch -> (float32 images [B, H, W, C] as a model reads them, labels int32[B]).

    Args:
      model: the sizes of its images.
      dataset: what it learns; the statistics of its pixels are taken here.

    Raises:
      ValueError: images or classes that do not fit the model.
    """
    sample = dataset.train.sample()
    check_shapes(sample, model.image_size, model.channels)
    if dataset.classes > model.classes:
        raise ValueError(
            f"`model.classes` must be at least {dataset.classes}, the classes of "
            f"`data.source`, got {model.classes}."
        )
    scale = normalization(sample.images)

    def read(batch: Batch) -> tuple[jax.Array, jax.Array]:
        images = preprocess(batch.images, scale, model.image_size, model.channels)
        return images, jnp.asarray(batch.labels)

    return read
