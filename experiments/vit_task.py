"""Classifying images with a Vision Transformer: parameters, loss and test."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.data.batches import (
    PADDING,
    Batch,
    check_shapes,
    normalization,
    preprocess,
)
from experiments.data.images import Dataset
from experiments.models.vit import ViT, ViTConfig
from experiments.task import Task


def make_task(model: ViTConfig, dataset: Dataset, *, recompute: bool) -> Task:
    """Puts a model and a data set together.

    Args:
      model: sizes of the network.
      dataset: what it learns.
      recompute: compute the activations inside each block again in the backward pass.

    Raises:
      ValueError: images or classes that do not fit the model.
    """
    sample = dataset.train.sample()
    check_shapes(sample, model.image_size, model.channels)
    if dataset.classes > model.classes:
        raise ValueError(
            f"`model.classes` must be at least {dataset.classes}, the classes of "
            f"`data.source`, got {model.classes}."
        )
    scale = normalization(sample.images)

    def create(key: jax.Array) -> tuple[Any, Any]:
        return nnx.split(ViT(model, recompute=recompute, rngs=nnx.Rngs(key)))

    graph, shapes = nnx.eval_shape(lambda: create(jax.random.key(0)))

    def logits(params: Any, batch: Batch, key: jax.Array | None) -> jax.Array:
        images = preprocess(batch.images, scale, model.image_size, model.channels)
        return nnx.merge(graph, params)(images, key=key)

    def loss_fn(
        params: Any, batch: Batch, key: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        scores = logits(params, batch, key)
        loss = optax.softmax_cross_entropy_with_integer_labels(scores, batch.labels)
        is_correct = jnp.argmax(scores, axis=-1) == batch.labels
        return loss.mean(), {"accuracy": is_correct.astype(jnp.float32).mean()}

    def test(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array]:
        scores = logits(params, batch, None)
        is_real = (batch.labels != PADDING).astype(jnp.float32)
        labels = jnp.maximum(batch.labels, 0)
        loss = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
        is_correct = (jnp.argmax(scores, axis=-1) == labels).astype(jnp.float32)
        return (is_correct * is_real).sum(), (loss * is_real).sum(), is_real.sum()

    # One program instead of one for each layer's random numbers.
    create_params = jax.jit(lambda key: create(key)[1])
    return Task(
        init=lambda seed: create_params(jax.random.key(seed)),
        loss_fn=loss_fn,
        test=jax.jit(test),
        has_key=model.dropout > 0,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(shapes)),
    )
