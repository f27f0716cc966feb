"""Values replaced, everything else kept."""

from pathlib import Path
from typing import Any

import pytest

from sfpo_jax.training import parse_yaml
from sfpo_jax.training._yaml_edit import Edit, edit_yaml

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_only_what_was_asked_for_changes(path: Path) -> None:
    text = path.read_text()
    before = parse_yaml(text)
    edits = {
        "data.batch_size": Edit(96, "a reason " * 30),
        "optimizer.learning_rate": Edit(0.00012, "short"),
        "train.name": Edit("true", "a text that looks like a bool"),
    }
    edited = edit_yaml(text, edits)
    before["data"]["batch_size"] = 96
    before["optimizer"]["learning_rate"] = 0.00012
    before["train"]["name"] = "true"
    assert parse_yaml(edited) == before
    changed = [line for line in edited.splitlines() if line not in text]
    assert len([line for line in changed if "#" not in line]) == 3
    assert max(map(len, changed)) < 100
    # What was said of the old value is gone with it.
    old = next(x for x in text.splitlines() if x.lstrip().startswith("batch_size"))
    assert old not in edited


@pytest.mark.parametrize(
    ("text", "value", "expected"),
    [
        ("a: {b: 1, c: 2}", 3, "# why\na: {b: 3, c: 2}\n"),
        ("a:\n  b: x # was\n  c: 1", "y", "a:\n  # why\n  b: y\n  c: 1"),
        ("a:\n  b: 1.5", 1e-5, "a:\n  # why\n  b: 1e-05\n"),
        ("a:\n  b: 1", False, "a:\n  # why\n  b: false\n"),
        ("a:\n  b: 1", "7", 'a:\n  # why\n  b: "7"\n'),
    ],
)
def test_forms_of_values(text: str, value: Any, expected: str) -> None:
    edited = edit_yaml(text, {"a.b": Edit(value, "why")})
    assert edited == expected
    assert parse_yaml(edited)["a"]["b"] == value


def test_a_key_that_is_not_there() -> None:
    with pytest.raises(KeyError):
        edit_yaml("a:\n  b: 1", {"a.c": Edit(1, "")})
