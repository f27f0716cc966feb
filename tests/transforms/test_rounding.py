"""bfloat16 weights lose no small updates, whatever their size."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sfpo_jax.transforms import make_rounding
from sfpo_jax.transforms._rounding import Rounding

KINDS: list[Any] = [None, "stochastic", "error_term"]
BF16 = ml_dtypes.bfloat16


def apply(rounding: Rounding) -> Any:
    return jax.jit(rounding.apply)


def key(step: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(0), step)


def wide(x: Any) -> np.ndarray:
    return np.asarray(x, np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes_stay_and_what_is_not_bfloat16_is_added(kind: Any) -> None:
    params: Any = {
        "narrow": jnp.ones(3, jnp.bfloat16),
        "half": jnp.ones(3, jnp.float16),
        "single": jnp.ones(3, jnp.float32),
        "int": jnp.arange(3),
        "empty": jnp.ones((0, 2), jnp.bfloat16),
    }
    updates: Any = {
        "narrow": jnp.full(3, 0.5, jnp.float32),
        "half": jnp.full(3, 0.5, jnp.float32),
        "single": jnp.full(3, 0.5, jnp.bfloat16),
        "int": jnp.zeros(3, jnp.int32),
        "empty": jnp.ones((0, 2), jnp.bfloat16),
    }
    rounding = make_rounding(kind)
    state = rounding.init(params)
    new, after = apply(rounding)(params, updates, state, key(0))
    for name, p in params.items():
        assert (new[name].dtype, new[name].shape) == (p.dtype, p.shape)
        if p.size and name != "int":
            np.testing.assert_array_equal(wide(new[name]), 1.5)
    np.testing.assert_array_equal(new["int"], params["int"])
    assert jax.tree.structure(after) == jax.tree.structure(state)
    if kind != "error_term":
        assert state == ()
        return
    assert state["narrow"].dtype == after["narrow"].dtype == jnp.int8
    assert not jax.tree.leaves({k: state[k] for k in ("half", "single", "int")})


def test_random_rounding_is_right_in_the_mean_and_to_a_neighbour() -> None:
    rng = np.random.default_rng(0)
    p = (rng.normal(size=512) * 10.0 ** rng.integers(-6, 6, 512)).astype(BF16)
    u = (wide(p) * rng.normal(size=512) * 2.0**-9).astype(np.float32)
    rounding = make_rounding("stochastic")

    @jax.jit
    @jax.vmap
    def draw(step: jax.Array) -> jax.Array:
        folded = jax.random.fold_in(jax.random.key(1), step)
        new, _ = rounding.apply(jnp.asarray(p), jnp.asarray(u), (), folded)
        return new.astype(jnp.float32)

    drawn = np.asarray(draw(jnp.arange(4000)), np.float64)
    exact = np.asarray(wide(p) + u, np.float64)
    ulp = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 7)
    # Cut to 16 bits and up by one: the neighbours below and above.
    assert (np.abs(drawn - exact) < ulp * (1 + 1e-5)).all()
    below = np.floor(exact / ulp) * ulp
    assert np.isin(((drawn - below) / ulp).ravel(), (0.0, 1.0)).all()
    error = (drawn.mean(axis=0) - exact) / ulp
    assert np.abs(error).max() < 5 * 0.5 / np.sqrt(4000)


@pytest.mark.parametrize("has_key", [True, False])
def test_the_error_term_is_what_rounding_lost(has_key: bool) -> None:
    rng = np.random.default_rng(2)
    p = (rng.normal(size=4096) * 10.0 ** rng.integers(-30, 30, 4096)).astype(BF16)
    u = (wide(p) * rng.normal(size=4096) * 0.3).astype(np.float32)
    rounding = make_rounding("error_term")
    state = rounding.init(jnp.asarray(p))
    given = key(0) if has_key else None
    new, e = apply(rounding)(jnp.asarray(p), jnp.asarray(u), state, given)
    full = wide(p) + u
    np.testing.assert_array_equal(wide(new), wide(full.astype(BF16)))
    ulp = 2.0 ** (np.floor(np.log2(np.abs(wide(new).astype(np.float64)))) - 7)
    units = (full.astype(np.float64) - wide(new)) / (ulp / 256)
    assert (np.abs(np.asarray(e) - units) <= (1.0 if has_key else 0.5)).mean() > 0.99
    assert (np.abs(np.asarray(e) - units) <= 1.0).all()


@pytest.mark.parametrize("kind", KINDS[1:])
def test_tiny_updates_add_up(kind: Any) -> None:
    # Weights of every size, each moved by 1,000 times 2^-20 of itself: a step is
    # 1/2048 of an ulp, and nearest rounding would never move.
    steps, n = 1000, 2048
    rng = np.random.default_rng(3)
    p = jnp.asarray(rng.uniform(1.0, 2.0, n) * 2.0 ** rng.integers(-60, 60, n))
    p = p.astype(jnp.bfloat16)
    u = p.astype(jnp.float32) * 2.0**-20
    rounding = make_rounding(kind)

    @jax.jit
    def run(p: Any, state: Any) -> Any:
        def body(step: Any, carry: Any) -> Any:
            folded = jax.random.fold_in(jax.random.key(4), step)
            return rounding.apply(*(carry[0], u), carry[1], folded)

        return jax.lax.fori_loop(0, steps, body, (p, state))

    plain, _ = apply(make_rounding(None))(p, u, (), None)
    np.testing.assert_array_equal(wide(plain), wide(p))
    end, state = run(p, rounding.init(p))
    full = wide(end).astype(np.float64)
    if kind == "error_term":
        full += wide(state) * 2.0 ** (np.floor(np.log2(full)) - 15)
    moved = (full - wide(p)) / (steps * wide(u))
    standard_error = np.std(moved) / np.sqrt(n)
    assert abs(moved.mean() - 1.0) < 5 * standard_error
    # A weight's walk has a variance of at most a step's share of a unit, each step.
    unit, share = (2.0**-7, 2.0**-13) if kind == "stochastic" else (2.0**-15, 2.0**-5)
    spread = unit * np.sqrt(steps * share) / (steps * 2.0**-20)
    assert 0.3 * spread < np.std(moved) < spread


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_subnormals_and_what_is_not_finite(kind: Any) -> None:
    inf, nan = np.inf, np.nan
    p = np.array([0, -0.0, 1e-39, inf, -inf, nan, 1, 1, 1e-37], np.float32).astype(BF16)
    u = np.array([1e-3, 0, 0, 1, 1, 1, inf, nan, 1e-5], np.float32)
    rounding = make_rounding(kind)
    state: Any = rounding.init(jnp.asarray(p))
    new, state = apply(rounding)(jnp.asarray(p), jnp.asarray(u), state, key(5))
    new = wide(new)
    assert abs(new[0] / 1e-3 - 1) < 2.0**-7 and abs(new[8] / 1e-5 - 1) < 2.0**-7
    assert new[1] == 0 and abs(new[2]) < 2e-39
    np.testing.assert_array_equal(new[3:8], [inf, -inf, nan, inf, nan])
    if kind == "error_term":
        assert not np.asarray(state)[[1, 3, 4, 5, 6, 7]].any()
        again, _ = apply(rounding)(jnp.asarray(p), jnp.zeros(9), state, key(6))
        np.testing.assert_array_equal(np.isfinite(wide(again)), np.isfinite(wide(p)))


def test_infinity_is_not_left_with_an_error() -> None:
    rounding = make_rounding("error_term")
    largest = jnp.full(4, 3.38e38, jnp.bfloat16)
    e = jnp.full(4, 100, jnp.int8)
    new, e = apply(rounding)(largest, jnp.full(4, 3e38), e, None)
    assert np.isinf(wide(new)).all() and not np.asarray(e).any()
    new, e = apply(rounding)(new, jnp.zeros(4), e, None)
    assert np.isinf(wide(new)).all() and not np.asarray(e).any()


def test_the_key_decides() -> None:
    rounding = make_rounding("stochastic")
    p, u = jnp.ones((2, 64, 32), jnp.bfloat16), jnp.full((2, 64, 32), 2.0**-9)
    step = apply(rounding)
    first, _ = step([p, p], [u, u], (), key(0))
    again, _ = step([p, p], [u, u], (), key(0))
    other, _ = step([p, p], [u, u], (), key(1))
    raw, _ = step([p, p], [u, u], (), jax.random.key_data(key(0)))
    np.testing.assert_array_equal(wide(first[0]), wide(again[0]))
    np.testing.assert_array_equal(wide(first[0]), wide(raw[0]))
    for a, b in ((first[0], first[1]), (first[0], other[0])):
        differing = (wide(a) != wide(b)).mean()
        assert 0.2 < differing < 0.6  # 2 * 1/4 * 3/4 in the mean


def test_layers_with_keys_of_their_own() -> None:
    rounding = make_rounding("error_term")
    p, u = jnp.ones((3, 16, 8), jnp.bfloat16), jnp.full((3, 16, 8), 0.3 * 2.0**-15)
    keys = jax.random.split(jax.random.key(0), 3)
    state = rounding.init(p)
    new, e = jax.jit(jax.vmap(rounding.apply))(p, u, state, keys)
    for i in range(3):
        single = apply(rounding)(p[i], u[i], state[i], keys[i])
        np.testing.assert_array_equal(wide(new[i]), wide(single[0]))
        np.testing.assert_array_equal(e[i], single[1])
    assert 0.1 < wide(e).mean() < 0.5
    assert (wide(e[0]) != wide(e[1])).any()


def test_bad_arguments_say_so() -> None:
    with pytest.raises(ValueError, match=r"`kind` must be None, .* got 'nearest'"):
        make_rounding("nearest")
    p = jnp.ones(2, jnp.bfloat16)
    with pytest.raises(ValueError, match='`key` must be a PRNG key with "stochastic'):
        make_rounding("stochastic").apply(p, p, (), None)
