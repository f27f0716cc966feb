"""WordPiece vocabularies (Wu et al. 2016, arXiv:1609.08144): text to token ids.

The arithmetic is that of the library `tokenizers`; a vocabulary is a file in one of the
two forms in which published models bring it, or is learned from the training text.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_FILES = ("tokenizer.json", "vocab.txt")


class Vocabulary:
    """A tokenizer with BERT's five special tokens.

    Args:
      tokenizer: of the library `tokenizers`.
      source: what it comes from, for errors.

    Attributes:
      size: token ids lie below it.
      ordinary: int32[n], the ids that are no special token.
      pad, cls, sep, mask: ids.

    Raises:
      ValueError: one of the special tokens is missing.
    """

    def __init__(self, tokenizer: Any, source: str) -> None:
        # Files of published models may cut and fill up what they encode.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        ids = {name: tokenizer.token_to_id(name) for name in _SPECIAL}
        if missing := [name for name, place in ids.items() if place is None]:
            raise ValueError(
                f"`data.vocabulary` must have the tokens {', '.join(_SPECIAL)}, got "
                f"'{source}' without {', '.join(missing)}: take a vocabulary of BERT's."
            )
        self.size: int = tokenizer.get_vocab_size()
        special = set(ids.values())
        self.ordinary = np.array(
            [i for i in range(self.size) if i not in special], np.int32
        )
        self.pad, self.cls, self.sep, self.mask = (
            ids[name] for name in ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
        )

    def encode(self, text: str) -> list[int]:
        """Ids of a text, none of them special but for unknown pieces."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in found]


def read_vocabulary(path: str | Path) -> Vocabulary:
    """Reads a tokenizer.json or a vocab.txt (uncased), or the folder of one.

    Raises:
      ValueError: no such file, or one that is no vocabulary.
    """
    path = Path(path)
    found = path
    if path.is_dir():
        found = next((path / n for n in _FILES if (path / n).exists()), path)
    if not found.is_file():
        raise ValueError(
            f"`data.vocabulary` must be a tokenizer.json, a vocab.txt, a folder of "
            f"one, or train, got '{path}', where there is none."
        )
    library = _library()
    try:
        if found.suffix == ".json":
            tokenizer = library.Tokenizer.from_file(str(found))
        else:
            tokenizer = library.BertWordPieceTokenizer(str(found), lowercase=True)
    except Exception as error:  # the library raises bare exceptions
        reason = " ".join(str(error).split())
        raise ValueError(
            f"`data.vocabulary` cannot be read, got '{found}': {reason}."
        ) from None
    return Vocabulary(tokenizer, str(found))


def train_vocabulary(texts: Iterable[str], size: int) -> Vocabulary:
    """Learns the pieces of a text, in lower case.

    Args:
      texts: in an order of their own, which the result depends on where pieces are
        equally frequent.
      size: pieces at most, the special tokens included.
    """
    tokenizer = _library().BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(
        texts, vocab_size=size, show_progress=False, special_tokens=list(_SPECIAL)
    )
    return Vocabulary(tokenizer, "the training text")


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ValueError(
            "`data.vocabulary` needs the package tokenizers, which is not installed: "
            "pip install 'sfpo_jax[experiments]'."
        ) from None
    return tokenizers
