"""Batches for BERT's pretraining: pairs of text parts with some words hidden.

A row is [CLS] A [SEP] B [SEP]. B follows A in half of the rows, and is from another
place in the text in the others (Devlin et al. 2019, arXiv:1810.04805, A.1). Of the
tokens a share is to be guessed: 80 % of them stand as [MASK], 10 % as some other token,
10 % as they are. All of it is drawn anew each time a window comes, from the seed and
the row's position in the stream alone.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from experiments.data.vocabulary import Vocabulary
from sfpo_jax.training import PADDING, BatchOrder, BatchStream

BertBatch = dict[str, np.ndarray]
# [CLS] and two [SEP].
_MARKS = 3
# Tokens at either end that tell one text from another.
_DIGESTED = 1 << 20


def pretraining_batches(
    tokens: np.ndarray,
    vocabulary: Vocabulary,
    *,
    batch_size: int,
    length: int,
    hidden: float = 0.15,
    seed: int = 0,
    epochs: int | None = None,
    limit: int | None = None,
) -> BatchStream[BertBatch]:
    """Streams batches of windows of a text, another order each epoch.

    Args:
      tokens: integers [n], also of a memory-mapped file.
      vocabulary: that the ids are of.
      batch_size: rows of a batch over all hosts.
      length: tokens of a row.
      hidden: share of the tokens to be guessed.
      seed: of the order and of what is hidden.
      epochs: how often each window comes; None: endless.
      limit: windows at most, taken evenly from the text; None: all.

    Returns:
      A resumable stream of this host's share: {"ids", "types", "labels": int32[b,
      length], "is_live": bool[b, length], "class": int32[b]}. Labels are PADDING where
      there is nothing to guess; class is 1 where B is from another place. The last
      batch of the last epoch is filled up with rows of PADDING.

    Raises:
      ValueError: rows too short for two parts, or a text shorter than one.
    """
    size = length - _MARKS
    if size < 2:
        raise ValueError(
            f"`model.length` must be at least {_MARKS + 2} in pretraining, got "
            f"{length}: a row holds two parts and {_MARKS} marks."
        )
    windows = len(tokens) // size
    if windows < 1:
        raise ValueError(
            f"`model.length` must be at most {len(tokens) + _MARKS}, got {length}: the "
            f"text has {len(tokens)} tokens."
        )
    chosen = min(windows, limit or windows)
    order = BatchOrder(
        chosen,
        batch_size,
        seed=seed,
        shuffle=True,
        epochs=epochs,
        remainder="pad",
        host_index=None,
        host_count=None,
    )
    maker = _Maker(tokens, vocabulary, order, length, hidden, seed, windows, chosen)
    ends = np.concatenate([tokens[:_DIGESTED], tokens[-_DIGESTED:]]).astype(np.int32)
    identity = {
        "tokens": len(tokens),
        "text": hashlib.sha256(ends.tobytes()).hexdigest()[:16],
        "batch_size": batch_size,
        "length": length,
        "hidden": hidden,
        "seed": seed,
    }
    return BatchStream(maker, order.batches, identity)


@dataclass(frozen=True)
class _Maker:
    """Batch number -> batch."""

    tokens: np.ndarray
    vocabulary: Vocabulary
    order: BatchOrder
    length: int
    hidden: float
    seed: int
    windows: int
    chosen: int

    def __call__(self, number: int) -> BertBatch:
        positions, examples = self.order.rows(number)
        shape = (len(positions), self.length)
        batch = {
            "ids": np.full(shape, self.vocabulary.pad, np.int32),
            "types": np.zeros(shape, np.int32),
            "labels": np.full(shape, PADDING, np.int32),
            "is_live": np.zeros(shape, np.bool_),
            "class": np.full(shape[0], PADDING, np.int32),
        }
        places = zip(positions.tolist(), examples.tolist(), strict=True)
        for row, (position, example) in enumerate(places):
            if example != PADDING:
                window = example * self.windows // self.chosen
                self._fill(
                    {k: v[row : row + 1] for k, v in batch.items()}, position, window
                )
        return batch

    def _fill(self, row: BertBatch, position: int, window: int) -> None:
        """Makes one row, of arrays that are led by an axis of 1."""
        rng = np.random.default_rng((self.seed, position))
        words, size = self.vocabulary, self.length - _MARKS
        text = np.array(self.tokens[window * size : (window + 1) * size], np.int32)
        cut = int(rng.integers(max(1, size // 4), size - size // 4))
        is_other = bool(rng.random() < 0.5)
        if is_other:
            start = int(rng.integers(0, len(self.tokens) - (size - cut) + 1))
            text[cut:] = self.tokens[start : start + size - cut]
        ids = np.concatenate(
            [[words.cls], text[:cut], [words.sep], text[cut:], [words.sep]]
        ).astype(np.int32)
        can_hide = np.ones(self.length, np.bool_)
        can_hide[[0, cut + 1, -1]] = False
        is_hidden = can_hide & (rng.random(self.length) < self.hidden)
        how = rng.random(self.length)
        others = rng.choice(words.ordinary, self.length)
        row["labels"][0] = np.where(is_hidden, ids, PADDING)
        ids = np.where(is_hidden & (how < 0.8), words.mask, ids)
        row["ids"][0] = np.where(is_hidden & (how >= 0.9), others, ids)
        row["types"][0, cut + 2 :] = 1
        row["is_live"][0] = True
        row["class"][0] = is_other
