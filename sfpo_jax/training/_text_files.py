"""Text files as one long array of token ids."""

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np

from sfpo_jax._validate import check_range
from sfpo_jax.training._skipped import Skipped, listing

# Of the split alone; the seed of a run must not move files into the test.
_SPLIT_SEED = 0

Tokenize = Callable[[str], Sequence[int] | np.ndarray]
Source = str | Path | Sequence[str] | Sequence[Path]
P = TypeVar("P", str, Path)


class Text(NamedTuple):
    """Texts one after the other."""

    tokens: np.ndarray  # uint8[n] for bytes, int32[n] from a tokenizer
    files: tuple[str, ...]  # in the order of their tokens
    skipped: tuple[Skipped, ...]  # (path, reason) of each file not used


def read_text(source: Source, *, tokenize: Tokenize | None = None) -> Text:
    """Reads UTF-8 files into one array.

    Nothing is put between two files: where the model should see the border, let
    `tokenize` end each text with a token of its own.

    Args:
      source: a file, a folder (every file in it, however deep, in the order of the
        names; hidden ones are passed over), or paths of files.
      tokenize: text of a file -> token ids from 0; None: its bytes, a vocabulary of
        256.

    Returns:
      The tokens. Files that cannot be read or are not UTF-8 are named in `skipped`, and
      in one warning.

    Raises:
      ValueError: a source without text, or a tokenizer that returns anything but ids.

    Example:
      >>> import tempfile
      >>> path = Path(tempfile.mkdtemp(), "a.txt")
      >>> _ = path.write_text("hé", encoding="utf-8")
      >>> read_text(path).tokens
      array([104, 195, 169], dtype=uint8)
      >>> read_text(path, tokenize=lambda text: [ord(c) for c in text]).tokens
      array([104, 233], dtype=int32)
    """
    parts: list[np.ndarray] = []
    used: list[str] = []
    skipped: list[Skipped] = []
    for path in _paths(source):
        try:
            text = Path(path).read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            skipped.append((path, f"not UTF-8 at byte {error.start}"))
        except OSError as error:
            skipped.append((path, error.strerror or str(error)))
        else:
            parts.append(_ids(tokenize(text), path) if tokenize else _bytes(text))
            used.append(path)
    if not sum(map(len, parts)):
        seen = f": {listing(skipped)}" if skipped else ""
        raise ValueError(f"`source` must hold text, got none in '{source}'{seen}.")
    if skipped:
        total = len(used) + len(skipped)
        warnings.warn(
            f"{len(skipped)} of {total} text files skipped ({listing(skipped)})",
            stacklevel=2,
        )
    return Text(np.concatenate(parts), tuple(used), tuple(skipped))


def split_files(paths: Sequence[P], test_share: float) -> tuple[list[P], list[P]]:
    """Holds out a share of the files; depends on their number alone.

    Args:
      paths: two at least.
      test_share: in (0, 1); at least one file comes to either side.

    Returns:
      (train, test), each in the order given.

    Raises:
      ValueError: a share out of range, or fewer than two files.

    Example:
      >>> train, test = split_files(["a", "b", "c", "d"], 0.25)
      >>> len(train), len(test)
      (3, 1)
    """
    check_share(test_share)
    if len(paths) < 2:
        raise ValueError(
            f"`paths` must name two files at least to be split, got {len(paths)}: "
            "split the tokens of a single one."
        )
    order = np.random.default_rng(_SPLIT_SEED).permutation(len(paths))
    held = min(max(1, round(test_share * len(paths))), len(paths) - 1)
    test = set(order[:held].tolist())
    return (
        [path for i, path in enumerate(paths) if i not in test],
        [path for i, path in enumerate(paths) if i in test],
    )


def check_share(test_share: float) -> None:
    """Raises ValueError unless a share lies in (0, 1)."""
    check_range(
        "test_share",
        test_share,
        0.0,
        1.0,
        "the share that is held out",
        open_low=True,
        open_high=True,
    )


def _paths(source: Source) -> list[str]:
    if not isinstance(source, (str, Path)):
        return [os.fspath(path) for path in source]
    if not os.path.exists(source):
        raise ValueError(
            f"`source` must be a file, a folder or paths of files, got '{source}': "
            "there is none."
        )
    if not os.path.isdir(source):
        return [os.fspath(source)]
    found = []
    for place, folders, files in os.walk(source):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        visible = sorted(f for f in files if not f.startswith("."))
        found += [os.path.join(place, name) for name in visible]
    return found


def _bytes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-8"), np.uint8)


def _ids(tokens: Sequence[int] | np.ndarray, path: str) -> np.ndarray:
    """Token ids as int32; an empty text has none."""
    ids = np.asarray(tokens)
    if not ids.size:
        return np.zeros(0, np.int32)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise ValueError(
            "`tokenize` must return a sequence of integers, got "
            f"{ids.dtype} {list(ids.shape)} for '{path}'."
        )
    if ids.min() < 0 or ids.max() >= 2**31:
        raise ValueError(
            "`tokenize` must return ids from 0 that fit 31 bits, got "
            f"{ids.min()} to {ids.max()} for '{path}'."
        )
    return ids.astype(np.int32)
