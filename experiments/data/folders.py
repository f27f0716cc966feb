"""Images in a folder, decoded as they are needed."""

import os
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from experiments.data.images import Dataset, Images
from sfpo_jax.training import (
    PADDING,
    Augment,
    Data,
    ImageBatch,
    ImageFiles,
    ImageStream,
    image_folder,
    scan_images,
)

# Enough for the mean of a channel to be known to half a percent of its range.
_SAMPLE = 1024


@dataclass(frozen=True)
class FolderImages:
    """One side of a folder's images, and what a model wants of them."""

    files: ImageFiles
    image_size: int
    channels: int
    data: Data

    @property
    def labels(self) -> np.ndarray:
        """int32[n], from 0."""
        return self.files.labels

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels as a model gets them."""
        return self.image_size, self.image_size, self.channels

    def stream(self, batch_size: int, seed: int) -> ImageStream:
        """Endless training batches, cropped and mirrored."""
        augment = Augment(min_area=self.data.crop_area, flip=self.data.flip)
        return image_folder(
            self.files,
            batch_size=batch_size,
            seed=seed,
            augment=augment,
            workers=self.data.workers,
            **self._form(),
        )

    def in_order(self, batch_size: int, **host: int) -> list[ImageBatch]:
        """All images as a test sees them, the last batch filled up with PADDING.

        Of each batch this host's share, or that which `host` names.
        """
        stream = image_folder(
            self.files,
            batch_size=batch_size,
            shuffle=False,
            augment=None,
            epochs=1,
            remainder="pad",
            **self._form(),
            **host,
        )
        with stream:
            return list(stream)

    def sample(self) -> Images:
        """Up to 1,024 images spread over all, for the statistics of the pixels.

        Raises:
          ValueError: none of them can be decoded.
        """
        count = min(_SAMPLE, len(self.files))
        chosen = np.linspace(0, len(self.files) - 1, count).round().astype(int)
        part = replace(self, files=self.files.take(chosen))
        # The same on all hosts, whichever share of the batches is theirs.
        batches = part.in_order(min(count, 128), host_index=0, host_count=1)
        labels = np.concatenate([batch.labels for batch in batches])
        is_real = labels != PADDING
        if not is_real.any():
            raise ValueError(
                f"`data.source` must hold readable images, got {count} damaged ones in "
                f"'{self.files.root}': replace them."
            )
        images = np.concatenate([batch.images for batch in batches])
        return Images(images[is_real], labels[is_real])

    def _form(self) -> dict[str, Any]:
        return {
            "image_size": self.image_size,
            "channels": self.channels,
            "centre_share": self.data.centre_share,
        }


def load_folder(data: Data, image_size: int, channels: int) -> Dataset[FolderImages]:
    """Lists a folder and splits it, by its train and val or class by class.

    Args:
      data: its `source` is a folder of class folders, or of a folder `train` and a
        folder `val` (or `test`) of these.
      image_size: pixels along each side that a model wants.
      channels: 1 or 3.

    Raises:
      ValueError: no images, a class that cannot be split, or a class of val that train
        lacks.
    """
    try:
        train, test = _sides(data)
    except ValueError as error:
        raise ValueError(f"`data.source`: {error}") from None
    name = os.path.basename(os.path.normpath(data.source))
    first, second = (
        FolderImages(files, image_size, channels, data) for files in (train, test)
    )
    return Dataset(name, first, second, len(train.classes))


def _sides(data: Data) -> tuple[ImageFiles, ImageFiles]:
    folders = {name: os.path.join(data.source, name) for name in ("train", "val")}
    if not os.path.isdir(folders["val"]):
        folders["val"] = os.path.join(data.source, "test")
    if not all(map(os.path.isdir, folders.values())):
        return scan_images(data.source).split(data.test_share)
    train, test = (scan_images(folder) for folder in folders.values())
    if unknown := sorted(set(test.classes) - set(train.classes)):
        raise ValueError(
            f"the classes of '{test.root}' must be in '{train.root}' too, got "
            f"{', '.join(unknown[:5])} in the former alone."
        )
    # A class that val lacks must not move the labels of those after it.
    places = np.array([train.classes.index(name) for name in test.classes], np.int32)
    return train, replace(test, classes=train.classes, labels=places[test.labels])
