"""State that differs between ranks: where it lies, whatever wraps it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import sfpo_jax as sfpo
from sfpo_jax.transforms import is_per_rank

PARAMS = {"w": jnp.zeros((40, 30)), "b": jnp.zeros(3), "n": jnp.zeros(2, jnp.int32)}
OWN, SHARED = PartitionSpec("data"), PartitionSpec()


def inner(**arguments: Any) -> Any:
    return optax.chain(
        sfpo.sparsify(0.5, error_feedback=True, axis_name="data", **arguments),
        sfpo.onebit_adam(0.1, warmup_steps=3, axis_name="data"),
    )


WRAPPED = {
    "chain": inner(),
    "MultiSteps": optax.MultiSteps(inner(), 4),
    "inject_hyperparams": optax.inject_hyperparams(sfpo.onebit_adam)(
        learning_rate=0.1, warmup_steps=3, axis_name="data"
    ),
    "masked": optax.masked(inner(), {"w": True, "b": False, "n": False}),
    "partition": optax.partition(
        {"ours": inner(), "theirs": optax.adam(0.1)},
        {"w": "ours", "b": "theirs", "n": "theirs"},
    ),
    "sfpo": sfpo.sfpo(0.1, 10, axis_name="data"),
    "compressed_mean": optax.chain(
        sfpo.compressed_mean(sfpo.compression.sign(), "data"), optax.sgd(0.1)
    ),
    "low_rank_mean": optax.chain(sfpo.low_rank_mean(2, "data"), optax.sgd(0.1)),
    "adam": optax.adam(0.1),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_residuals_lie_along_the_axis_and_nothing_else(name: str, mesh8: Mesh) -> None:
    with jax.set_mesh(mesh8), jax.numpy_dtype_promotion("standard"):
        state = jax.eval_shape(WRAPPED[name].init, PARAMS)
    specs = sfpo.state_specs(state, "data")
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    marked = [n for n in jax.tree.leaves(state, is_leaf=is_per_rank) if is_per_rank(n)]
    residuals = {id(x) for x in jax.tree.leaves(marked)}
    assert bool(residuals) == (name != "adam")
    for leaf, spec in zip(jax.tree.leaves(state), jax.tree.leaves(specs), strict=True):
        assert spec == (OWN if id(leaf) in residuals else SHARED)
        if id(leaf) in residuals:
            assert leaf.shape[0] == 8
    # The residual of a leaf of (40, 30) is as large on each rank.
    assert any(x.shape == (8, 40, 30) for x in jax.tree.leaves(marked)) == (
        name != "adam"
    )


def test_several_axes_are_one() -> None:
    axes = ("node", "data")
    tx = sfpo.onebit_adam(0.1, warmup_steps=3, axis_name=axes)
    with jax.set_mesh(sfpo.make_mesh(node=2)):
        state = jax.eval_shape(tx.init, PARAMS)
    specs: Any = sfpo.state_specs(state, axes)
    assert specs.worker_error.tree["w"] == PartitionSpec(axes)
    shapes: Any = state
    assert shapes.worker_error.tree["w"].shape == (8, 40, 30)


def test_init_inside_shard_map_gives_the_same_state(mesh8: Mesh) -> None:
    tx = inner()
    with jax.set_mesh(mesh8):
        outside = jax.jit(tx.init)(PARAMS)
    specs = sfpo.state_specs(outside, "data")
    inside = jax.jit(
        jax.shard_map(tx.init, mesh=mesh8, in_specs=SHARED, out_specs=specs)
    )(PARAMS)
    assert jax.tree.structure(inside) == jax.tree.structure(outside)
    for a, b in zip(jax.tree.leaves(inside), jax.tree.leaves(outside), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_array_equal(a, b)


def test_init_without_the_mesh_says_what_to_do() -> None:
    with pytest.raises(ValueError, match="`axis_name` 'data' is no axis") as caught:
        inner().init(PARAMS)
    assert "jax.set_mesh(mesh)" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["onebit_adam", "compressed_mean", "low_rank_mean"])
def test_gradients_that_are_reduced_already_are_noticed(name: str, mesh8: Mesh) -> None:
    makers: dict[str, Any] = {
        "onebit_adam": sfpo.onebit_adam(0.1, warmup_steps=3, axis_name="data"),
        "compressed_mean": sfpo.compressed_mean(sfpo.compression.sign(), "data"),
        "low_rank_mean": sfpo.low_rank_mean(1, "data"),
    }
    tx = makers[name]

    def step(params: Any, state: Any, x: Any, is_own: bool) -> Any:
        def loss(params: Any) -> jax.Array:
            return jnp.sum(params * x[0])

        given = jax.lax.pcast(params, "data", to="varying") if is_own else params
        return tx.update(jax.grad(loss)(given), state, params)

    params, x = jnp.ones(5), jnp.ones((8, 5))
    with jax.set_mesh(mesh8):
        state = jax.eval_shape(tx.init, params)
    specs = sfpo.state_specs(state, "data")

    def trace(is_own: bool) -> None:
        mapped = jax.shard_map(
            lambda params, state, x: step(params, state, x, is_own),
            mesh=mesh8,
            in_specs=(SHARED, specs, OWN),
            out_specs=(SHARED, specs),
        )
        jax.eval_shape(mapped, params, state, x)

    trace(is_own=True)  # a warning would be an error here
    with pytest.warns(UserWarning, match="reduced densely"):
        trace(is_own=False)


def test_complex_leaves_are_refused_by_name() -> None:
    params = {"w": jnp.ones(4), "phase": jnp.ones(2, jnp.complex64)}
    for tx in (sfpo.onebit_adam(0.1, warmup_steps=1), sfpo.adamw8bit(0.1)):
        with pytest.raises(TypeError, match=r"\['phase'\] is complex64"):
            tx.init(params)
    # One that a mask leaves to another transformation is nobody's business here.
    masked = optax.masked(sfpo.adamw8bit(0.1), {"w": True, "phase": False})
    assert jax.tree.leaves(masked.init(params))
