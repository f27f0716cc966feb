"""The images of a run, in memory or in a folder."""

import os

from experiments.data.batches import (
    Batch,
    TrainingBatches,
    test_batches,
    training_batches,
)
from experiments.data.folders import FolderImages, load_folder
from experiments.data.images import Dataset, Images, load_dataset
from sfpo_jax.training import Data, ImageStream


def open_dataset(
    data: Data, image_size: int, channels: int
) -> Dataset[Images] | Dataset[FolderImages]:
    """Reads or lists what `data.source` names.

    Args:
      data: its `source` is mnist5k, an .npz file or a folder.
      image_size: pixels along each side that a model wants, of a folder's images.
      channels: that a model wants, of a folder's images.

    Raises:
      ValueError: a source that cannot be used.
    """
    if os.path.isdir(data.source):
        dataset = load_folder(data, image_size, channels)
    else:
        dataset = load_dataset(data.source, data.test_share)
    if dataset.classes < 2:
        raise ValueError(
            f"`data.source` must hold two classes at least, got {dataset.classes} in "
            f"'{data.source}': there is nothing to tell apart."
        )
    return dataset


def training_stream(
    images: Images | FolderImages, data: Data, seed: int
) -> TrainingBatches | ImageStream:
    """Endless training batches with `get_state` and `set_state`."""
    if isinstance(images, FolderImages):
        return images.stream(data.batch_size, seed)
    return training_batches(images, data.batch_size, seed=seed, shift=data.shift)


def held_out_batches(images: Images | FolderImages, batch_size: int) -> list[Batch]:
    """All images in order; the last batch is filled up with rows of label PADDING."""
    if isinstance(images, FolderImages):
        return images.in_order(batch_size)
    return test_batches(images, batch_size)
