"""Tables of labelled texts: split by class, batches padded, errors in one line."""

import tarfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from experiments.bert_sections import BertData
from experiments.data.labelled_text import classification_batches, load_labelled
from experiments.data.packages import write_reviews
from experiments.data.vocabulary import read_vocabulary
from sfpo_jax.training import PADDING

ROWS = [("good", f'a "fine" film {i}') for i in range(8)]
ROWS += [("bad", f"a dull film, {i}") for i in range(12)]


def table(path: Path, rows: list[tuple[str, str]] = ROWS) -> BertData:
    lines = ["label\ttext", *("\t".join(row) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return BertData(source=str(path), test_share=0.25)


def test_a_table_is_split_class_by_class(tmp_path: Path) -> None:
    data = load_labelled(table(tmp_path / "films.tsv"))
    assert (data.name, data.classes) == ("films", ["bad", "good"])
    assert np.bincount(data.train.labels).tolist() == [9, 6]
    assert np.bincount(data.test.labels).tolist() == [3, 2]
    texts = data.train.texts + data.test.texts
    assert sorted(texts) == sorted(text for _, text in ROWS)
    assert load_labelled(table(tmp_path / "films.tsv")).test.texts == data.test.texts
    # Commas and quotes as CSV has them.
    path = tmp_path / "films.csv"
    path.write_text('text,label\n"a, ""b""",1\nc,1\nd,0\ne,0\n')
    csv = load_labelled(BertData(source=str(path), test_share=0.5))
    assert 'a, "b"' in csv.train.texts + csv.test.texts


def test_batches_are_cut_and_padded(tmp_path: Path) -> None:
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (tmp_path / "vocab.txt").write_text("\n".join([*marks, "a", "dull", "film"]))
    words = read_vocabulary(tmp_path)
    data = load_labelled(table(tmp_path / "films.tsv"))
    stream = classification_batches(
        data.test, words, batch_size=4, length=6, shuffle=False, epochs=1
    )
    first, last = list(stream)
    dull = data.test.texts.index(next(t for t in data.test.texts if "dull" in t))
    # "a dull film, 3": the comma and what comes after it is unknown.
    assert first["ids"][dull].tolist() == [2, 5, 6, 7, 1, 3]
    assert last["class"].tolist() == [data.test.labels[4], *[PADDING] * 3]
    assert last["is_live"].sum(axis=1).tolist() == [6, 0, 0, 0]
    longer = classification_batches(data.test, words, batch_size=5, length=16)
    assert next(longer)["is_live"].sum(axis=1).max() < 16


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.tsv", "label\ttext\n1\tx\n1\ty\n", ["two classes", "got 1", "all are 1"]),
        ("a.tsv", "label\ttext\n", ["two classes", "got 0", "no rows"]),
        ("a.tsv", "label\ttext\n1\tx\n1\ty\n0\tz\n", ["'0' 1 times"]),
        ("a.tsv", "label\ttext\n1\tx\n0\n", ["fewer in line 3"]),
        ("a.tsv", "y\ttext\n1\tx\n", ["the column label", "y, text", "label_column"]),
        ("a.csv", "", ["the column text", "got none"]),
        ("a.xls", "", [".tsv, .csv or .parquet", "a.xls"]),
        ("a.tsv", None, ["cannot be read", "No such file"]),
    ],
)
def test_tables_that_cannot_be_used(
    tmp_path: Path, name: str, text: str | None, words: list[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ValueError) as error:
        load_labelled(BertData(source=str(tmp_path / name)))
    for word in ("`data.source`", *words):
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_film_reviews_lie_in_an_archive_inside_an_archive(tmp_path: Path) -> None:
    def pack(name: str, content: bytes) -> bytes:
        made = BytesIO()
        with tarfile.open(fileobj=made, mode="w:gz") as archive:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, BytesIO(content))
        return made.getvalue()

    lines = b"1\t2.25\tFine.\r\n2\t-0.5\tDull. \r\n3\t0.0\tNeither.\r\n"
    folder = "hutto_ICWSM_2014"
    inner = pack(f"{folder}/movieReviewSnippets_GroundTruth.txt", lines)
    path = tmp_path / "vaderSentiment.tar.gz"
    path.write_bytes(pack(f"vaderSentiment/{folder}.tar.gz", inner))
    assert write_reviews(path, tmp_path / "data" / "movies.tsv") == 2
    assert (tmp_path / "data" / "movies.tsv").read_text().splitlines() == [
        "label\tscore\ttext",
        "positive\t2.250\tFine.",
        "negative\t-0.500\tDull.",
    ]
