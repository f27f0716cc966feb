"""Memory inside a compressed step: what an optimizer carries is not there twice."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh

import sfpo_jax as sfpo
from sfpo_jax.kernels import native_platforms
from sfpo_jax.memory import find_device, planning_mesh
from tests.memory.programs import needs_gpu_compiler

# Gradients, and their dense average. In jnp the compressed phase takes more, its leaves
# joined to rows in float32.
ONEBIT = {True: 8.6, False: 20.1}
# The sparsified gradients and residuals beside them.
SFPO = {True: 20.6, False: 24.1}


@pytest.mark.parametrize(
    ("tx", "bounds"),
    [
        (sfpo.onebit_adam(1e-3, warmup_steps=5, axis_name="data"), ONEBIT),
        (sfpo.sfpo(1e-3, 100, axis_name="data"), SFPO),
    ],
    ids=["onebit_adam", "sfpo"],
)
def test_bytes_a_parameter(tx: Any, bounds: dict[bool, float], mesh8: Mesh) -> None:
    mesh = sfpo.make_mesh(devices=list(mesh8.devices.flat[:2]))
    params = {f"w{i}": jax.ShapeDtypeStruct((512, 512), jnp.float32) for i in range(8)}

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        leaves = jax.tree.leaves(params)
        return sum((jnp.sum(jnp.sin(x) * batch.mean()) for x in leaves), jnp.zeros([]))

    step = sfpo.make_train_step(loss, tx, mesh)
    state = step.init_shapes(params)
    batch = jax.ShapeDtypeStruct((8, 4), jnp.float32)
    memory = step.lower(state, batch).compile().memory_analysis()
    assert memory is not None
    entries = sum(x.size for x in params.values())
    # State and parameters are written where they were read.
    assert memory.alias_size_in_bytes >= 0.99 * memory.output_size_in_bytes
    bound = bounds["cpu" in native_platforms()]
    assert memory.temp_size_in_bytes / entries < bound


@needs_gpu_compiler
def test_a_gpu_copies_no_parameter() -> None:
    mesh = planning_mesh(find_device("a100-80gb"), {"data": 8})
    tx = sfpo.onebit_adam(1e-3, warmup_steps=5, axis_name="data", weight_decay=0.1)

    def loss(params: Any, batch: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(batch @ params) ** 2)

    step = sfpo.make_train_step(loss, tx, mesh)
    state = step.init_shapes(jax.ShapeDtypeStruct((512, 768), jnp.float32))
    batch = jax.ShapeDtypeStruct((64, 512), jnp.float32)
    text = step.compiled_text(state, batch)
    assert re.search(r"f32\[512,768\]", text)
    assert not re.search(r"= f32\[512,768\]\S* copy", text)
