"""Lines that survive a stop, and scalars for TensorBoard."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sfpo_jax.training import JsonLines, TensorBoard, check_tensorboard


def test_no_step_twice_after_going_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    for step in range(1, 6):
        lines.write({"step": step, "loss": 1 / step})
    text = path.read_text()
    path.write_text(text + '{"step": 6, "lo')

    lines = JsonLines(path)
    assert path.read_text() == text
    lines.rewind(lambda record: record["step"] <= 3)
    assert [r["step"] for r in lines.read()] == [1, 2, 3]
    lines.write({"step": 4, "loss": 0.25})
    assert path.read_text() == "".join(text.splitlines(keepends=True)[:4])
    # Exact: what was measured is what is read.
    assert lines.read()[2] == {"step": 3, "loss": 1 / 3}


def test_each_line_is_there_at_once(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    assert lines.read() == []
    lines.rewind(lambda record: False)
    assert not lines.path.exists()
    lines.write({"step": 1, "loss": float("inf"), "name": "é"})
    assert lines.path.read_text() == '{"step": 1, "loss": null, "name": "\\u00e9"}\n'
    # A line spoiled by a disk that was full is passed over.
    with lines.path.open("ab") as file:
        file.write(b'\x00\x00\n[1]\n{"step": 2}\n')
    assert [r["step"] for r in lines.read()] == [1, 2]


def test_tensorboard_missing_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_tensorboard(False)
    with pytest.raises(ValueError, match=r"`train.tensorboard` needs .*pip install"):
        check_tensorboard(True)


def test_tensorboard_gets_the_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[Any, ...]] = []

    class SummaryWriter:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            calls.append((folder, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            calls.append((name, value, step))

        def flush(self) -> None:
            calls.append(("flush",))

        def close(self) -> None:
            calls.append(("close",))

    fake = ModuleType("tensorboardX")
    fake.SummaryWriter = SummaryWriter  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "tensorboardX", fake)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: fake)
    board = TensorBoard(tmp_path, begin=20)
    board.write({"contender": "SFPO", "step": 40, "train_loss": 0.5})
    board.close()
    assert calls == [
        (str(tmp_path), 21),
        ("train_loss", 0.5, 40),
        ("flush",),
        ("close",),
    ]


def test_tensorboard_writes_a_file(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    board = TensorBoard(tmp_path / "board")
    board.write({"step": 1, "train_loss": 0.5})
    board.close()
    (events,) = (tmp_path / "board").iterdir()
    assert b"train_loss" in events.read_bytes()
