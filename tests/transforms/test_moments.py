"""Kinds of states: what arguments name them, and what is written comes back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfpo_jax.kernels import make_seed
from sfpo_jax.transforms import Factored, Quantized
from sfpo_jax.transforms._moments import (
    load,
    next_variance,
    resolve_kind,
    store,
    zeros_moment,
)

ALLOWED = ("float32", "bfloat16", "int8", "factored")
FLOAT32 = jnp.dtype(jnp.float32)


def test_names_and_dtypes_name_a_kind() -> None:
    assert resolve_kind("nu_dtype", None, ALLOWED) is None
    assert resolve_kind("nu_dtype", "factored", ALLOWED) == "factored"
    for name in ("float32", "bfloat16", "int8"):
        for value in (name, jnp.dtype(name), getattr(jnp, name)):
            assert resolve_kind("nu_dtype", value, ALLOWED) == jnp.dtype(name)
    for bad in ("packed", jnp.float16, 8, "int16"):
        with pytest.raises(ValueError, match=r'^`nu_dtype` must .*"int8", "factored"'):
            resolve_kind("nu_dtype", bad, ALLOWED)


@pytest.mark.parametrize(
    ("kind", "large", "small"),
    [
        (None, "float32", "float32"),
        ("bfloat16", "bfloat16", "bfloat16"),
        ("int8", Quantized, "float32"),
        ("factored", Factored, "float32"),
    ],
)
def test_arrays_too_small_stay_floats(kind: Any, large: Any, small: Any) -> None:
    resolved = resolve_kind("nu_dtype", kind, ALLOWED)
    for shape, expected in (((64, 128), large), ((64, 63), small), ((), small)):
        node = zeros_moment(shape, resolved, FLOAT32, signed=False)
        if isinstance(expected, str):
            assert (node.shape, node.dtype.name) == (shape, expected)
        else:
            assert isinstance(node, expected)
        loaded = load(node, FLOAT32)
        assert loaded.shape == shape and not np.asarray(loaded).any()
    node = zeros_moment((64, 128), resolved, FLOAT32, signed=False)
    grads = jnp.asarray(np.random.default_rng(0).normal(size=(64, 128)), jnp.float32)
    v, new = jax.jit(next_variance)(node, grads, 0.9, make_seed(jnp.int32(1)))
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, node)
    np.testing.assert_allclose(load(new, FLOAT32).mean(), v.mean(), rtol=0.01)
    if kind != "factored":
        np.testing.assert_allclose(v, 0.1 * grads * grads, rtol=1e-5)
        kept = store(v, node)
        assert jax.tree.structure(kept) == jax.tree.structure(node)
