"""A real text that every Python brings: the sources of its standard library."""

import sysconfig
from pathlib import Path
from typing import NamedTuple

from sfpo_jax.training import Text, read_text, split_files


class TextDataset(NamedTuple):
    """What a language model trains on and what it is tested on."""

    name: str
    train: Text
    test: Text
    vocabulary: int  # token ids lie below it


def load_stdlib(test_share: float = 0.1, folder: str | Path = "") -> TextDataset:
    """The modules of the standard library, byte by byte, split by file.

    About 170 files and 5 MB, of the Python that runs: a number is comparable only to
    one from the same version of it. Packages, tests and installed libraries are left
    out.

    Args:
      test_share: share of the files held out, in (0, 1).
      folder: where the sources lie; empty: in the standard library of this Python.

    Raises:
      ValueError: a share out of range, or a Python without sources.
    """
    train, test = split_files(stdlib_files(folder), test_share)
    return TextDataset("stdlib", read_text(train), read_text(test), 256)


def stdlib_files(folder: str | Path = "") -> list[Path]:
    """The modules of the standard library, or of `folder`; errors as `load_stdlib`."""
    place = Path(folder or sysconfig.get_path("stdlib"))
    paths = sorted(place.glob("*.py"))
    if len(paths) < 2:
        raise ValueError(
            f"`folder` must hold Python sources, got {len(paths)} in '{place}': use a "
            "Python that is installed with its sources, or another folder."
        )
    return paths
