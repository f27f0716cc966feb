"""What the default experiment sends, small tensors and all."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from experiments.models.vit import ViT
from experiments.run import make_contender
from experiments.vit_run import Config
from sfpo_jax import make_mesh, make_train_step
from sfpo_jax.training import build


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({}, 2.5),
        ({"algorithm": "sparse_1bit", "density": 0.1}, 1.6),
    ],
    ids=["SFPO", "sparse signs at 10 %"],
)
def test_bits_a_parameter(changes: dict[str, Any], limit: float) -> None:
    config = build(Config, {"communication": {"compression": changes}})
    mesh = make_mesh()
    contender = make_contender(config, mesh)
    model = nnx.eval_shape(lambda: ViT(config.model, rngs=nnx.Rngs(0)))
    shapes = nnx.state(model, nnx.Param)
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    # What is sent depends on the shapes of the gradient alone: any loss will do.
    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        return batch.mean() * sum(jnp.sum(x) for x in jax.tree.leaves(params))

    # Optax's schedules add numbers of two types.
    with jax.numpy_dtype_promotion("standard"):
        step = make_train_step(loss_fn, contender.tx, mesh)
        sent = step.wire_bytes(step.init(params), jnp.ones(8), phase="compressed")
    entries = sum(x.size for x in jax.tree.leaves(params))
    assert 8 * sum(sent.values()) / entries <= limit
