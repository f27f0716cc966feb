"""The annealed sparsity: its formula, its ends, and what cannot be asked for."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfpo_jax import cosine_sparsity

# Three operations of float32 on numbers of at most one, and a cosine.
ULPS = 4 * 2.0**-24


def formula(step: int, base: float, total: int, final: float, begin: int) -> float:
    if step < begin:
        return 0.0
    progress = min(step, total) / total
    return final + (base - final) * (1 + math.cos(math.pi * progress)) / 2


@given(
    base=st.floats(0, 1),
    final=st.floats(0, 1),
    total=st.integers(1, 10**6),
    data=st.data(),
)
def test_it_is_the_formula(
    base: float, final: float, total: int, data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, total))
    step = data.draw(st.integers(0, 2 * total))
    value = cosine_sparsity(base, total, final, begin)(step)
    assert (value.dtype, value.shape) == (jnp.float32, ())
    assert abs(float(value) - formula(step, base, total, final, begin)) <= ULPS
    assert 0 <= float(value) <= 1


@pytest.mark.parametrize("final", [0.0, 0.3])
def test_the_published_points(final: float) -> None:
    schedule = cosine_sparsity(0.7, 100, final)
    values = [float(schedule(t)) for t in (0, 50, 100, 101, 10**6)]
    middle = (0.7 + final) / 2
    expected = [0.7, middle, final, final, final]
    np.testing.assert_allclose(values, expected, rtol=0, atol=ULPS)


def test_nothing_is_dropped_before_the_beginning() -> None:
    schedule = cosine_sparsity(1.0, 10, 0.5, begin=4)
    assert [float(schedule(t)) for t in range(4)] == [0.0] * 4
    # The cosine counts from step 0 all the same.
    assert float(schedule(4)) == pytest.approx(formula(4, 1.0, 10, 0.5, 4), abs=ULPS)


def test_it_falls_to_its_end_without_a_step_back() -> None:
    values = jax.vmap(cosine_sparsity(0.9, 1000, 0.1))(jnp.arange(1200))
    assert (np.diff(values) <= 0).all()
    np.testing.assert_allclose(values[0], 0.9, rtol=0, atol=ULPS)
    np.testing.assert_allclose(values[1000:], 0.1, rtol=0, atol=ULPS)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint32, jnp.int16])
def test_the_count_may_saturate(dtype: Any) -> None:
    last = jnp.asarray(jnp.iinfo(dtype).max, dtype)
    schedule = jax.jit(cosine_sparsity(0.9, 1000, 0.25))
    assert float(schedule(last)) == 0.25
    assert schedule(jnp.zeros((), dtype)).dtype == jnp.float32


def test_a_traced_step_gives_the_same() -> None:
    schedule = cosine_sparsity(0.8, 37, 0.2, begin=5)
    compiled = jax.jit(schedule)
    for step in range(40):
        np.testing.assert_allclose(compiled(step), schedule(step), rtol=0, atol=ULPS)


@pytest.mark.parametrize("sparsity", [0.0, 1.0])
def test_a_constant_at_either_end_stays_there(sparsity: float) -> None:
    values = jax.vmap(cosine_sparsity(sparsity, 777, sparsity))(jnp.arange(800))
    np.testing.assert_array_equal(values, np.float32(sparsity))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base": -0.1}, r"`base` must lie in \[0, 1\], got -0.1: .* dropped at first"),
        ({"base": 1.5}, r"`base` must lie in \[0, 1\], got 1.5"),
        ({"base": float("nan")}, r"`base` must lie in \[0, 1\], got nan"),
        ({"final": 2}, r"`final` must lie in \[0, 1\], got 2: .* at the end"),
        ({"total_steps": 0}, "`total_steps` must be at least 1, got 0"),
        ({"begin": 101}, r"`begin` must lie in \[0, 100\], got 101"),
        ({"begin": -1}, r"`begin` must lie in \[0, 100\], got -1"),
    ],
)
def test_what_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cosine_sparsity(**{"base": 0.7, "total_steps": 100, **arguments})
