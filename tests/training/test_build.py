"""Dataclasses from mappings: every key known, every value of its type."""

import dataclasses
from typing import Any, Literal

import pytest

from sfpo_jax.training import ConfigError, build, dotted_keys


@dataclasses.dataclass(frozen=True)
class Inner:
    rate: float = 0.5
    steps: int = 10
    mode: Literal["fast", "slow"] = "fast"
    limit: float | Literal["none"] = "none"
    flag: bool = True
    name: str = "x"

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"`inner.steps` must be at least 1, got {self.steps}")


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner = Inner()
    seed: int = 0


def test_dotted_keys() -> None:
    assert dotted_keys(Outer)[-3:] == ["inner.flag", "inner.name", "seed"]


def test_what_is_absent_keeps_the_value_of_the_base() -> None:
    base = Outer(Inner(rate=0.1, steps=3), seed=7)
    built = build(Outer, {"inner": {"steps": 4, "limit": 2}}, base=base)
    assert built == Outer(Inner(rate=0.1, steps=4, limit=2.0), seed=7)
    assert build(Outer, {}) == Outer()
    assert type(build(Outer, {"inner": {"rate": 1}}).inner.rate) is float


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"inner": {"stpes": 1}}, ["`inner.stpes`", "value 1", "`inner.steps`"]),
        ({"steps": 1}, ["`steps`", "`inner.steps`"]),
        ({"iner": {"rate": 1}}, ["`iner`", "inner"]),
        ({"inner": {"zzz": 1}}, ["`inner.zzz`", "known here: rate, steps"]),
        ({"inner": 3}, ["`inner`", "section", "3"]),
        ({"inner": None}, ["`inner`", "section", "None"]),
        ({"inner": {"rate": "a"}}, ["`inner.rate`", "a number", "'a'", "0.5"]),
        ({"inner": {"rate": True}}, ["`inner.rate`", "a number", "True"]),
        ({"inner": {"rate": None}}, ["`inner.rate`", "a number", "None"]),
        ({"inner": {"rate": [1]}}, ["`inner.rate`", "a number", "[1]"]),
        ({"inner": {"steps": 1.0}}, ["`inner.steps`", "a whole number", "1.0"]),
        ({"inner": {"flag": 1}}, ["`inner.flag`", "true or false", "1"]),
        ({"inner": {"flag": "no"}}, ["`inner.flag`", "true or false", "'no'"]),
        ({"inner": {"name": 3}}, ["`inner.name`", "text", "3"]),
        ({"inner": {"mode": "fats"}}, ["`inner.mode`", "fast, slow", "'fast'?"]),
        ({"inner": {"limit": "nnoe"}}, ["a number or none", "'none'?"]),
        ({"inner": {"steps": 0}}, ["`inner.steps` must be at least 1, got 0"]),
    ],
)
def test_what_is_refused(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Outer, values, base=Outer())
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


@dataclasses.dataclass(frozen=True)
class Listed:
    sizes: tuple[int, ...] = (1,)


def test_a_list_of_values() -> None:
    assert build(Listed, {"sizes": [3, 4]}) == Listed((3, 4))
    assert build(Listed, {"sizes": []}) == Listed(())
    with pytest.raises(ConfigError, match=r"`sizes` must be a list, each a whole numb"):
        build(Listed, {"sizes": 3})
    with pytest.raises(ConfigError, match=r"`sizes\[1\]` must be a whole .* got 'x'"):
        build(Listed, {"sizes": [3, "x"]})
