"""WordPiece vocabularies (Wu et al. 2016, arXiv:1609.08144): text to token ids.

    python -m experiments.data.vocabulary words.txt 8192 books/*.txt

The arithmetic is that of the library `tokenizers`; a vocabulary is a file in one of the
two forms in which published models bring it. The command learns one of so many pieces
from files of text. It may learn another one the next time, since the library does not
settle ties: keep the file. `stdlib_vocab.txt` was learned from Python's library.
"""

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_FILES = ("tokenizer.json", "vocab.txt")
# Learned from the modules of the standard library of Python 3.11.
STDLIB = Path(__file__).with_name("stdlib_vocab.txt")


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
            "`data.vocabulary` must be a tokenizer.json, a vocab.txt, or a folder of "
            f"one, got '{path}', where there is none."
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


def learn_vocabulary(path: str | Path, texts: Iterable[str], size: int) -> None:
    """Learns the pieces of texts, in lower case, and writes them as a vocab.txt.

    Args:
      path: of the file.
      texts: what they are learned from.
      size: pieces at most, the special tokens included.
    """
    tokenizer = _library().BertWordPieceTokenizer(lowercase=True)
    tokenizer.train_from_iterator(
        texts, vocab_size=size, show_progress=False, special_tokens=list(_SPECIAL)
    )
    ids = tokenizer.get_vocab()
    text = "\n".join(sorted(ids, key=ids.__getitem__)) + "\n"
    Path(path).write_text(text, encoding="utf-8")


def main(argv: Sequence[str]) -> int:
    """Runs the command: a file to write, its pieces, and files of text."""
    if len(argv) < 3 or not argv[1].isdigit():
        sys.stderr.write(f"{__doc__}")
        return 2
    files = [Path(name) for name in argv[2:]]
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in files)
    learn_vocabulary(argv[0], texts, int(argv[1]))
    return 0


def _library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ValueError(
            "`data.vocabulary` needs the package tokenizers, which is not installed: "
            "pip install 'sfpo_jax[experiments]'."
        ) from None
    return tokenizers


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
