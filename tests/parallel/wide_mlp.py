"""A stack of MLPs as wide as makes a GPU's compiler treat its products as large."""

from typing import Any

import jax
import jax.numpy as jnp

import sfpo_jax as sfpo
from tests.memory.programs import shape

WIDTH, DEPTH = 512, 8
TOKENS = 512  # of one device


def shapes(vocabulary: int) -> Any:
    """Of the parameters."""
    return {
        "outer": {"tokens": shape(vocabulary, WIDTH)},
        "layers": {
            "up": shape(DEPTH, WIDTH, 4 * WIDTH),
            "down": shape(DEPTH, 4 * WIDTH, WIDTH),
        },
    }


def embed(outer: Any, batch: jax.Array, key: Any) -> jax.Array:
    del key
    return outer["tokens"].astype(jnp.bfloat16)[batch]


def block(layer: Any, x: jax.Array, key: Any) -> jax.Array:
    del key
    hidden = jax.nn.gelu(x @ layer["up"].astype(x.dtype))
    return x + hidden @ layer["down"].astype(x.dtype)


def loss(outer: Any, x: jax.Array, batch: jax.Array, key: Any) -> jax.Array:
    del batch, key
    logits = x @ outer["tokens"].T.astype(x.dtype)
    return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1))


def onebit(axis_name: str) -> Any:
    return sfpo.onebit_adam(1e-3, warmup_steps=10, axis_name=axis_name)


MODEL = sfpo.LayeredModel(embed, block, loss)
