"""State for other ranks: the mean of errors stays, and each entry's server error."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import sfpo_jax as sfpo
from sfpo_jax.transforms import is_per_rank, reshare
from sfpo_jax.transforms._moments import load

PARAMS = {"a": np.zeros((70, 33), np.float32), "b": np.zeros(517, np.float32)}
PAIRS = [(4, 2), (4, 8), (4, 3), (4, 1), (1, 4), (6, 4), (2, 2)]


def make(kind: str) -> optax.GradientTransformation:
    common: dict[str, Any] = {"axis_name": "data", "bucket_size": "4KB"}
    compressor = sfpo.compression.sign(block_size=64)
    match kind:
        case "onebit":
            return sfpo.onebit_adam(
                0.1, warmup_steps=2, compressor=compressor, **common
            )
        case "int8":
            return sfpo.onebit_adam(0.1, warmup_steps=2, error_dtype="int8", **common)
        case "chain":
            return sfpo.sfpo(0.1, 20, warmup_steps=2, axis_name="data")
    return sfpo.compressed_mean(compressor, **common)


def shapes_of(tx: optax.GradientTransformation, ranks: int) -> Any:
    mesh = jax.make_mesh(
        (ranks,), ("data",), (AxisType.Auto,), devices=jax.devices()[:ranks]
    )
    with jax.set_mesh(mesh):
        return jax.eval_shape(tx.init, PARAMS)


def filled(tx: optax.GradientTransformation, ranks: int) -> Any:
    """A state whose numbers are drawn, padding on the wire but zero."""
    state = shapes_of(tx, ranks)
    rng = np.random.default_rng(0)

    def draw(x: jax.ShapeDtypeStruct) -> np.ndarray:
        if x.dtype == jnp.int8:
            return rng.integers(-90, 90, x.shape).astype(np.int8)
        return np.asarray(rng.normal(size=x.shape), x.dtype)

    return jax.tree.map(draw, state)


def nodes(state: Any, is_server: bool) -> list[Any]:
    found = jax.tree.leaves(state, is_leaf=is_per_rank)
    return [
        node
        for node in found
        if is_per_rank(node) and bool(node.layout != ()) == is_server
    ]


def values(node: Any) -> list[np.ndarray]:
    kept = jax.tree.leaves(node.tree, is_leaf=lambda x: hasattr(x, "scales"))
    return [np.asarray(load(jax.tree.map(jnp.asarray, x), jnp.float32)) for x in kept]


def leaves_of_server(node: Any, ranks: int) -> list[np.ndarray]:
    """The error of every entry, by leaf."""
    buckets = node.layout.buckets(ranks)
    flat: dict[int, np.ndarray] = {}
    place = iter(values(node))
    for bucket in buckets:
        rows = [next(place).reshape(g.rows, g.width) for g in bucket.groups]
        own = bucket.unpack([jnp.asarray(x) for x in rows])
        flat |= {i: np.asarray(x) for i, x in zip(bucket.leaves, own, strict=True)}
    return [flat[i] for i in sorted(flat)]


@pytest.mark.parametrize("kind", ["onebit", "int8", "chain", "mean"])
@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_what_the_ranks_leave_is_kept(kind: str, old: int, new: int) -> None:
    tx = make(kind)
    saved, template = filled(tx, old), shapes_of(tx, new)
    found = reshare(saved, template)
    assert jax.tree.structure(found) == jax.tree.structure(template)
    for x, like in zip(jax.tree.leaves(found), jax.tree.leaves(template), strict=True):
        assert (x.shape, x.dtype) == (like.shape, like.dtype)
    # A byte of a residual is half a hundredth of its block's largest.
    bound = 1e-6 if kind != "int8" else 0.02
    for before, after in zip(nodes(saved, False), nodes(found, False), strict=True):
        for x, y in zip(values(before), values(after), strict=True):
            largest = np.abs(x).max(initial=1e-9)
            assert np.abs(x.mean(0) - y.mean(0)).max() <= bound * largest
    for before, after in zip(nodes(saved, True), nodes(found, True), strict=True):
        olds, news = leaves_of_server(before, old), leaves_of_server(after, new)
        for x, y in zip(olds, news, strict=True):
            assert np.abs(x - y).max() <= bound * np.abs(x).max()


def test_merging_takes_the_mean_of_each_group_and_splitting_copies() -> None:
    tx = make("onebit")
    saved = filled(tx, 4)
    (before,) = nodes(saved, False)
    for new, expect in (
        (2, lambda x: x.reshape(2, 2, *x.shape[1:]).mean(1)),
        (8, lambda x: np.repeat(x, 2, axis=0)),
        (3, lambda x: np.repeat(x.mean(0, keepdims=True), 3, axis=0)),
    ):
        (after,) = nodes(reshare(saved, shapes_of(tx, new)), False)
        for x, y in zip(values(before), values(after), strict=True):
            np.testing.assert_allclose(y, expect(x), rtol=1e-6, atol=1e-7)


def test_what_the_ranks_share_is_not_touched() -> None:
    tx = make("chain")
    saved = filled(tx, 4)
    found = reshare(saved, shapes_of(tx, 2))
    before = jax.tree.leaves(saved, is_leaf=is_per_rank)
    after = jax.tree.leaves(found, is_leaf=is_per_rank)
    same = [(a, b) for a, b in zip(before, after, strict=True) if not is_per_rank(a)]
    assert len(same) > 4
    assert all(a is b for a, b in same)


def test_a_stack_of_layers_is_shared_layer_by_layer() -> None:
    tx = make("mean")
    layers = [filled(tx, 4) for _ in range(3)]
    stacked = jax.tree.map(lambda *x: np.stack(x), *layers)
    template = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), shapes_of(tx, 2)
    )
    found = reshare(stacked, template)
    for place, layer in enumerate(layers):
        alone = reshare(layer, shapes_of(tx, 2))
        jax.tree.map(
            lambda x, y, place=place: np.testing.assert_array_equal(x[place], y),
            found,
            alone,
        )


def test_other_shapes_are_refused() -> None:
    tx = make("mean")
    saved = filled(tx, 4)
    other = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((2, x.shape[1] + 1, *x.shape[2:]), x.dtype),
        shapes_of(tx, 2),
    )
    with pytest.raises(ValueError, match="differ in more than the number of ranks"):
        reshare(saved, other)
