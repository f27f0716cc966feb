"""Windows of text: every token predicted once an epoch, exactly resumed."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sfpo_jax.training import (
    PADDING,
    TextStream,
    read_text,
    split_tokens,
    text_windows,
)

TEST: dict[str, Any] = {"shuffle": False, "epochs": 1, "remainder": "pad"}


def make(tokens: int = 50, batch_size: int = 4, **changes: Any) -> TextStream:
    arguments = {"length": 3, "batch_size": batch_size, **changes}
    return text_windows(np.arange(tokens, dtype=np.uint16), **arguments)


def take(stream: TextStream, count: int) -> np.ndarray:
    return np.stack(list(itertools.islice(stream, count)))


@settings(max_examples=15)
@given(st.integers(2, 60), st.integers(1, 7), st.booleans())
def test_every_token_is_predicted_once_an_epoch(
    tokens: int, length: int, shuffle: bool
) -> None:
    length = min(length, tokens - 1)
    arguments = {**TEST, "shuffle": shuffle, "length": length}
    with make(tokens, **arguments) as stream:
        rows = np.concatenate(list(stream))
    assert (rows.dtype, rows.shape[1]) == (np.int32, length + 1)
    rows = rows[rows[:, 0] != PADDING]
    assert (np.diff(rows, axis=1) == 1).all()
    windows = (tokens - 1) // length
    assert sorted(rows[:, 1:].ravel()) == list(range(1, windows * length + 1))


def test_a_test_comes_in_order_and_is_padded() -> None:
    with make(13, 3, **TEST) as stream:
        first, second = list(stream)
    assert stream.windows == 4
    assert first.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    assert second.tolist() == [[9, 10, 11, 12], [PADDING] * 4, [PADDING] * 4]


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_it_resumes_exactly(taken: int) -> None:
    with make(seed=3) as stream, make(seed=3) as other:
        for _ in range(taken):
            next(stream)
        state = json.loads(json.dumps(stream.get_state()))
        expected = take(stream, 6)
        other.set_state(state)
        np.testing.assert_array_equal(take(other, 6), expected)


def test_a_state_of_another_text_is_refused() -> None:
    state = make().get_state()
    with pytest.raises(ValueError, match=r"`state`.* tokens 49, got 50"):
        make(49).set_state(state)
    other = text_windows(np.arange(1, 51), length=3, batch_size=4)
    with pytest.raises(ValueError, match=r"`state` must come from a stream with text"):
        other.set_state(state)


def test_hosts_share_each_batch() -> None:
    with make(host_index=0, host_count=1) as stream:
        expected = take(stream, 5)
    parts = []
    for host in range(2):
        with make(host_index=host, host_count=2) as stream:
            parts.append(take(stream, 5))
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), expected)


def test_files_are_read_and_what_is_skipped_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello world")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    arguments = {"length": 5, "batch_size": 2, **TEST}
    with pytest.warns(UserWarning, match="1 of 2 text files skipped"):
        stream = text_windows(tmp_path, **arguments)
    assert [Path(path).name for path, _ in stream.skipped] == ["b.txt"]
    with stream:
        (rows,) = list(stream)
    assert [bytes(row.astype(np.uint8)) for row in rows] == [b"hello ", b" world"]
    with text_windows(read_text(tmp_path / "a.txt"), **arguments) as stream:
        np.testing.assert_array_equal(next(stream), rows)


def test_a_memory_mapped_file_will_do(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(20, dtype=np.int64))
    ids = np.load(tmp_path / "ids.npy", mmap_mode="r")
    with text_windows(ids, length=4, batch_size=2, **TEST) as stream:
        assert next(stream)[1].tolist() == [4, 5, 6, 7, 8]


def test_a_split_by_share_is_contiguous() -> None:
    train, test = split_tokens(np.arange(10), 0.2)
    assert (train.tolist(), test.tolist()) == (list(range(8)), [8, 9])
    assert len(split_tokens(np.arange(10), 0.999)[0]) == 1
    with pytest.raises(ValueError, match=r"`test_share` must lie in"):
        split_tokens(np.arange(10), 1.0)
    with pytest.raises(ValueError, match=r"`len\(tokens\)` must be at least 2, got 1"):
        split_tokens(np.arange(1), 0.5)


@pytest.mark.parametrize(
    ("source", "changes", "words"),
    [
        (np.arange(5), {"length": 0}, "`length` must be at least 1, got 0"),
        (np.arange(5), {"length": 5}, "`length` must be at most 4.*got 5"),
        (np.zeros(0, int), {}, "`length` must be at most 0"),
        (np.zeros(9), {}, "`source` must hold token ids.*float64"),
        (np.zeros((3, 9), int), {}, r"`source` must hold token ids.*\[3, 9\]"),
        (np.array([1, -1, 2]), {}, "`source` must hold.*got -1 to 2"),
        (np.array([1, 2**31, 2]), {}, "`source` must hold.*31 bits"),
        (np.arange(9), {"batch_size": 0}, "`batch_size` must be at least 1"),
    ],
)
def test_what_makes_no_windows_is_refused(
    source: np.ndarray, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        arguments: dict[str, Any] = {"length": 1, "batch_size": 1, **changes}
        text_windows(source, **arguments)
