"""A program whose memory is drawn in docs/memory.md.

    python -m sfpo_jax plan experiments.bench.lifetimes:vit --mesh data=8 \
        --lifetimes docs/results/lifetimes.png

Six blocks of a Vision Transformer, written out one after the other, trained by 1-bit
Adam: large enough that activations count, and compiled in a minute.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

import sfpo_jax as sfpo
from experiments.models.vit import ViT, ViTConfig

MODEL = ViTConfig(
    image_size=64,
    patch_size=8,
    channels=3,
    width=256,
    depth=6,
    heads=4,
    mlp_width=1024,
    classes=10,
    pool="mean",
)
IMAGES = 256  # over all devices


def vit(mesh: Mesh) -> tuple[Any, ...]:
    """The train step and the shapes of its arguments, as `plan` takes them."""
    graph, params = nnx.split(nnx.eval_shape(lambda: ViT(MODEL, rngs=nnx.Rngs(0))))

    def loss(params: Any, batch: Any) -> jax.Array:
        images, labels = batch
        logits = nnx.merge(graph, params)(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    tx = sfpo.onebit_adam(1e-3, warmup_steps=100, axis_name="data")
    step = sfpo.make_train_step(loss, tx, mesh)
    size = (IMAGES, MODEL.image_size, MODEL.image_size, MODEL.channels)
    images = jax.ShapeDtypeStruct(size, jnp.float32)
    labels = jax.ShapeDtypeStruct((IMAGES,), jnp.int32)
    return step, step.init_shapes(params), (images, labels)
