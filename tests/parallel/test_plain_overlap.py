"""Gradients of the plain step travel under the rest of the backward pass, on GPUs."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import sfpo_jax as sfpo
from sfpo_jax.collectives import overlaps
from sfpo_jax.memory import find_device, planning_mesh
from tests.memory.programs import needs_gpu_compiler

# 32 kernels of 4 MB; XLA makes some 30 MB one transfer.
LAYERS, WIDTH, WIDE = 16, 512, 2048
LARGE = 1_000_000  # bytes


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    for i in range(LAYERS):
        layer = params[f"layer{i}"]
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
    return jnp.mean(x**2)


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("options", "opcode"),
    [
        ({}, "all-reduce"),
        ({"max_norm": 1.0}, "all-reduce"),
        ({"shard": "states"}, "reduce-scatter"),
        ({"shard": "weights"}, "reduce-scatter"),
    ],
    ids=["whole", "clipped", "states", "weights"],
)
def test_all_gradients_but_the_last_hide(options: Any, opcode: str) -> None:
    mesh = planning_mesh(find_device("a100-80gb"), {"data": 8})
    step = sfpo.make_train_step(loss_fn, optax.adamw(1e-3), mesh, **options)
    kernels = {
        "up": jax.ShapeDtypeStruct((WIDTH, WIDE), jnp.float32),
        "down": jax.ShapeDtypeStruct((WIDE, WIDTH), jnp.float32),
    }
    params = {f"layer{i}": kernels for i in range(LAYERS)}
    batch = jax.ShapeDtypeStruct((4096, WIDTH), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):  # Optax's own AdamW
        text = step.compiled_text(step.init_shapes(params), batch)
    found = overlaps(text, {"node": 1, "data": 8, "op": 1})
    sent = [x for x in found if x.opcode == opcode and x.sent >= LARGE]
    assert len(sent) >= 4
    assert len([x for x in sent if x.products == 0]) == 1
