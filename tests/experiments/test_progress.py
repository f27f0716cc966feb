"""Progress: bars on a terminal, a few plain lines anywhere else."""

import io

import pytest
from rich.console import Console

from experiments.progress import RunProgress

NAMES = ["dense AdamW", "SFPO"]


def shown(*, is_terminal: bool) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=is_terminal, width=100)
    with RunProgress(console, NAMES, steps=100) as progress:
        progress.begin("SFPO")
        for step in range(1, 101):
            progress.show({"contender": "SFPO", "step": step, "train_loss": 1 / step})
        progress.show({"contender": "SFPO", "step": 100, "test_accuracy": 0.961})
    return file.getvalue()


def test_plain_lines_are_few_and_hold_no_control_codes() -> None:
    text = shown(is_terminal=False)
    assert "\x1b" not in text
    lines = text.splitlines()
    assert lines[0].split() == ["SFPO", "step", "0/100", "compiling"]
    assert lines[-1].endswith("step 100/100  test accuracy 96.1%")
    assert len(lines) == 12


def test_a_terminal_gets_a_bar_for_each_contender() -> None:
    text = shown(is_terminal=True)
    for words in (*NAMES, "waiting", "100/100", "test accuracy 96.1%"):
        assert words in text


def test_an_error_leaves_the_terminal_as_it_was() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    with pytest.raises(KeyboardInterrupt), RunProgress(console, NAMES, steps=10):
        raise KeyboardInterrupt
    # The cursor is shown again.
    assert "\x1b[?25h" in file.getvalue()
