"""YAML: YAML 1.2 scalars, no key twice, one line of error with its place."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfpo_jax.training import ConfigError, parse_yaml, read_yaml, write_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.0e-8", 1e-8),
        (".5", 0.5),
        ("-3", -3),
        ("1:30", "1:30"),
        ("no", "no"),
        ("on", "on"),
        ("true", True),
        ("null", None),
        ("", None),
        ("'1'", "1"),
        ('"true"', "true"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("256MB", "256MB"),
        ("1bit_adam", "1bit_adam"),
        ("[1, a]", [1, "a"]),
    ],
)
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = parse_yaml(f"key: {text}")["key"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: 1\na: 2", ["line 2", "`a`", "twice"]),
        ("a:\n  b: 1\n  c: 2\n  b: 3", ["line 4", "`a.b`", "twice"]),
        ("a: 1\n  b: 2", ["line 2", "not YAML"]),
        ("a: [1", ["not YAML"]),
        ("a: \x01", ["not YAML"]),
        ("- 1\n- 2", ["sections"]),
        ("", ["sections"]),
        ("? [a, b]\n: 1", ["line 1", "single word"]),
        ("a: &x\n  b: *x", ["nested deeper"]),
    ],
)
def test_what_is_refused(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "run.yaml")
    message = str(caught.value)
    assert "\n" not in message
    for word in ["run.yaml", *words]:
        assert word in message


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml.*No such file"):
        read_yaml(tmp_path / "absent.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.yaml.*UTF-8"):
        read_yaml(tmp_path / "binary.yaml")


@dataclasses.dataclass(frozen=True)
class Values:
    text: str
    number: float
    whole: int
    flag: bool


@given(
    text=st.one_of(st.text(st.characters(categories=["L", "N", "P"])), st.just("1e3")),
    number=st.floats(allow_nan=False, allow_infinity=False),
    whole=st.integers(),
    flag=st.booleans(),
)
def test_what_is_written_reads_back(
    tmp_path_factory: pytest.TempPathFactory,
    text: str,
    number: float,
    whole: int,
    flag: bool,
) -> None:
    path = tmp_path_factory.getbasetemp() / "values.yaml"
    values = Values(text, number, whole, flag)
    write_yaml(path, values)
    assert read_yaml(path) == dataclasses.asdict(values)
