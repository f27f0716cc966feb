"""Sparsification: exactly k entries of each leaf, and nothing is lost with feedback."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sfpo_jax as sfpo
from sfpo_jax.transforms import SparsifyState
from tests.oracle import Sparsify, keep, kept_count

N = 1031  # prime, so that no sparsity divides it
TINY = np.float32(1e-45)  # the smallest subnormal
# 0.3 at n = 101 is where k in float32 arithmetic is wrong.
SHARES = [0.0, 0.1, 0.3, 1 / 3, 0.5, 0.7, 0.9, 0.99, 0.999, 1.0]


def gradients() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    random = rng.normal(size=N).astype(np.float32)
    return {
        "random": random,
        "odd": random[:101],
        "matrix": random[: 31 * 33].reshape(31, 33),
        "zero": np.zeros(N, np.float32),
        "equal": np.full(N, -0.5, np.float32),
        "mostly zero": np.where(np.arange(N) % 10 == 3, random, np.float32(0)),
        "subnormal": (rng.integers(1, 50, N) * TINY).astype(np.float32),
        "one": random[:1],
    }


def nonzero(x: Any) -> int:
    """Entries with a bit set, the subnormal ones included."""
    return int(np.count_nonzero(np.asarray(x).view(np.uint32) << 1))


def once(tx: Any, grads: Any) -> Any:
    """Updates and state of the first step."""
    return jax.jit(lambda grads: tx.update(grads, tx.init(grads)))(grads)


@pytest.fixture(scope="module")
def sparsified() -> Any:
    """(step, gradients) -> what passes at the sparsity SHARES[step]."""
    shares = jnp.asarray(SHARES, jnp.float32)
    tx: Any = sfpo.sparsify(lambda step: shares[step], min_size=0)

    @jax.jit
    def run(step: Any, grads: Any) -> Any:
        state = tx.init(grads)
        assert isinstance(state, SparsifyState)
        return tx.update(grads, state._replace(count=step))[0]

    return run


@pytest.mark.parametrize("bad", [None, np.nan])
def test_exactly_k_entries_pass(sparsified: Any, bad: float | None) -> None:
    grads = gradients()
    for step, share in enumerate(SHARES):
        other = np.full(N, 0.0 if bad is None else bad, np.float32)
        sent = sparsified(jnp.int32(step), {**grads, "other": other})
        for name, grad in grads.items():
            # The values too: the largest, ties to the lower index, bits unchanged.
            expected = keep(grad, share).astype(np.float32)
            assert np.asarray(sent[name]).tobytes() == expected.tobytes(), (name, share)
            if grad.all():
                assert nonzero(sent[name]) == kept_count(grad.size, share)


def dyadic(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Multiples of 1/16 of a few bits: their sums are exact in float32."""
    return (rng.integers(-200, 200, shape) / 16).astype(np.float32)


@pytest.mark.parametrize("momentum", [None, 0.5])
def test_error_feedback_follows_the_equations(momentum: float | None) -> None:
    rng = np.random.default_rng(1)
    tx: Any = sfpo.sparsify(0.8, error_feedback=True, momentum=momentum, min_size=0)
    update = jax.jit(tx.update)
    grads = dyadic(rng, 8, 61)
    state, oracle, total = tx.init(jnp.zeros(61)), Sparsify(True, momentum), 0.0
    for grad in grads:
        sent, state = update(jnp.asarray(grad), state)
        np.testing.assert_array_equal(sent, oracle.step(grad, 0.8))
        total = total + np.asarray(sent)
    residual = np.asarray(state.residual.tree)
    np.testing.assert_array_equal(residual, oracle.residual)
    if momentum is None:
        # Nothing is lost: what was sent and what is kept back is what came in.
        np.testing.assert_array_equal(total + residual, grads.sum(axis=0))
        assert not jax.tree.leaves(state.velocity)
    else:
        np.testing.assert_array_equal(state.velocity.tree, oracle.velocity)


def test_what_a_narrow_dtype_rounds_away_stays_in_the_residual() -> None:
    tx: Any = sfpo.sparsify(0.0, error_feedback=True, min_size=0)
    state = tx.init(jnp.zeros(1, jnp.bfloat16))
    held = state.residual._replace(tree=jnp.array([2.0**-10], jnp.float32))
    grad = jnp.ones(1, jnp.bfloat16)
    sent, state = jax.jit(tx.update)(grad, state._replace(residual=held))
    assert sent.dtype == jnp.bfloat16
    assert float(sent[0]) + float(state.residual.tree[0]) == 1.0 + 2.0**-10


def test_what_a_narrow_dtype_cannot_hold_comes_later() -> None:
    tx: Any = sfpo.sparsify(0.0, error_feedback=True, min_size=0)
    grad = jnp.array([60_000.0, -60_000.0], jnp.float16)
    state = tx.init(grad)
    held = state.residual._replace(tree=jnp.array([20_000.0, -1.0], jnp.float32))
    sent, state = tx.update(grad, state._replace(residual=held))
    assert sent.tolist() == [65_504.0, -60_000.0]
    assert state.residual.tree.tolist() == [80_000.0 - 65_504.0, -1.0]
    # An overflow of the gradient itself is none of that, and says so.
    sent, again = tx.update(jnp.array([jnp.inf, 1.0], jnp.float16), state)
    assert not jnp.isfinite(sent).all()
    assert again.residual.tree.tolist() == state.residual.tree.tolist()


@pytest.mark.parametrize(("share", "kept"), [(-1e-9, 4), (1 + 1e-6, 1), (1.5, 1)])
def test_a_schedule_may_leave_its_range_by_rounding(share: float, kept: int) -> None:
    tx: Any = sfpo.sparsify(lambda step: jnp.float32(share), min_size=0)
    sent, _ = once(tx, jnp.arange(1.0, 5.0))
    assert int((sent != 0).sum()) == kept


def test_the_residual_may_be_bfloat16() -> None:
    tx: Any = sfpo.sparsify(
        0.9, error_feedback=True, min_size=0, error_dtype="bfloat16"
    )
    _, state = once(tx, jnp.arange(8.0) / 8)
    assert state.residual.tree.dtype == jnp.bfloat16
    np.testing.assert_array_equal(
        state.residual.tree.astype(jnp.float32), [*np.arange(7) / 8, 0]
    )


def test_small_tensors_pass_dense() -> None:
    tx: Any = sfpo.sparsify(0.5, min_size=10)
    grads = {"small": jnp.arange(1.0, 10.0), "large": jnp.arange(1.0, 11.0)}
    sent, _ = once(tx, grads)
    np.testing.assert_array_equal(sent["small"], grads["small"])
    assert nonzero(sent["large"]) == kept_count(10, 0.5)
    # By default a bias or a scale of a layer is small.
    default = sfpo.sparsify(0.5)
    grads = {"bias": jnp.ones(1023), "kernel": jnp.ones((32, 32))}
    sent, _ = once(default, grads)
    assert nonzero(sent["bias"]) == 1023
    assert nonzero(sent["kernel"]) == kept_count(1024, 0.5)


@pytest.mark.parametrize(
    "mask",
    [
        {"a": True, "b": {"c": False, "d": True}},
        {"a": True, "b": False},
        lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree),
    ],
    ids=["tree", "prefix", "callable"],
)
def test_the_mask_chooses_leaves(mask: Any) -> None:
    x = jnp.arange(1.0, 17.0)
    grads = {"a": x.reshape(4, 4), "b": {"c": x, "d": x.reshape(2, 8)}}
    tx: Any = sfpo.sparsify(0.5, min_size=0, mask=mask, error_feedback=True)
    sent, state = once(tx, grads)
    is_prefix = isinstance(mask, dict) and mask["b"] is False
    kept = kept_count(16, 0.5)
    assert nonzero(sent["a"]) == kept
    assert nonzero(sent["b"]["c"]) == 16
    assert nonzero(sent["b"]["d"]) == (16 if is_prefix else kept)
    assert len(jax.tree.leaves(state.residual)) == (1 if is_prefix else 2)


def test_integers_booleans_and_empty_leaves_pass() -> None:
    grads = {
        "int": jnp.arange(20),
        "bool": jnp.ones(20, jnp.bool_),
        "empty": jnp.zeros((0, 3)),
        "float": jnp.arange(20.0),
    }
    tx: Any = sfpo.sparsify(0.9, min_size=0, error_feedback=True)
    sent, state = once(tx, grads)
    for name in ("int", "bool", "empty"):
        np.testing.assert_array_equal(sent[name], grads[name])
        assert sent[name].dtype == grads[name].dtype
    assert len(jax.tree.leaves(state.residual)) == 1
    assert nonzero(sent["float"]) == kept_count(20, 0.9)


def test_the_annealed_sparsity_compiles_once_in_1000_steps() -> None:
    schedule = sfpo.cosine_sparsity(0.7, 1000, final=0.3, begin=100)
    tx: Any = sfpo.sparsify(schedule, min_size=0)
    traces = 0

    @jax.jit
    def update(grads: Any, state: Any) -> Any:
        nonlocal traces
        traces += 1
        sent, state = tx.update(grads, state)
        return jnp.count_nonzero(sent), state

    grads = jax.random.normal(jax.random.key(0), (257,))
    state, counts = tx.init(grads), []
    for _ in range(1000):
        count, state = update(grads, state)
        counts.append(count)
    assert traces == 1
    shares = np.asarray(jax.vmap(schedule)(jnp.arange(1000)))
    assert [int(c) for c in counts] == [kept_count(257, s) for s in shares]
    assert counts[99] == 257 > counts[100]
