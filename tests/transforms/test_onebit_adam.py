"""1-bit Adam: ranks that agree, entries that stay, and what its arguments change.

That it follows the equations is in `test_onebit_oracle`.
"""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import sfpo_jax as sfpo
from tests.ranks import Ranks, assert_alike, assert_rows_alike, copies

WARMUP, STEPS, RANKS = 4, 12, 8
SIZES = {"w": 5000, "b": 17, "never used": 40}


def test_ranks_agree_and_entries_without_gradient_stay() -> None:
    rng = np.random.default_rng(0)
    params = {k: jnp.asarray(rng.normal(size=n), jnp.float32) for k, n in SIZES.items()}
    tx = sfpo.onebit_adam(0.01, warmup_steps=WARMUP, axis_name="data")
    run = Ranks(tx, params, RANKS)
    for _ in range(STEPS):
        grads = {
            k: rng.normal(size=(RANKS, n)).astype(np.float32) for k, n in SIZES.items()
        }
        grads["w"][:, :5] = 0.0
        grads["never used"][:] = 0.0
        updates = run.step(grads)
        state = run.state
        assert_rows_alike(updates)
        assert_alike((run.params, state.count, state.freeze, state.mu, state.nu))
        assert not np.asarray(updates["w"])[:, :5].any()
        assert not np.asarray(updates["never used"]).any()
        assert np.asarray(updates["w"])[:, 5:].all()
    assert int(run.state.count) == STEPS and run.traces == 1
    error = run.state.worker_error.tree
    assert np.asarray(error["w"])[:, 5:].all()
    assert not np.asarray(error["w"])[:, :5].any()
    assert not np.asarray(error["never used"]).any()


def test_the_packed_moment_is_the_bytes_it_arrived_in() -> None:
    # Decays of 1/2, gradients of few bits, blocks of 8 and two ranks keep all sums
    # exact in float64, so that two programs have no rounding to differ in.
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        arguments: Any = {
            "b1": 0.5,
            "b2": 0.5,
            "warmup_steps": 2,
            "axis_name": "data",
            "compressor": sfpo.compression.sign(block_size=8),
        }
        params = {"a": jnp.zeros(512), "b": jnp.zeros((2, 4))}
        plain = Ranks(sfpo.onebit_adam(2.0**-6, **arguments), params, 2)
        tx = sfpo.onebit_adam(2.0**-6, mu_dtype="packed", **arguments)
        packed = Ranks(tx, params, 2)
        for step in range(6):
            grads = {
                k: rng.integers(-200, 200, (2, *p.shape)) / 16
                for k, p in params.items()
            }
            plain.step(grads)
            packed.step(grads)
            assert_alike((packed.params, packed.state.mu, packed.state.nu))
            a, b = plain.state, packed.state
            assert copies(a.nu) == copies(b.nu)
            if step < 2:
                # Until the freeze it waits where the worker error will be.
                moments = zip(copies(a.mu), copies(b.worker_error), strict=True)
                assert all(x == y for x, y in moments)
            else:
                assert copies(a.worker_error) == copies(b.worker_error)
                assert copies(a.server_error) == copies(b.server_error)
            for name, values in plain.params.items():
                np.testing.assert_allclose(packed.params[name], values, rtol=1e-14)
    # 65 blocks, and one more to be even: 8 signs and a float64 scale each.
    stored = sum(x.nbytes for x in jax.tree.leaves(packed.state.mu))
    assert stored == 66 * (1 + 8)


def test_the_warmup_is_adamw() -> None:
    rng = np.random.default_rng(1)
    mask = {"a": True, "b": False}
    # Optax computes it in float32: of these numbers exactly, however it is compiled.
    schedule = optax.linear_schedule(0.125, 0.0625, 8)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        params = {"a": jnp.asarray(rng.normal(size=(7, 5))), "b": jnp.ones(3)}
        ours = sfpo.onebit_adam(
            schedule, 0.8, 0.95, 1e-6, 0.1, warmup_steps=10, mask=mask
        )
        theirs = optax.adamw(schedule, 0.8, 0.95, 1e-6, weight_decay=0.1, mask=mask)
        found = Ranks(ours, params, None)
        expected = Ranks(theirs, params, None)
        for _ in range(10):
            grads = {k: rng.normal(size=(1, *p.shape)) for k, p in params.items()}
            found.step(grads)
            expected.step(grads)
        for name in params:
            np.testing.assert_allclose(
                found.params[name], expected.params[name], rtol=1e-13
            )


def test_the_mask_says_what_decays() -> None:
    params = {"kernel": jnp.full((2, 2), 2.0), "bias": jnp.ones(2)}
    tx = sfpo.onebit_adam(
        0.5,
        weight_decay=0.25,
        warmup_steps=1,
        mask=lambda tree: jax.tree.map(lambda p: p.ndim > 1, tree),
    )
    update = jax.jit(tx.update)
    state = tx.init(params)
    for _ in range(2):  # a dense step and a compressed one
        updates, state = update(jax.tree.map(jnp.zeros_like, params), state, params)
        np.testing.assert_array_equal(updates["kernel"], np.full((2, 2), -0.25))
        np.testing.assert_array_equal(updates["bias"], np.zeros(2))
    with pytest.raises(ValueError, match="`params` is None, but `weight_decay` needs"):
        tx.update(params, state)


def test_scaling_is_all_but_rate_and_decay() -> None:
    grads = jnp.asarray(np.random.default_rng(2).normal(size=(4, 33)), jnp.float32)
    whole = sfpo.onebit_adam(0.5, warmup_steps=2)
    scale = sfpo.scale_by_onebit_adam(warmup_steps=2)
    states = [whole.init(grads[0]), scale.init(grads[0])]

    @jax.jit
    def both(grad: Any, states: Any) -> Any:
        step, first = whole.update(grad, states[0])
        direction, second = scale.update(grad, states[1])
        return step, direction, [first, second]

    for grad in grads:
        step, direction, states = both(grad, states)
        np.testing.assert_array_equal(step, -0.5 * direction)


def narrow(x: Any) -> Any:
    """float32 rounded to bfloat16."""
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def test_narrow_states_are_the_exact_ones_rounded() -> None:
    # Decays of 1/2, gradients of few bits and blocks of 8 make float32 exact here, so
    # nothing but the rounding of the states is left.
    tx = sfpo.onebit_adam(
        0.5,
        0.5,
        0.5,
        warmup_steps=3,
        mu_dtype="bfloat16",
        nu_dtype="bfloat16",
        error_dtype="bfloat16",
    )
    grads = np.random.default_rng(3).integers(-200, 200, (7, 8)) / 16
    grads = grads.astype(np.float32)
    state, update = tx.init(jnp.zeros(8)), jax.jit(tx.update)
    m = v = e = np.zeros(8, np.float32)
    for step, g in enumerate(grads):
        updates, state = update(jnp.asarray(g), state)
        if step < 3:
            m, v = narrow(0.5 * m + 0.5 * g), narrow(0.5 * v + 0.5 * g * g)
        else:
            c = 0.5 * m + 0.5 * g + e
            q = np.copysign(np.abs(c).mean(), c)
            m, e = narrow(q), narrow(c - q)
        assert updates.dtype == jnp.float32
        held = {"mu": state.mu, "nu": state.nu, "error": state.worker_error.tree}
        for (name, x), expected in zip(held.items(), (m, v, e), strict=True):
            assert x.dtype == jnp.bfloat16, name
            np.testing.assert_array_equal(x.astype(jnp.float32), expected, name)


@pytest.mark.parametrize(
    "options",
    [{}, {"refresh_every": 4}, {"mu_dtype": "packed"}, {"nu_dtype": "factored"}],
    ids=str,
)
def test_dense_steps_out_of_turn_leave_no_trace(options: dict[str, Any]) -> None:
    """Of one gradient all the time, each step is a whole one, whatever its phase."""
    tx: Any = sfpo.onebit_adam(1.0, b2=0.9, warmup_steps=4, **options)
    grads = jnp.full((128, 128), 0.25)
    state = tx.init(grads)
    update = jax.jit(tx.update, static_argnames="phase")
    # Two too many at once; then one among compressed steps; then as they come.
    phases = ["warmup"] * 6 + ["compressed"] * 2 + ["warmup"] + ["compressed"] * 2
    for phase in phases + [None] * 8:
        moved, state = update(grads, state, phase=phase)
        np.testing.assert_allclose(moved, -1.0, rtol=1e-5)
    assert int(state.count) == len(phases) + 8
    assert int(state.freeze.step) == 9
