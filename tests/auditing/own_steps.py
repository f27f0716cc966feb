"""The project's own steps, of a model with tied embeddings and a stack of layers."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import sfpo_jax as sfpo
from tests.memory.programs import shape

WIDTH, DEPTH, TOKENS = 64, 4, 256
PARAMS = {
    "outer": {"tokens": shape(TOKENS, WIDTH)},
    "layers": {
        "up": shape(DEPTH, WIDTH, 2 * WIDTH),
        "down": shape(DEPTH, 2 * WIDTH, WIDTH),
    },
}
BATCH = jax.ShapeDtypeStruct((8, 16), jnp.int32)
OPTIMIZERS: dict[str, Any] = {
    "onebit_adam": lambda axis: sfpo.onebit_adam(1e-3, warmup_steps=5, axis_name=axis),
    "sfpo": lambda axis: sfpo.sfpo(1e-3, 100, axis_name=axis),
    "adamw8bit": lambda axis: sfpo.adamw8bit(1e-3),
    "dense": lambda axis: optax.sgd(0.1, momentum=0.9),
}


def embed(outer: Any, batch: Any, key: Any) -> Any:
    del key
    return outer["tokens"][batch]


def block(layer: Any, x: Any, key: Any) -> Any:
    del key
    return x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]


def head(outer: Any, x: Any, batch: Any, key: Any) -> Any:
    del batch, key
    return jnp.mean(jax.nn.logsumexp(x @ outer["tokens"].T, axis=-1))


def whole_loss(params: Any, batch: Any) -> Any:
    x = embed(params["outer"], batch, None)
    x, _ = lax.scan(lambda x, layer: (block(layer, x, None), None), x, params["layers"])
    return head(params["outer"], x, batch, None)


def mesh_shape(shard: str) -> dict[str, int]:
    """Shards lie along `data`, and what compresses does so between nodes."""
    return {"data": 2} if shard == "none" else {"node": 2, "data": 2}


def builder(kind: str, optimizer: str, shard: Any) -> Any:
    """build(mesh) of a "plain" or a "layered" step."""

    def build(mesh: Any) -> Any:
        tx = OPTIMIZERS[optimizer]("data" if shard == "none" else "node")
        if kind == "layered":
            model = sfpo.LayeredModel(embed, block, head)
            step = sfpo.make_layered_train_step(model, tx, mesh, shard=shard)
        else:
            step = sfpo.make_train_step(whole_loss, tx, mesh, shard=shard)
        return step, step.init_shapes(PARAMS), BATCH

    return build
