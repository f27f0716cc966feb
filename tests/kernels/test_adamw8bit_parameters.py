"""Parameters of one-byte AdamW: moved in place, rounded as they should be."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from sfpo_jax.kernels import adamw8bit_parameters, make_seed
from sfpo_jax.transforms import make_rounding
from tests.kernels.adamw8bit_steps import (
    DECAY,
    RATE,
    ULP,
    at,
    directions,
    gradients,
    needs_native,
    numbers,
    twin,
    zeros,
)
from tests.ranks import copies

pytestmark = needs_native

BF16 = ml_dtypes.bfloat16


@pytest.mark.parametrize("kind", [None, "stochastic"])
def test_parameters_are_moved_by_the_directions(
    kind: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [(16, 257), (64, 512), (30, 24), (256, 256)]
    dtypes = [BF16, np.float32, np.float32, BF16]
    decayed = [False, True, False, False]
    rng = np.random.default_rng(7)
    held = [rng.normal(size=s).astype(d) for s, d in zip(shapes, dtypes, strict=True)]
    held[0][0, :2] = np.inf, np.nan
    held[3][:] = 1.0
    grads = gradients(1, shapes)
    grads[3] = jnp.ones(shapes[3])
    state = zeros(grads, True), zeros(grads, False)
    key = jax.random.key(5)

    def move(
        params: Any, grads: Any, mu: Any, nu: Any, plan: Any, step: Any, taken: Any
    ) -> Any:
        words = jax.random.key_data(key)
        seeds = [make_seed(*words, jnp.uint32(i)) for i in range(4)] if kind else []
        return adamw8bit_parameters(
            grads,
            mu,
            nu,
            params,
            plan,
            make_seed(step),
            taken,
            is_decayed=decayed,
            rounding=seeds,
        )

    params, native = [jnp.asarray(p) for p in held], jax.jit(move)
    found = native(params, grads, *state, *at(1))
    u, *moments = jax.jit(directions)(grads, *state, *at(1))
    assert copies([found.mu, found.nu]) == copies(moments)
    totals = []
    for p, x, is_decayed in zip(held, u, decayed, strict=True):
        wide, x = p.astype(np.float32), np.asarray(x)
        x = x + np.float32(DECAY) * wide if is_decayed else x
        totals.append(wide - np.float32(RATE) * x)
    nothing = [jnp.zeros(p.shape, p.dtype) for p in held]
    exact, _ = jax.jit(make_rounding(kind).apply)(nothing, totals, (), key)
    for new, expected in zip(found.values, exact, strict=True):
        assert new.dtype == expected.dtype
        np.testing.assert_array_equal(wide_of(new), wide_of(expected))
    args = (params, grads, *state, *at(1))
    other = twin(monkeypatch, move, *args)(*args)
    for p, new, expected in zip(held, found.values, other.values, strict=True):
        with np.errstate(invalid="ignore"):  # infinity less itself
            error = np.abs(wide_of(new) - wide_of(expected))
        if p.dtype == np.float32:
            assert (error <= 2 * ULP * np.maximum(np.abs(p), RATE)).all()
        else:
            assert (error > 0).mean() < 1e-3
    same = native(params, grads, *state, *at(1, taken=False)).values
    assert copies(same) == copies(params)


def wide_of(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float32)


def test_rounding_at_random_is_right_in_the_mean() -> None:
    shape = (256, 256)
    params, grads = [jnp.ones(shape, jnp.bfloat16)], [jnp.ones(shape)]
    args = grads, zeros(grads, True), zeros(grads, False), params
    new = adamw8bit_parameters(
        *args,
        numbers(1, rate=2.0**-11),
        make_seed(jnp.int32(1)),
        jnp.bool(True),
        is_decayed=[False],
        rounding=[make_seed(jnp.int32(2))],
    ).values[0]
    # An eighth of the way to the number below 1.
    assert set(np.unique(wide_of(new))) == {1 - 2.0**-8, 1.0}
    error = wide_of(new).mean() - (1 - 2.0**-11)
    assert abs(error) < 5 * 2.0**-8 * np.sqrt(1 / 8 * 7 / 8 / new.size)


def test_it_is_done_in_place() -> None:
    grads = gradients(1)
    params = [jnp.ones(g.shape) for g in grads]
    held = params, zeros(grads, True), zeros(grads, False)

    def move(held: Any, grads: Any) -> Any:
        params, mu, nu = held
        seed, taken = make_seed(jnp.int32(1)), jnp.isfinite(grads[0][0, 0])
        flags = [True] * len(params)
        return adamw8bit_parameters(
            grads, mu, nu, params, numbers(1), seed, taken, is_decayed=flags
        )

    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(held)]
    after = jax.jit(move, donate_argnums=0)(held, grads)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(after)] == before
