"""Averaging by factors of low rank: its equations, what it loses, what it sends."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sfpo_jax as sfpo
from sfpo_jax.collectives import transfers, wire_bytes
from tests.oracle_low_rank import LowRankMean
from tests.ranks import Ranks, assert_alike, assert_rows_alike, copies

RANKS, STEPS, RANK = 8, 5, 2
SHAPES = {
    "bias": (20,),
    "conv": (3, 3, 8, 10),
    "masked": (12, 20),
    "scale": (),
    "small": (3, 4),
    "wide": (12, 20),
}
# Where the columns begin, of those that travel as factors.
CUTS = {"conv": 3, "wide": 1}
EXACT = [k for k in SHAPES if k not in CUTS]
SENT = RANK * (72 + 10 + 12 + 20) + 20 + 12 * 20 + 1 + 12


def gradients(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(RANKS, *s)) for k, s in SHAPES.items()}


def transformation(axis_name: str | None = "data", **options: Any) -> Any:
    mask = {k: k != "masked" for k in SHAPES}
    return sfpo.low_rank_mean(RANK, axis_name, mask=mask, **options)


class Trained(NamedTuple):
    """A run in float64, and what it gave on the way."""

    run: Ranks
    first: Any  # the state before
    means: list[dict[str, np.ndarray]]
    state: Any  # the state after, as NumPy


@pytest.fixture(scope="module")
def trained() -> Trained:
    with jax.enable_x64(True):
        zeros = {k: jnp.zeros(s) for k, s in SHAPES.items()}
        run = Ranks(transformation(), zeros, RANKS)
        first = jax.tree.map(np.asarray, run.state)
        means = []
        for step in range(STEPS):
            found = run.step(gradients(step))
            assert_rows_alike(found)
            means.append({k: np.asarray(x)[0] for k, x in found.items()})
        assert_alike(run.state.basis)
        return Trained(run, first, means, jax.tree.map(np.asarray, run.state))


def test_it_follows_the_equations(trained: Trained) -> None:
    oracle = LowRankMean(
        [CUTS.get(k) for k in SHAPES],
        [trained.first.basis[k] if k in CUTS else None for k in SHAPES],
        RANKS,
    )
    for step, mean in enumerate(trained.means):
        grads = gradients(step)
        expected = oracle([[grads[k][i] for k in SHAPES] for i in range(RANKS)])
        for k, e in zip(SHAPES, expected, strict=True):
            np.testing.assert_allclose(mean[k], e, rtol=0, atol=1e-9, err_msg=k)
    for i, errors in enumerate(oracle.worker):
        for k, e in zip(SHAPES, errors, strict=True):
            if k in CUTS:
                held = trained.state.worker_error.tree[k][i]
                np.testing.assert_allclose(held, e, rtol=0, atol=1e-9)


def test_nothing_is_lost(trained: Trained) -> None:
    # Mean gradients = means given out + mean worker error.
    for k in CUTS:
        given = sum(np.mean(gradients(step)[k], axis=0) for step in range(STEPS))
        kept = np.mean(trained.state.worker_error.tree[k], axis=0)
        assert np.abs(kept).max() > 0.1
        total = sum(mean[k] for mean in trained.means) + kept
        np.testing.assert_allclose(total, given, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", EXACT)
def test_what_gains_too_little_is_exact_and_has_no_state(
    trained: Trained, name: str
) -> None:
    for step, mean in enumerate(trained.means):
        expected = gradients(step)[name].mean(axis=0)
        np.testing.assert_allclose(mean[name], expected, rtol=0, atol=1e-15)
    for tree in (trained.state.worker_error.tree, trained.state.basis):
        assert isinstance(tree[name], optax.MaskedNode)


def test_it_sends_the_factors_in_two_transfers(trained: Trained) -> None:
    run = trained.run
    with jax.enable_x64(True):
        compiled = run.update.lower(gradients(0), run.state, run.params).compile()
    moved = transfers(compiled.as_text() or "", {"data": RANKS}, None, ())
    # P with all that is exact, Q, and the scalar that says all is finite.
    assert [t.opcode.removesuffix("-start") for t in moved] == ["all-reduce"] * 3
    share = 2 * (RANKS - 1) / RANKS
    assert wire_bytes(moved)["data"] == pytest.approx(8 * share * (SENT + 1), abs=3)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e200])
def test_all_ranks_skip_what_is_not_finite_on_one(
    trained: Trained, value: float
) -> None:
    run = trained.run
    grads = gradients(99)
    grads["bias"][5, 3] = value
    before, state = copies(run.state), run.state
    with jax.enable_x64(True):
        found = run.step(grads)
    assert copies(run.state) == before
    assert all(np.isnan(x).all() for x in jax.tree.leaves(found))
    run.state = state
    assert run.traces == 1


def test_without_feedback_it_finds_the_largest_directions() -> None:
    # Subspace iteration: of one gradient for ever, the best factors of this rank.
    rng = np.random.default_rng(3)
    u, v = (np.linalg.qr(rng.normal(size=(n, n)))[0] for n in (12, 20))
    sizes = np.array([4.0, 3.0] + [0.5] * 10)
    grads = {"w": u * sizes[None] @ v[:, :12].T}
    best = u[:, :2] * sizes[None, :2] @ v[:, :2].T
    with jax.enable_x64(True):
        tx = sfpo.low_rank_mean(2, None, error_feedback=False)
        state, update = jax.jit(tx.init)(grads), jax.jit(tx.update)
        assert not jax.tree.leaves(state.worker_error)
        found: Any = None
        for _ in range(12):
            found, state = update(grads, state)
    np.testing.assert_allclose(found["w"], best, rtol=0, atol=1e-9)


def test_a_gradient_of_low_rank_loses_no_direction() -> None:
    # Zero, then of rank 1: the second column of Q would turn to the first, or to zero.
    rng = np.random.default_rng(4)
    a, b = rng.normal(size=(2, 12)), rng.normal(size=(2, 20))
    one, two = np.outer(a[0], b[0]), a.T @ b
    with jax.enable_x64(True):
        tx = sfpo.low_rank_mean(2, None)
        state, update = jax.jit(tx.init)({"w": one}), jax.jit(tx.update)
        for grad in (0 * one, 0 * one, one, one, one, two):
            found, state = update({"w": grad}, state)
            assert np.isfinite(state.basis["w"]).all()
            np.testing.assert_allclose(found["w"], grad, rtol=0, atol=1e-12)
            lengths = np.linalg.norm(state.basis["w"], axis=0)
            np.testing.assert_allclose(lengths, 1.0)


@pytest.mark.parametrize("size", [1e-30, 1e18])
def test_sizes_near_the_ends_of_float32(size: float) -> None:
    rng = np.random.default_rng(5)
    grads = {"w": np.float32(size) * rng.normal(size=(12, 20)).astype(np.float32)}
    tx = sfpo.low_rank_mean(2, None)
    # Gradients whose square overflows are the caller's to refuse.
    found, state = jax.jit(lambda g, s: tx.update(g, s, is_finite=True))(
        grads, jax.jit(tx.init)(grads)
    )
    total = found["w"] + state.worker_error.tree["w"]
    np.testing.assert_allclose(total, grads["w"], rtol=1e-4, atol=1e-6 * size)
    assert np.linalg.norm(found["w"] / size) > 2


def test_narrow_errors() -> None:
    grads = {"w": jnp.ones((64, 128))}
    for dtype in ("bfloat16", "int8"):
        tx = sfpo.low_rank_mean(1, None, error_dtype=dtype)
        state = jax.eval_shape(tx.init, grads)
        _, new = jax.eval_shape(tx.update, grads, state)
        kept = {x.dtype.name for x in jax.tree.leaves(state.worker_error)}
        assert dtype in kept
        assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, state)


def test_each_leaf_begins_with_directions_of_its_own() -> None:
    params = {"a": jnp.ones((12, 20)), "b": jnp.ones((12, 20))}
    states = [
        jax.jit(sfpo.low_rank_mean(2, None, seed=s).init)(params) for s in (0, 0, 1)
    ]
    a, again, other = (s.basis["a"] for s in states)
    np.testing.assert_array_equal(a, again)
    assert np.abs(a - other).max() > 0.1
    assert np.abs(a - states[0].basis["b"]).max() > 0.1
