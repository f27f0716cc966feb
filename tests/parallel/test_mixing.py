"""Transformations that mix leaves are told from those that work leaf by leaf."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import sfpo_jax as sfpo
from sfpo_jax.parallel._mixing import check_unmixed

W, B = jnp.zeros((40, 30)), jnp.zeros(3)
TREES = {
    "two": {"b": B, "w": W},
    "one": {"w": W},
    "bare": W,
    "integers first": {"a": jnp.zeros(2, jnp.int32), "w": W},
    "empty first": {"a": jnp.zeros((0, 3)), "b": B, "w": W},
    "float16": {"b": B.astype(jnp.float16), "w": W.astype(jnp.float16)},
    "one of float16": {"w": W.astype(jnp.float16)},
    "bfloat16": {"b": B.astype(jnp.bfloat16), "w": W.astype(jnp.bfloat16)},
}


def matrices(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def check(tx: Any, params: Any, mesh: Mesh) -> None:
    extended = optax.with_extra_args_support(tx)
    check_unmixed(extended, params, mesh, "layer by layer")


@pytest.mark.parametrize("name", TREES)
def test_a_global_norm_is_refused(name: str, mesh8: Mesh) -> None:
    tx = sfpo.clip_by_global_norm(1.0)
    message = "cannot run layer by layer: the update of .* changes with the gradient of"
    with pytest.raises(ValueError, match=message) as error:
        check(tx, TREES[name], mesh8)
    assert "\n" not in str(error.value)


def test_of_a_pair_the_leaf_is_named(mesh8: Mesh) -> None:
    with pytest.raises(ValueError, match=r"of another leaf .* gradient of \['w'\], "):
        check(optax.clip_by_global_norm(1.0), {"w": W}, mesh8)


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize(
    "tx",
    [
        optax.sgd(0.1),
        optax.chain(optax.clip(1.0), optax.scale(-0.1)),
        optax.masked(optax.clip_by_block_rms(1.0), matrices),
        sfpo.onebit_adam(0.1, warmup_steps=3, axis_name="data"),
    ],
    ids=["sgd", "clip", "masked", "onebit"],
)
def test_what_works_leaf_by_leaf_passes(tx: Any, name: str, mesh8: Mesh) -> None:
    check(tx, TREES[name], mesh8)


@pytest.mark.parametrize("mask", [{"w": True}, matrices], ids=["tree", "function"])
def test_masks_of_one_leaf_are_kept(mask: Any, mesh8: Mesh) -> None:
    tx = optax.masked(optax.clip_by_global_norm(1.0), mask)
    with pytest.raises(ValueError, match="cannot run layer by layer"):
        check(tx, {"w": W}, mesh8)
    free = optax.masked(optax.clip_by_global_norm(1.0), {"w": False})
    check(free, {"w": W}, mesh8)


def test_trees_without_floats_pass(mesh8: Mesh) -> None:
    for params in ({}, {"n": np.zeros(3, np.int32)}, {"e": jnp.zeros((0, 2))}):
        check(optax.clip_by_global_norm(1.0), params, mesh8)
