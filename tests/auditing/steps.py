"""Steps with one planted fault each, small enough to compile in a moment."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp

from sfpo_jax.transforms import dequantize, quantize
from tests.memory.programs import shape

WIDTH = 64
BFLOAT16 = {
    "mu": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16),
    "count": jax.ShapeDtypeStruct((), jnp.int32),
}
INT8 = jax.eval_shape(lambda: {"mu": quantize(jnp.zeros((WIDTH, WIDTH)))})
GRADS = shape(WIDTH, WIDTH)


def keeps(state: Any, grads: Any) -> Any:
    mu = jnp.float32(0.9) * state["mu"].astype(jnp.float32) + grads
    return {"mu": mu.astype(jnp.bfloat16), "count": state["count"] + 1}, mu.sum()


def widens(state: Any, grads: Any) -> Any:
    mu = jnp.float32(0.9) * state["mu"].astype(jnp.float32) + grads  # widened
    return {"mu": mu, "count": state["count"] + 1}, mu.sum()


def dequantizes(state: Any, grads: Any) -> Any:
    return {"mu": dequantize(state["mu"]) + grads}  # widened


def line_of(function: Any, words: str) -> str:
    """ "file:line" of the line of a function that has these words."""
    lines, first = inspect.getsourcelines(function)
    number = next(i for i, line in enumerate(lines) if words in line)
    return f"{inspect.getsourcefile(function)}:{first + number}"


def build_keeps(mesh: Any) -> Any:
    del mesh
    return jax.jit(keeps, donate_argnums=0), BFLOAT16, GRADS


def build_widens(mesh: Any) -> Any:
    del mesh
    return jax.jit(widens, donate_argnums=0), BFLOAT16, GRADS
