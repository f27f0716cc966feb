"""Labelled texts in memory: tables of text and label, split class by class."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.bert_sections import BertData
from experiments.data.hidden_words import BertBatch
from experiments.data.tables import read_columns
from experiments.data.vocabulary import Vocabulary
from sfpo_jax.training import PADDING, BatchOrder, BatchStream

# Of the split alone; the seed of a run must not move examples into the test.
_SPLIT_SEED = 0


class LabelledTexts(NamedTuple):
    """Texts with their labels."""

    texts: list[str]
    labels: np.ndarray  # int32[n], from 0


class TextDataset(NamedTuple):
    """What a classifier trains on and what it is tested on."""

    name: str
    train: LabelledTexts
    test: LabelledTexts
    classes: list[str]  # a label is an index into it


def load_labelled(data: BertData) -> TextDataset:
    """Reads a table of texts and splits it class by class; deterministic.

    Classes are the values of the column of labels, in their order.

    Raises:
      ValueError: a file that cannot be used, fewer than two classes, or a class with a
        single text.
    """
    path = Path(data.source)
    columns = read_columns(path, [data.text_column, data.label_column])
    texts, named = [str(x) for x in columns[0]], [str(x) for x in columns[1]]
    classes = sorted(set(named))
    if len(classes) < 2:
        seen = f"all are {classes[0]}" if classes else "there are no rows"
        raise ValueError(
            f"`data.source` must hold two classes at least, got {len(classes)} in "
            f"'{path}': {seen}, and there is nothing to tell apart."
        )
    return split_classes(path.stem, classes, texts, named, data.test_share)


def split_classes(
    name: str, classes: list[str], texts: list[str], named: list[str], test_share: float
) -> TextDataset:
    """Holds out the same share of every class; deterministic.

    Args:
      name: of the data.
      classes: the names of the classes.
      texts: the texts.
      named: the class of each.
      test_share: in (0, 1); each class gives at least one text to either side.

    Raises:
      ValueError: a class with fewer than two texts.
    """
    places = {name: place for place, name in enumerate(classes)}
    labels = np.array([places[label] for label in named], np.int32)
    generator = np.random.default_rng(_SPLIT_SEED)
    held = np.zeros(len(labels), np.bool_)
    for label, known in enumerate(classes):
        own = generator.permutation(np.flatnonzero(labels == label))
        if len(own) < 2:
            raise ValueError(
                f"`data.source` must hold each class twice at least, got '{known}' "
                f"{len(own)} times in '{name}': it cannot be trained on and tested."
            )
        count = min(max(1, round(test_share * len(own))), len(own) - 1)
        held[own[:count]] = True

    def part(is_chosen: np.ndarray) -> LabelledTexts:
        chosen = np.flatnonzero(is_chosen)
        return LabelledTexts([texts[i] for i in chosen.tolist()], labels[chosen])

    return TextDataset(name, part(~held), part(held), classes)


def classification_batches(
    examples: LabelledTexts,
    vocabulary: Vocabulary,
    *,
    batch_size: int,
    length: int,
    seed: int = 0,
    shuffle: bool = True,
    epochs: int | None = None,
) -> BatchStream[BertBatch]:
    """Streams batches of [CLS] text [SEP], cut to `length`, then padding.

    Returns:
      A resumable stream of this host's share: {"ids", "types": int32[b, length],
      "is_live": bool[b, length], "class": int32[b]}. The last batch of the last epoch
      is filled up with rows of class PADDING.
    """
    encoded = vocabulary.encode_all(examples.texts)
    ids = np.full((len(encoded), length), vocabulary.pad, np.int32)
    counts = np.zeros(len(encoded), np.int32)
    for row, text in enumerate(encoded):
        marked = [vocabulary.cls, *text[: length - 2], vocabulary.sep]
        ids[row, : len(marked)], counts[row] = marked, len(marked)
    order = BatchOrder(
        len(ids),
        batch_size,
        seed=seed,
        shuffle=shuffle,
        epochs=epochs,
        remainder="pad",
        host_index=None,
        host_count=None,
    )
    identity = {
        "texts": len(ids),
        "ids": hashlib.sha256(ids.tobytes()).hexdigest()[:16],
        "batch_size": batch_size,
        "seed": seed,
        "shuffle": shuffle,
    }
    maker = _Maker(ids, counts, examples.labels, order)
    return BatchStream(maker, order.batches, identity)


@dataclass(frozen=True)
class _Maker:
    """Batch number -> batch."""

    ids: np.ndarray
    counts: np.ndarray
    labels: np.ndarray
    order: BatchOrder

    def __call__(self, number: int) -> BertBatch:
        _, examples = self.order.rows(number)
        is_real = examples != PADDING
        chosen = np.where(is_real, examples, 0)
        counts = np.where(is_real, self.counts[chosen], 0)
        ids = np.where(is_real[:, None], self.ids[chosen], 0)
        return {
            "ids": ids,
            "types": np.zeros_like(ids),
            "is_live": np.arange(ids.shape[1])[None] < counts[:, None],
            "class": np.where(is_real, self.labels[chosen], PADDING).astype(np.int32),
        }
