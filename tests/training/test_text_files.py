"""Text files to tokens: in order, and without those that are no text."""

from pathlib import Path

import numpy as np
import pytest

from sfpo_jax.training import read_text, split_files


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", b"two\r\n")
    write(tmp_path / "a.py", "ä".encode())
    write(tmp_path / "sub/0.txt", b"three")
    write(tmp_path / ".git/config", b"hidden")
    write(tmp_path / "empty", b"")
    text = read_text(tmp_path)
    assert text.tokens.dtype == np.uint8
    assert text.tokens.tobytes() == "ätwo\r\nthree".encode()
    names = [Path(path).name for path in text.files]
    assert names == ["a.py", "b.txt", "empty", "0.txt"]
    assert text.skipped == ()


def test_a_file_and_a_list_of_files(tmp_path: Path) -> None:
    first, second = write(tmp_path / "1", b"one"), write(tmp_path / "2", b"two")
    assert read_text(first).tokens.tobytes() == b"one"
    assert read_text(str(first)).tokens.tobytes() == b"one"
    assert read_text([second, first]).tokens.tobytes() == b"twoone"


def test_what_is_no_text_is_skipped_and_named(tmp_path: Path) -> None:
    good = write(tmp_path / "good.txt", b"good")
    latin = write(tmp_path / "latin.txt", b"caf\xe9")
    with pytest.warns(UserWarning) as caught:
        text = read_text([latin, good, tmp_path / "absent"])
    assert text.tokens.tobytes() == b"good"
    assert text.files == (str(good),)
    assert text.skipped == (
        (str(latin), "not UTF-8 at byte 3"),
        (str(tmp_path / "absent"), "No such file or directory"),
    )
    (warning,) = caught
    assert f"2 of 3 text files skipped ({latin}: not UTF-8" in str(warning.message)


def test_any_tokenizer_will_do(tmp_path: Path) -> None:
    paths = [write(tmp_path / "1", b"a b"), write(tmp_path / "2", b"")]
    text = read_text(paths, tokenize=lambda text: [len(w) for w in text.split()])
    assert text.tokens.dtype == np.int32
    assert text.tokens.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ([0.5], r"sequence of integers, got float64 \[1\]"),
        ([[1, 2]], r"sequence of integers, got int64 \[1, 2\]"),
        ([3, -1], "ids from 0.*got -1 to 3"),
        ([2**31], "31 bits"),
    ],
)
def test_a_tokenizer_that_returns_no_ids(
    tmp_path: Path, returned: list, words: str
) -> None:
    path = write(tmp_path / "1", b"text")
    with pytest.raises(ValueError, match=f"`tokenize` must return.*{words}"):
        read_text(path, tokenize=lambda text: np.array(returned))


def test_a_source_without_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`source` must be a file.*absent"):
        read_text(tmp_path / "absent")
    with pytest.raises(ValueError, match=r"`source` must hold text, got none"):
        read_text(tmp_path)
    write(tmp_path / "binary", b"\xff")
    with pytest.raises(ValueError, match=r"`source`.*binary: not UTF-8 at byte 0"):
        read_text(tmp_path)


def test_a_split_by_file_is_a_partition() -> None:
    paths = [f"{i}.txt" for i in range(40)]
    train, test = split_files(paths, 0.2)
    assert (len(train), len(test)) == (32, 8)
    assert sorted(train + test, key=paths.index) == paths
    assert split_files(paths, 0.2) == (train, test)
    assert len(split_files(paths, 0.001)[1]) == len(split_files(paths, 0.999)[0]) == 1


def test_a_split_that_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`paths` must name two files.*got 1"):
        split_files(["a"], 0.5)
    with pytest.raises(ValueError, match=r"`test_share` must lie in \(0, 1\), got 0"):
        split_files(["a", "b"], 0.0)
