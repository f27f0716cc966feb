"""Batches of windows of text, for models that predict the next token.

Window i holds the tokens from i * length to (i + 1) * length inclusive: consecutive
windows share one token, so that each is predicted exactly once an epoch.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from sfpo_jax._validate import check_at_least
from sfpo_jax.training._batch_order import PADDING, BatchOrder, Remainder
from sfpo_jax.training._batch_stream import BatchStream
from sfpo_jax.training._skipped import Skipped
from sfpo_jax.training._text_files import (
    Source,
    Text,
    Tokenize,
    check_share,
    read_text,
)

# Tokens at either end that tell one text from another.
_DIGESTED = 1 << 20


class TextStream(BatchStream[np.ndarray]):
    """The iterator that `text_windows` makes.

    Attributes:
      windows: how many there are in an epoch.
      skipped: (path, reason) of each file not used.
    """

    def __init__(
        self,
        maker: "_Maker",
        order: BatchOrder,
        identity: dict[str, int | bool | str],
        windows: int,
        skipped: tuple[Skipped, ...],
    ) -> None:
        # A batch is a few slices: no process could hand it over as fast.
        super().__init__(maker, order.batches, identity, workers=0)
        self.windows = windows
        self.skipped = list(skipped)


def text_windows(
    source: Source | Text | np.ndarray,
    *,
    batch_size: int,
    length: int,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = None,
    remainder: Remainder = "drop",
    tokenize: Tokenize | None = None,
    host_index: int | None = None,
    host_count: int | None = None,
) -> TextStream:
    """Streams windows of `length` tokens and the one that follows.

    For training, keep the defaults. For a test, `shuffle=False, epochs=1,
    remainder="pad"`: every window once, in order.

    Args:
      source: what `read_text` takes or returns, or token ids from 0, integers [n], for
        example of a memory-mapped file.
      batch_size: windows of a batch over all hosts.
      length: tokens that a model reads; a window has one more.
      seed: of the order.
      shuffle: another order each epoch, rather than that of the text.
      epochs: how often each window comes; None: endless.
      remainder: what becomes of the last windows that fill no batch: "drop" leaves them
        out, "pad" adds rows of PADDING (-1).
      tokenize: as in `read_text`, where there are files to be read.
      host_index: whose share of each batch to read; None: this JAX process's.
      host_count: number of shares; None: the number of JAX processes.

    Returns:
      An iterator of int32[b, length + 1] with b = batch_size / host_count; inputs are
      `[:, :-1]`, targets `[:, 1:]`. `get_state` and `set_state` resume exactly.

    Raises:
      ValueError: a text shorter than one window, ids that are none, or a value out of
        range.

    Example:
      >>> batches = text_windows(
      ...     np.arange(9), batch_size=2, length=4, shuffle=False, epochs=1
      ... )
      >>> next(batches)
      array([[0, 1, 2, 3, 4],
             [4, 5, 6, 7, 8]], dtype=int32)
    """
    check_at_least("length", length, 1, "the tokens of a window")
    tokens, skipped = _tokens(source, tokenize)
    windows = (len(tokens) - 1) // length
    if windows < 1:
        raise ValueError(
            f"`length` must be at most {max(0, len(tokens) - 1)}, one less than the "
            f"tokens of `source`, got {length}: take shorter windows or more text."
        )
    order = BatchOrder(
        windows,
        batch_size,
        seed=seed,
        shuffle=shuffle,
        epochs=epochs,
        remainder=remainder,
        host_index=host_index,
        host_count=host_count,
    )
    identity = {
        "tokens": len(tokens),
        "text": _digest(tokens),
        "batch_size": batch_size,
        "length": length,
        "seed": seed,
        "shuffle": shuffle,
    }
    maker = _Maker(tokens, order, length)
    return TextStream(maker, order, identity, windows, skipped)


def split_tokens(
    tokens: np.ndarray, test_share: float
) -> tuple[np.ndarray, np.ndarray]:
    """Holds out the last share of a text.

    Args:
      tokens: integers [n], n >= 2.
      test_share: in (0, 1); at least one token comes to either side.

    Returns:
      (train, test), views of `tokens`.

    Raises:
      ValueError: a share out of range, or fewer than two tokens.

    Example:
      >>> split_tokens(np.arange(5), 0.4)
      (array([0, 1, 2]), array([3, 4]))
    """
    check_share(test_share)
    check_at_least("len(tokens)", len(tokens), 2, "one for each side at least")
    held = min(max(1, round(test_share * len(tokens))), len(tokens) - 1)
    return tokens[:-held], tokens[-held:]


@dataclass(frozen=True)
class _Maker:
    """Batch number -> windows."""

    tokens: np.ndarray
    order: BatchOrder
    length: int

    def __call__(self, batch: int) -> np.ndarray:
        _, windows = self.order.rows(batch)
        made = np.full((len(windows), self.length + 1), PADDING, np.int32)
        for row, window in zip(made, windows.tolist(), strict=True):
            if window != PADDING:
                start = window * self.length
                row[:] = self.tokens[start : start + self.length + 1]
        return made


def _tokens(
    source: Source | Text | np.ndarray, tokenize: Tokenize | None
) -> tuple[np.ndarray, tuple[Skipped, ...]]:
    if isinstance(source, Text):
        return source.tokens, source.skipped
    if not isinstance(source, np.ndarray):
        text = read_text(source, tokenize=tokenize)
        return text.tokens, text.skipped
    if source.ndim != 1 or source.dtype.kind not in "iu":
        raise ValueError(
            "`source` must hold token ids, integers [n], got "
            f"{source.dtype} {list(source.shape)}."
        )
    # One pass over the ids at the start, rather than one that wraps round on the way.
    is_safe = source.dtype in (np.uint8, np.uint16)
    if source.size and not is_safe and (source.min() < 0 or source.max() >= 2**31):
        raise ValueError(
            "`source` must hold token ids from 0 that fit 31 bits, got "
            f"{source.min()} to {source.max()}."
        )
    return source, ()


def _digest(tokens: np.ndarray) -> str:
    ends = np.concatenate([tokens[:_DIGESTED], tokens[-_DIGESTED:]]).astype(np.int32)
    return hashlib.sha256(ends.tobytes()).hexdigest()[:16]
