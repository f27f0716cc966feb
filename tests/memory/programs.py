"""Programs the planner's tests plan, small enough to compile in a second."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import sfpo_jax as sfpo

WIDTH, LAYERS, BATCH = 256, 6, 128
LAYER_FLOPS = 2 * BATCH * WIDTH**2

needs_gpu_compiler = pytest.mark.gpu_compiler


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def loss(params: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ w), None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


def descend(params: Any, x: Any) -> Any:
    value, grads = jax.value_and_grad(loss)(params, x)
    return params - jnp.float32(0.1) * grads, value


STEP = jax.jit(descend, donate_argnums=0)
ARGS = (shape(LAYERS, WIDTH, WIDTH), shape(BATCH, WIDTH))


def build(mesh: Any, batch_size: int = BATCH) -> Any:
    """A data-parallel 1-bit step, as the command line and `plan` take it."""

    def batch_loss(params: Any, batch: Any) -> Any:
        return jnp.mean((jnp.tanh(batch @ params["w"]) @ params["w"]) ** 2)

    tx = sfpo.onebit_adam(0.1, warmup_steps=2, axis_name="data")
    step = sfpo.make_train_step(batch_loss, tx, mesh)
    return (
        step,
        step.init_shapes({"w": shape(WIDTH, WIDTH)}),
        shape(batch_size, WIDTH),
    )


def build_small(mesh: Any, batch_size: int) -> Any:
    """A program that compiles in no time and whose memory grows with the batch."""
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    x = jax.ShapeDtypeStruct((batch_size, WIDTH), jnp.float32, sharding=sharding)
    return jax.jit(lambda x: x.sum(axis=1)), x


def plan_on_cpu(step: Any, *args: Any, **options: Any) -> sfpo.Plan:
    return sfpo.plan(step, *args, **({"compiler": "cpu", "cache": False} | options))
