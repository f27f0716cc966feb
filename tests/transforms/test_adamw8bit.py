"""AdamW with narrow moments: its equations, its arguments, and where it runs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import sfpo_jax as sfpo
from sfpo_jax.transforms import Quantized, is_quantized
from sfpo_jax.transforms._factored import Factored
from tests.oracle_states import Adamw8bit
from tests.ranks import copies

# Bytes of a divisor, of a ragged row and of a vector; floats.
SHAPES: list[tuple[int, ...]] = [(16, 512), (16, 257), (5000,), (40, 30), ()]
DECAYED = [True, False, True, False, True]


def rate(step: Any) -> Any:
    return jnp.where(step < 4, 2.0**-6, 2.0**-7)


def gradients(step: int, shapes: Any = SHAPES) -> list[np.ndarray]:
    """Of sizes that differ between columns; a corner never has any."""
    rng = np.random.default_rng(step)
    grads = []
    for i, shape in enumerate(shapes):
        sizes = np.random.default_rng(i).normal(size=shape[-1:])
        g = np.asarray(rng.normal(size=shape) * np.exp(2 * sizes))
        if g.ndim:
            g[:3] = 0.0
        grads.append(g)
    return grads


@pytest.mark.parametrize("nu", ["int8", "factored"])
def test_it_follows_the_equations(nu: str) -> None:
    params = [np.asarray(np.random.default_rng(9).normal(size=s)) for s in SHAPES]
    numbers = (0.8, 0.95, 1e-6, 0.1)
    oracle = Adamw8bit(
        params, lambda t: float(rate(t)), *numbers, decayed=DECAYED, nu=nu
    )
    with jax.enable_x64(True):
        tx = sfpo.adamw8bit(rate, *numbers, nu_dtype=nu, mask=DECAYED)
        held: Any = [jnp.asarray(p) for p in params]
        state, update = jax.jit(tx.init)(held), jax.jit(tx.update)
        for step in range(8):
            grads = gradients(step)
            oracle.step(grads)
            updates: Any
            updates, state = update([jnp.asarray(g) for g in grads], state, held)
            held = [p + u for p, u in zip(held, updates, strict=True)]
    for found, expected in zip(held, oracle.params, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    for mu, v, kept in zip(state.mu, state.nu, oracle.bytes, strict=True):
        if kept is None:
            assert not is_quantized(mu)
            continue
        np.testing.assert_array_equal(mu.values, kept[0].values)
        np.testing.assert_allclose(mu.scales, kept[0].scales, rtol=1e-9)
        if nu == "int8":
            np.testing.assert_array_equal(v.values, kept[1].values)
    kinds = [type(v) for v in state.nu[:3]]
    expected_kinds: dict[str, list[type]] = {
        "int8": [Quantized, Quantized, Quantized],
        "factored": [Factored, Factored, type(state.count)],
    }
    assert kinds == expected_kinds[nu]


def test_float_moments_are_adamw() -> None:
    params = [jnp.asarray(g, jnp.float32) for g in gradients(50)]
    ours = sfpo.adamw8bit(0.1, weight_decay=0.1, mu_dtype=None, nu_dtype="float32")
    theirs = optax.adamw(0.1, weight_decay=0.1)
    with jax.numpy_dtype_promotion("standard"):
        states = [ours.init(params), theirs.init(params)]
        move, their_move = jax.jit(ours.update), jax.jit(theirs.update)
        for step in range(3):
            grads = [jnp.asarray(g, jnp.float32) for g in gradients(step)]
            found, states[0] = move(grads, states[0], params)
            expected, states[1] = their_move(grads, states[1], params)
            for f, e in zip(found, expected, strict=True):
                np.testing.assert_allclose(f, e, rtol=2e-5, atol=1e-7)


def test_bytes_a_parameter() -> None:
    params = {"w": jnp.zeros((512, 1024)), "b": jnp.zeros(1024)}

    def size(**kinds: Any) -> float:
        state = jax.eval_shape(sfpo.adamw8bit(0.1, **kinds).init, params)
        weights = (512 + 1) * 1024
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state)) / weights

    assert size(mu_dtype=None, nu_dtype=None) == pytest.approx(8.0, abs=1e-4)
    assert size() == pytest.approx(2 + 8 / 256, abs=0.02)
    assert size(nu_dtype="factored") == pytest.approx(1 + 4 / 256, abs=0.03)


def test_stacked_layers_are_each_layer() -> None:
    layers, shape = 3, (20, 300)
    tx = sfpo.adamw8bit(0.1)
    grads = jnp.asarray([gradients(i, [shape])[0] for i in range(layers)], jnp.float32)
    stacked = jax.jit(jax.vmap(tx.init))(grads)
    update = jax.jit(jax.vmap(lambda g, s: tx.update(g, s)))
    init, single = jax.jit(tx.init), jax.jit(tx.update)
    one_by_one = [init(g) for g in grads]
    for _ in range(2):
        updates, stacked = update(grads, stacked)
        pairs = [single(g, s) for g, s in zip(grads, one_by_one, strict=True)]
        one_by_one = [s for _, s in pairs]
        for i, (expected, _) in enumerate(pairs):
            np.testing.assert_allclose(updates[i], expected, rtol=1e-5)
    for i, expected in enumerate(one_by_one):
        mu: Any = stacked.mu
        np.testing.assert_allclose(mu.scales[i], expected.mu.scales, rtol=1e-5)


def test_it_is_local_in_shard_map(mesh8: Mesh) -> None:
    params = jnp.asarray(gradients(0, [(64, 512)])[0], jnp.float32)
    tx = sfpo.adamw8bit(0.1)
    rows, whole = PartitionSpec("data"), PartitionSpec()
    state = jax.eval_shape(tx.init, params)
    specs = jax.tree.map(lambda x: rows if x.ndim else whole, state)
    update = jax.shard_map(
        tx.update,
        mesh=mesh8,
        in_specs=(rows, specs),
        out_specs=(rows, specs),
        check_vma=False,
    )
    text = jax.jit(update).lower(params, state).compile().as_text()
    assert text is not None
    for collective in ("all-reduce", "all-gather", "all-to-all", "permute"):
        assert collective not in text
    state = jax.jit(tx.init)(params)
    updates, _ = jax.jit(update)(params, state)
    expected, _ = jax.jit(tx.update)(params, state)
    np.testing.assert_allclose(updates, expected, rtol=1e-5)


@pytest.mark.parametrize("nu", ["int8", "factored"])
def test_a_gradient_that_is_not_finite_changes_nothing(nu: str) -> None:
    shapes = [(16, 512), (3,)]
    tx = sfpo.adamw8bit(0.1, weight_decay=0.1, nu_dtype=nu)
    params = [jnp.ones(s) for s in shapes]
    state, update = jax.jit(tx.init)(params), jax.jit(tx.update)
    grads = [jnp.asarray(g, jnp.float32) for g in gradients(0, shapes)]
    _, state = update(grads, state, params)
    before = copies(state)
    for bad in (np.nan, np.inf, 1e25):
        spoiled = [grads[0].at[3, 3].set(bad), grads[1]]
        updates, after = update(spoiled, state, params)
        assert copies(after) == before
        assert not any(np.asarray(u).any() for u in jax.tree.leaves(updates))


def test_a_small_variance_does_not_blow_up() -> None:
    # In the block of one large gradient, small ones vanish for a byte.
    grads = jnp.full((16, 256), 1e-4).at[:, 0].set(1e3)
    tx = sfpo.adamw8bit(1.0)
    state, update = jax.jit(tx.init)(grads), jax.jit(tx.update)
    for step in range(20):
        sign = -1.0 if step % 2 else 1.0
        updates: Any
        updates, state = update(sign * grads, state)
        assert float(jnp.abs(updates).max()) < 2.0


def test_leaves_that_have_no_gradient_pass_and_dtypes_stay() -> None:
    params: Any = {
        "half": jnp.ones((16, 512), jnp.bfloat16),
        "int": jnp.arange(4),
        "empty": jnp.zeros((0, 3)),
    }
    tx = sfpo.adamw8bit(0.1, weight_decay=0.1)
    updates: Any
    updates, state = jax.jit(tx.update)(params, jax.jit(tx.init)(params), params)
    assert {k: u.dtype for k, u in updates.items()} == {
        k: p.dtype for k, p in params.items()
    }
    np.testing.assert_array_equal(updates["int"], params["int"])
    assert state.mu["half"].scales.dtype == jnp.float32
    with pytest.raises(ValueError, match="`params` is None, but `weight_decay`"):
        tx.update(params, state)
