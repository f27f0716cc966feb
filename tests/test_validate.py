"""Checks of arguments: what passes, what does not, and what the message says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfpo_jax._validate import (
    check_at_least,
    check_learning_rate,
    check_number,
    check_range,
    is_known,
)

NUMBERS = [0, 1, -2.5, np.float32(0.5), np.float64(0.5), np.int64(3), np.uint8(1)]
ARRAYS = [jnp.float32(-0.5), jnp.full((), -1), np.asarray(-0.5)]
NEITHER = [True, False, np.bool_(True), None, "1", [1], 1j]


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
def test_numbers_are_known(value: Any) -> None:
    assert is_known(value)
    check_number("x", value)


@pytest.mark.parametrize("value", ARRAYS, ids=repr)
def test_arrays_pass_unread(value: Any) -> None:
    assert not is_known(value)
    check_number("x", value)
    check_range("x", value, 2.0, 3.0, "too large for this")
    check_at_least("x", value, 2.0, "too large for this")
    check_learning_rate(value)


def test_traced_values_pass() -> None:
    def build(x: jax.Array) -> jax.Array:
        check_range("x", x, 0.0, 1.0, "a share")
        check_learning_rate(x)
        return x

    assert jax.jit(build)(jnp.float32(-7)) == -7


@pytest.mark.parametrize("value", NEITHER, ids=repr)
def test_what_is_no_number_is_refused(value: Any) -> None:
    for check in (
        lambda: check_number("share", value),
        lambda: check_range("share", value, 0.0, 1.0, "a share"),
        lambda: check_at_least("share", value, 0.0, "a share"),
    ):
        with pytest.raises(TypeError) as error:
            check()
        assert str(error.value) == f"`share` must be a number, got {value!r}."


@given(st.floats(-2, 3), st.booleans(), st.booleans())
def test_ranges(value: float, open_low: bool, open_high: bool) -> None:
    is_inside = 0 <= value <= 1
    is_inside &= not (open_low and value == 0) and not (open_high and value == 1)
    options = {"open_low": open_low, "open_high": open_high}
    if is_inside:
        check_range("share", value, 0.0, 1.0, "a share", **options)
        return
    with pytest.raises(ValueError) as error:
        check_range("share", value, 0.0, 1.0, "a share", **options)
    interval = f"{'[('[open_low]}0, 1{'])'[open_high]}"
    fact = f"`share` must lie in {interval}, got {value!r}: it is a share."
    assert str(error.value) == fact


@pytest.mark.parametrize("value", [0, 1, 0.0, 1.0])
def test_open_ends_are_outside(value: float) -> None:
    check_range("x", value, 0.0, 1.0, "a share")
    with pytest.raises(ValueError, match=r"must lie in \(0, 1\)"):
        check_range("x", value, 0.0, 1.0, "a share", open_low=True, open_high=True)


def test_nan_is_in_no_range() -> None:
    with pytest.raises(ValueError, match=r"`x` must lie in \[0, 1\], got nan"):
        check_range("x", float("nan"), 0.0, 1.0, "a share")
    with pytest.raises(ValueError, match="`x` must be at least 0, got nan"):
        check_at_least("x", float("nan"), 0.0, "a share")


def test_a_lower_bound_alone() -> None:
    check_at_least("steps", 1, 1, "the length of the run")
    check_at_least("steps", float("inf"), 1, "the length of the run")
    with pytest.raises(ValueError) as error:
        check_at_least("steps", 0, 1, "the length of the run")
    fact = "`steps` must be at least 1, got 0: it is the length of the run."
    assert str(error.value) == fact


def test_learning_rates() -> None:
    check_learning_rate(0.0)
    check_learning_rate(1e-3)
    check_learning_rate(lambda step: -step)
    with pytest.raises(ValueError, match=r"`learning_rate` .* got -0\.1: .* positive"):
        check_learning_rate(-0.1)
    with pytest.raises(TypeError, match="`learning_rate` must be a number, got 'fast'"):
        check_learning_rate("fast")
