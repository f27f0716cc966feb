"""Batches of images from a folder of class folders, through Grain.

Order, crops and flips of a batch depend on its number alone (`BatchOrder`). A file
whose pixels turn out to be damaged is dealt with by a rule that looks only at the files
themselves, so that the stream stays the same for any workers, hosts and resumes.
"""

import dataclasses
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sfpo_jax.training._batch_order import PADDING, BatchOrder, Remainder
from sfpo_jax.training._batch_stream import BatchStream
from sfpo_jax.training._image_decode import Augment, DamagedImage, ImageForm, decode
from sfpo_jax.training._image_scan import ImageFiles, scan_images

_TRAINING = Augment()


class ImageBatch(NamedTuple):
    """One step's examples."""

    images: np.ndarray  # uint8[b, s, s, c]
    labels: np.ndarray  # int32[b], PADDING where there is no image


class ImageStream(BatchStream[ImageBatch]):
    """The iterator that `image_folder` makes.

    Attributes:
      files: the images.
      skipped: (path, reason) of each file not used: those that the scan refused, then
        those that this host found damaged on the way. A resumed stream finds the latter
        again.
    """

    def __init__(
        self, maker: "_Maker", batches: int | None, workers: int, identity: Any
    ) -> None:
        super().__init__(maker, batches, identity, workers)
        self.files = maker.files
        self.skipped = list(maker.files.skipped)
        self._found: set[int] = set()

    def _receive(self, made: Any) -> ImageBatch:
        for index, reason in made["damaged"]:
            if index not in self._found:
                self._report(int(index), reason)
        return ImageBatch(_own(made["images"]), _own(made["labels"]))

    def _report(self, index: int, reason: str) -> None:
        path = self.files.path(index)
        if not self._found:
            warnings.warn(
                f"{path} is damaged and skipped ({reason}); `skipped` lists it and "
                "any that follow",
                stacklevel=4,
            )
        self._found.add(index)
        self.skipped.append((path, reason))


def image_folder(
    path: str | Path | ImageFiles,
    *,
    batch_size: int,
    image_size: int,
    channels: int = 3,
    seed: int = 0,
    shuffle: bool = True,
    augment: Augment | None = _TRAINING,
    centre_share: float = 0.875,
    epochs: int | None = None,
    remainder: Remainder = "drop",
    workers: int = 0,
    host_index: int | None = None,
    host_count: int | None = None,
) -> ImageStream:
    """Streams the images of a folder of class folders (the layout of ImageNet).

    For training, keep the defaults. For a test, `shuffle=False, augment=None, epochs=1,
    remainder="pad"`: every image once, in order, its centre.

    Grey, CMYK, palette and 16-bit files are converted, transparency shows white, and
    the EXIF orientation is applied. Files that are no images are skipped by the scan.
    A file whose pixels turn out to be damaged is replaced by the next readable one in
    the list of files, or, with `remainder="pad"`, leaves a row of label PADDING.

    Args:
      path: the folder, or what `scan_images` or its `split` gave.
      batch_size: images of a batch over all hosts.
      image_size: pixels along each side.
      channels: 3 for colours, 1 for grey.
      seed: of order, crops and flips.
      shuffle: another order each epoch, rather than that of the files.
      augment: random crops and flips; None: resize and centre crop.
      centre_share: side of the centre crop by the shorter side of the image.
      epochs: how often each image comes; None: endless.
      remainder: what becomes of the last images that fill no batch: "drop" leaves them
        out, "pad" adds rows of zeros with label PADDING (-1).
      workers: processes that decode; 0: threads of this process.
      host_index: whose share of each batch to read; None: this JAX process's.
      host_count: number of shares; None: the number of JAX processes.

    Returns:
      An iterator of `ImageBatch`, uint8[b, s, s, c] and int32[b] with b = batch_size /
      host_count. `get_state` and `set_state` resume exactly, also with other workers
      and hosts; `skipped` names the files that were not used.

    Raises:
      ValueError: a folder without images, or a value out of range.
      OSError: while iterating, a file that the scan saw can no longer be read; to go on
        without it would be another stream.
      RuntimeError: while iterating, no readable file to replace a damaged one.

    Example:
      >>> import tempfile
      >>> from PIL import Image
      >>> folder = Path(tempfile.mkdtemp())
      >>> for name in ("cat", "dog"):
      ...     (folder / name).mkdir()
      ...     Image.new("RGB", (40, 30), "red").save(folder / name / "1.jpg")
      >>> batches = image_folder(folder, batch_size=4, image_size=16)
      >>> images, labels = next(batches)
      >>> images.shape, sorted(labels.tolist())
      ((4, 16, 16, 3), [0, 0, 1, 1])
    """
    form = ImageForm(image_size, channels, centre_share)
    files = path if isinstance(path, ImageFiles) else scan_images(path)
    order = BatchOrder(
        len(files),
        batch_size,
        seed=seed,
        shuffle=shuffle,
        epochs=epochs,
        remainder=remainder,
        host_index=host_index,
        host_count=host_count,
    )
    identity = {
        "images": len(files),
        "files": files.digest(),
        "batch_size": batch_size,
        "seed": seed,
        "shuffle": shuffle,
        "remainder": remainder,
        **dataclasses.asdict(form),
        "augment": None if augment is None else dataclasses.asdict(augment),
    }
    maker = _Maker(files, order, form, augment, seed, remainder == "pad")
    return ImageStream(maker, order.batches, workers, identity)


def _own(array: np.ndarray) -> np.ndarray:
    """An array of ordinary memory.

    That of a worker process lies in shared memory, which is freed behind the back of
    whoever still holds a pointer into it.
    """
    return array if type(array) is np.ndarray else np.array(array)


@dataclasses.dataclass(frozen=True)
class _Maker:
    """Batch number -> images, labels and the damaged files met."""

    files: ImageFiles
    order: BatchOrder
    form: ImageForm
    augment: Augment | None
    seed: int
    is_padded: bool

    def __call__(self, batch: int) -> dict[str, Any]:
        positions, examples = self.order.rows(batch)
        size, channels = self.form.image_size, self.form.channels
        images = np.zeros((len(examples), size, size, channels), np.uint8)
        labels = np.full(len(examples), PADDING, np.int32)
        damaged: list[tuple[int, str]] = []
        for row, (position, index) in enumerate(
            zip(positions.tolist(), examples.tolist(), strict=True)
        ):
            if index == PADDING:
                continue
            used = self._decode(index, position, images[row], damaged)
            if used is not None:
                labels[row] = self.files.labels[used]
        return {"images": images, "labels": labels, "damaged": damaged}

    def _decode(
        self, index: int, position: int, out: np.ndarray, damaged: list[tuple[int, str]]
    ) -> int | None:
        """Fills a row; the file that it shows, None where there is none."""
        # Verifying all pixels at the start would take hours for a million files. The
        # next file in the list is a choice that needs no memory of what was damaged
        # before; in a test it would count twice, so there the row stays empty.
        tries = 1 if self.is_padded else len(self.files)
        for offset in range(tries):
            used = (index + offset) % len(self.files)
            data = Path(self.files.path(used)).read_bytes()
            generator = None
            if self.augment is not None:
                generator = np.random.default_rng([self.seed, position])
            try:
                out[...] = decode(data, self.form, self.augment, generator)
                return used
            except DamagedImage as error:
                damaged.append((used, str(error)))
        if self.is_padded:
            return None
        raise RuntimeError(
            f"none of the {len(self.files)} images of '{self.files.root}' can be "
            f"decoded, the last for '{damaged[-1][1]}': replace the files."
        )
