"""The default text: the sources that every Python brings, split by file."""

from pathlib import Path

import pytest

from experiments.data.text import load_stdlib
from sfpo_jax.training import text_windows


def test_the_standard_library_is_a_text() -> None:
    data = load_stdlib()
    assert len(data.train.tokens) + len(data.test.tokens) > 2_000_000
    assert 0.05 < len(data.test.files) / len(data.train.files) < 0.2
    assert not set(data.train.files) & set(data.test.files)
    assert (data.name, data.vocabulary) == ("stdlib", 256)
    assert b"def " in data.test.tokens.tobytes()
    with text_windows(data.train, batch_size=2, length=64) as batches:
        assert next(batches).max() < data.vocabulary


def test_the_split_is_the_same_each_time() -> None:
    assert load_stdlib(0.3).test.files == load_stdlib(0.3).test.files


def test_a_python_without_sources(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`folder` must hold Python sources, got 0"):
        load_stdlib(folder=tmp_path)
