"""A folder of class folders of images, listed and checked before a run begins."""

import dataclasses
import hashlib
import os
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from sfpo_jax._validate import check_range
from sfpo_jax.training._image_decode import FORMATS
from sfpo_jax.training._skipped import Skipped, listing

_MAGIC = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n")

# Of the split alone; the seed of a run must not move examples into the test.
_SPLIT_SEED = 0


@dataclasses.dataclass(frozen=True)
class ImageFiles:
    """The readable images of a folder; `scan_images` makes it."""

    root: str
    """The folder."""
    classes: tuple[str, ...]
    """Names of the class folders in order; a label is an index into it."""
    names: tuple[str, ...]
    """Paths of the images under `root`."""
    labels: np.ndarray
    """int32[n]."""
    skipped: tuple[Skipped, ...] = ()
    """(path, reason) of each file that is no readable image."""

    def __len__(self) -> int:
        return len(self.names)

    def path(self, index: int) -> str:
        """Where an image lies."""
        return os.path.join(self.root, self.names[index])

    @property
    def empty_classes(self) -> tuple[str, ...]:
        """Classes without an image; they keep their label."""
        counts = np.bincount(self.labels, minlength=len(self.classes))
        return tuple(c for c, n in zip(self.classes, counts, strict=True) if not n)

    def digest(self) -> str:
        """Of names and labels: tells two lists of images apart."""
        text = "\0".join([*self.classes, *self.names])
        return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]

    def take(self, indices: np.ndarray | Sequence[int]) -> "ImageFiles":
        """Some of the images, by their index; the classes stay."""
        chosen = np.asarray(indices, np.int64)
        names = tuple(self.names[i] for i in chosen.tolist())
        return dataclasses.replace(self, names=names, labels=self.labels[chosen])

    def split(self, test_share: float) -> tuple["ImageFiles", "ImageFiles"]:
        """Holds out the same share of every class; depends on the list alone.

        Args:
          test_share: in (0, 1); a class gives at least one image to either side.

        Returns:
          (train, test).

        Raises:
          ValueError: a share out of range, or a class of a single image.
        """
        check_range(
            "test_share",
            test_share,
            0.0,
            1.0,
            "the share of each class that is held out",
            open_low=True,
            open_high=True,
        )
        generator = np.random.default_rng(_SPLIT_SEED)
        train, test = [], []
        for label in np.unique(self.labels):
            places = generator.permutation(np.flatnonzero(self.labels == label))
            if len(places) < 2:
                raise ValueError(
                    "`test_share` must leave an image of each class on both sides, got "
                    f"one image of class '{self.classes[label]}': add images."
                )
            held = min(max(1, round(test_share * len(places))), len(places) - 1)
            test.append(places[:held])
            train.append(places[held:])
        first, second = (np.sort(np.concatenate(part)) for part in (train, test))
        return self.take(first), self.take(second)


def scan_images(path: str | Path) -> ImageFiles:
    """Lists the images of a folder of class folders (the layout of ImageNet).

    Every file in a class folder, however deep, counts as an image by its content, not
    by its name; hidden ones are passed over. Only headers are read, about a second for
    10,000 files: pixels cut off behind the header show when they are decoded.

    Args:
      path: the folder; its sub-folders are the classes, in the order of their names.

    Returns:
      The images in order. Files that are neither JPEG nor PNG are named in `skipped`;
      these and classes without images are the subject of one warning.

    Raises:
      ValueError: no folder, no class folders, or no image in any of them.
    """
    root = os.fspath(path)
    if not os.path.isdir(root):
        raise ValueError(
            f"`path` must be a folder of class folders, got '{root}': no such folder."
        )
    with os.scandir(root) as entries:
        visible = (e for e in entries if not e.name.startswith("."))
        classes = sorted(e.name for e in visible if e.is_dir())
    if not classes:
        raise ValueError(
            f"`path` must hold a folder of images for each class, got '{root}' without "
            "folders: make one for each class and move its images there."
        )
    found = [
        (name, label)
        for label, folder in enumerate(classes)
        for name in _files(root, folder)
    ]
    # Threads wait for the disk together.
    with ThreadPoolExecutor(8) as pool:
        faults = list(pool.map(lambda f: _fault(os.path.join(root, f[0])), found))
    good = [file for file, fault in zip(found, faults, strict=True) if fault is None]
    skipped = tuple(
        (os.path.join(root, name), fault)
        for (name, _), fault in zip(found, faults, strict=True)
        if fault is not None
    )
    if not good:
        seen = f": {listing(skipped)}" if skipped else ", which are empty"
        raise ValueError(
            "`path` must hold JPEG or PNG images in its class folders, got none in the "
            f"{len(classes)} folders of '{root}'{seen}."
        )
    files = ImageFiles(
        root,
        tuple(classes),
        tuple(name for name, _ in good),
        np.array([label for _, label in good], np.int32),
        skipped,
    )
    _warn(files)
    return files


def _files(root: str, folder: str) -> Iterator[str]:
    """Paths under `root` of all files in a class folder, in order."""
    for place, folders, files in os.walk(os.path.join(root, folder)):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        for name in sorted(f for f in files if not f.startswith(".")):
            yield os.path.relpath(os.path.join(place, name), root)


def _fault(path: str) -> str | None:
    """Why a file is no image, from its header; None for an image."""
    from PIL import Image, UnidentifiedImageError

    start = b""
    try:
        with open(path, "rb") as file:
            start = file.read(8)
            file.seek(0)
            with Image.open(file, formats=FORMATS):
                return None
    except UnidentifiedImageError:
        if not start:
            return "empty file"
        is_image = start.startswith(_MAGIC)
        return "damaged header" if is_image else "neither JPEG nor PNG"
    # As in `decode`: the readers of damaged headers raise whatever they stumble over.
    except Exception as error:
        return getattr(error, "strerror", None) or " ".join(str(error).split())


def _warn(files: ImageFiles) -> None:
    parts = []
    if files.skipped:
        total = len(files) + len(files.skipped)
        parts.append(
            f"{len(files.skipped)} of {total} files skipped ({listing(files.skipped)})"
        )
    if files.empty_classes:
        names = ", ".join(files.empty_classes)
        parts.append(f"{len(files.empty_classes)} classes without images ({names})")
    if parts:
        # The caller of `scan_images` or `image_folder` is not always at one depth.
        warnings.warn(f"'{files.root}': {', '.join(parts)}", stacklevel=3)
