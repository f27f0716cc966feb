"""Rows for BERT's pretraining: what is hidden, what follows what, and exact resumes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.bert_sections import BertData
from experiments.data.corpus import open_corpus
from experiments.data.hidden_words import pretraining_batches
from experiments.data.passages import PACKAGES, load_passages
from experiments.data.vocabulary import Vocabulary, learn_vocabulary, read_vocabulary
from sfpo_jax.training import PADDING

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LENGTH = 35  # 32 tokens and three marks


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    path = tmp_path_factory.mktemp("words") / "vocab.txt"
    path.write_text("\n".join([*SPECIAL, *(f"w{i}" for i in range(995))]))
    return read_vocabulary(path)


def rows(words: Vocabulary, tokens: np.ndarray, count: int) -> dict[str, np.ndarray]:
    made = pretraining_batches(tokens, words, batch_size=8, length=LENGTH)
    batches = [next(made) for _ in range(count)]
    return {k: np.concatenate([batch[k] for batch in batches]) for k in batches[0]}


def test_rows_are_two_parts_of_the_text_with_words_hidden(words: Vocabulary) -> None:
    # Each token is one more than that before it, so that what follows shows.
    tokens = (np.arange(32 * 60) % 995 + 5).astype(np.int32)
    made = rows(words, tokens, 60)
    is_hidden = made["labels"] != PADDING
    text = np.where(is_hidden, made["labels"], made["ids"])
    for ids, types, other in zip(text, made["types"], made["class"], strict=True):
        cut = int(np.flatnonzero(types)[0])
        assert (ids[0], ids[cut - 1], ids[-1]) == (words.cls, words.sep, words.sep)
        first, second = ids[1 : cut - 1], ids[cut:-1]
        assert min(len(first), len(second)) >= 8
        for part in (first, second):
            assert (np.diff(part) % 995 == 1).all()
        # Another place may follow by chance.
        assert other == 1 or (second[0] - first[-1]) % 995 == 1
    assert made["is_live"].all()
    assert 0.4 < made["class"].mean() < 0.6
    # 15,360 tokens, of which marks are never hidden.
    assert abs(is_hidden.mean() - 0.15 * 32 / 35) < 0.01
    shown = made["ids"][is_hidden]
    assert abs((shown == words.mask).mean() - 0.8) < 0.03
    assert abs((shown == made["labels"][is_hidden]).mean() - 0.1) < 0.03
    assert np.isin(shown[shown != words.mask], words.ordinary).all()


def test_a_stream_goes_on_where_it_was_and_ends_padded(words: Vocabulary) -> None:
    tokens = np.arange(32 * 11) % 995 + 5

    def stream(**how: Any) -> Any:
        return pretraining_batches(tokens, words, batch_size=8, length=LENGTH, **how)

    first = stream(seed=1)
    next(first)
    other = stream(seed=1)
    other.set_state(first.get_state())
    for a, b in zip(next(first).values(), next(other).values(), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match=r"hidden 0\.3, got 0\.15"):
        stream(hidden=0.3, seed=1).set_state(first.get_state())
    last = list(stream(epochs=1))[1]
    assert last["is_live"].all(axis=1).tolist() == [True] * 3 + [False] * 5
    assert (last["labels"][3:] == PADDING).all() and last["class"][3:].max() == PADDING
    # Four windows, the first of them the text's.
    assert len(list(stream(epochs=1, limit=4))) == 1


@pytest.mark.parametrize("length", [4, 500])
def test_lengths_that_cannot_be(words: Vocabulary, length: int) -> None:
    with pytest.raises(ValueError, match=f"`model.length` must be .* got {length}"):
        pretraining_batches(np.arange(400), words, batch_size=1, length=length)


def test_sources_of_many_forms(tmp_path: Path, words: Vocabulary) -> None:
    books = tmp_path / "books"
    books.mkdir()
    for i in range(10):
        (books / f"{i}.txt").write_text("all that glitters is not gold, " * 9)
    data = BertData(source=str(books))
    corpus = open_corpus(data, words)
    assert len(corpus.train) == 9 * len(corpus.test)
    # One file is split within.
    alone = open_corpus(BertData(source=str(books / "0.txt")), words)
    assert len(alone.train) + len(alone.test) == len(corpus.test)

    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join([*SPECIAL, "all", "gold"]))
    np.save(tmp_path / "ids.npy", np.array([5, 6] * 50, np.uint16))
    source = BertData(source=str(tmp_path / "ids.npy"))
    few = read_vocabulary(vocabulary)
    ids = open_corpus(source, few)
    assert isinstance(ids.train, np.memmap) and len(ids.train) == 90
    np.save(tmp_path / "ids.npy", np.array([5, 7] * 50))
    with pytest.raises(ValueError, match=r"up to 7, got 7 tokens"):
        open_corpus(source, few)

    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    column = pyarrow.table({"text": ["all gold", "gold"], "n": [1, 2]})
    parquet.write_table(column, tmp_path / "a.parquet")
    source = BertData(source=str(tmp_path / "a.parquet"), test_share=0.3)
    assert open_corpus(source, few).train.tolist() == [5, 6]
    source = BertData(source=str(tmp_path / "a.parquet"), text_column="body")
    with pytest.raises(ValueError, match=r"must have the column body, got text, n in"):
        open_corpus(source, few)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("absent.txt", None, ["must be a tokenizer.json", "where there is none"]),
        ("vocab.txt", "a\nb", ["cannot be read", "not found in the vocabulary"]),
        (
            "vocab.txt",
            "[UNK]\n[CLS]\n[SEP]",
            ["the tokens [PAD]", "without [PAD], [MA"],
        ),
        ("tokenizer.json", "{}", ["cannot be read"]),
    ],
)
def test_vocabularies_that_are_none(
    tmp_path: Path, name: str, text: str | None, words: list[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError) as error:
        read_vocabulary(tmp_path / name)
    for word in ("`data.vocabulary`", *words):
        assert word in str(error.value)


def test_an_empty_folder(tmp_path: Path, words: Vocabulary) -> None:
    with pytest.raises(ValueError, match=r"`data.source` must be stdlib, or a file"):
        open_corpus(BertData(source=str(tmp_path)), words)


def test_a_vocabulary_is_learned_and_kept(tmp_path: Path) -> None:
    learn_vocabulary(tmp_path / "v.txt", ["one two three two", "Three one one"], 30)
    words = read_vocabulary(tmp_path / "v.txt")
    assert len(words.ordinary) + 5 == words.size <= 30
    assert words.encode_all(["one"]) == [words.encode("ONE")]
    assert len(words.encode("one")) == 1


def test_passages_of_the_standard_library() -> None:
    data = load_passages(0.2)
    assert data.classes == list(PACKAGES)
    for side in (data.train, data.test):
        assert (np.bincount(side.labels, minlength=10) > 0).all()
    assert not set(data.train.texts) & set(data.test.texts)
    assert len(data.train.texts) > 4000
