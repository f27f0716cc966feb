"""Text for pretraining: many forms of it as token ids, split.

Files of text and of Parquet are read and encoded at the start, a batch of rows at a
time; token ids in an .npy file stay on the disk and are read window by window, so that
they may be larger than the memory.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.bert_sections import BertData
from experiments.data.tables import parquet_column
from experiments.data.text import stdlib_files
from experiments.data.vocabulary import Vocabulary
from sfpo_jax.training import split_files, split_tokens


class Corpus(NamedTuple):
    """What a model is pretrained on and what it is tested on."""

    name: str
    train: np.ndarray  # token ids, integers [n]
    test: np.ndarray


def open_corpus(data: BertData, words: Vocabulary) -> Corpus:
    """Reads the text of a run.

    Args:
      data: its `source`, `text_column` and `test_share` are meant.
      words: the vocabulary.

    Raises:
      ValueError: a source without text, or token ids of another vocabulary.
    """
    source = Path(data.source)
    if source.suffix == ".npy":
        return _token_file(source, words, data.test_share)
    name = data.source if data.source == "stdlib" else source.stem
    files = _files(data.source)
    train, test = files, files
    if len(files) > 1:
        train, test = split_files(files, data.test_share)

    def texts(files: list[Path]) -> Iterator[str]:
        for file in files:
            if file.suffix == ".parquet":
                yield from parquet_column(file, data.text_column)
            else:
                yield file.read_text(encoding="utf-8", errors="replace")

    def encoded(files: list[Path]) -> np.ndarray:
        parts = [np.array(words.encode(text), np.int32) for text in texts(files)]
        tokens = np.concatenate([np.zeros(0, np.int32), *parts])
        if not tokens.size:
            raise ValueError(
                f"`data.source` must hold text, got none in '{data.source}'."
            )
        return tokens

    if len(files) > 1:
        return Corpus(name, encoded(train), encoded(test))
    return Corpus(name, *split_tokens(encoded(files), data.test_share))


def _files(source: str) -> list[Path]:
    """The files of text or Parquet that a source names, hidden ones left out."""
    if source == "stdlib":
        return stdlib_files()
    path = Path(source)
    if path.is_file():
        return [path]
    found = sorted(p for p in path.rglob("*") if p.is_file())
    found = [p for p in found if not any(x.startswith(".") for x in p.parts)]
    if not found:
        raise ValueError(
            f"`data.source` must be stdlib, or a file or folder of text, of Parquet or "
            f"of token ids (.npy), got '{source}', where there is none."
        )
    return found


def _token_file(path: Path, words: Vocabulary, test_share: float) -> Corpus:
    try:
        tokens = np.load(path, mmap_mode="r")
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"`data.source` cannot be read, got '{path}': {reason}"
        ) from None
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or len(tokens) < 2:
        raise ValueError(
            "`data.source` must hold token ids, integers [n], got "
            f"{tokens.dtype} {list(tokens.shape)} in '{path}'."
        )
    if (highest := int(tokens.max())) >= words.size:
        raise ValueError(
            f"`data.vocabulary` must have the ids of `data.source`, up to {highest}, "
            f"got {words.size} tokens: it is not the one that '{path}' was made with."
        )
    return Corpus(path.stem, *split_tokens(tokens, test_share))
