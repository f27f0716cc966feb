"""Classifying images with a Vision Transformer: parameters, loss and test."""

from typing import Any

import jax
from flax import nnx

from experiments.data.batches import Batch
from experiments.data.images import Dataset
from experiments.image_task import image_reader
from experiments.models.layered import layered_vit
from experiments.models.operator import operator_specs
from experiments.models.vit import ViT, ViTConfig
from experiments.task import Task, make_scored_task
from sfpo_jax import Operator


def make_task(
    model: ViTConfig,
    dataset: Dataset,
    *,
    recompute: bool,
    operator: Operator | None = None,
) -> Task:
    """Puts a model and a data set together.

    Args:
      model: sizes of the network.
      dataset: what it learns.
      recompute: compute the activations inside each block again in the backward pass.
      operator: how large products are shared over the axis `op`.

    Raises:
      ValueError: images or classes that do not fit the model.
    """
    unpack = image_reader(model, dataset)

    def create(key: jax.Array) -> ViT:
        vit = ViT(model, recompute=recompute, rngs=nnx.Rngs(key))
        if operator is not None:
            vit.set_attributes(operator=operator)
        return vit

    shapes = nnx.eval_shape(lambda: create(jax.random.key(0)))
    graph, _ = nnx.split(shapes)

    def logits(params: Any, batch: Batch, key: jax.Array | None) -> jax.Array:
        return nnx.merge(graph, params)(unpack(batch)[0], key=key)

    return make_scored_task(
        lambda key: nnx.split(create(key))[1],
        logits,
        lambda batch: batch.labels,
        layered=layered_vit(model, unpack, operator),
        has_key=model.dropout > 0,
        specs=None if operator is None else operator_specs(shapes),
    )
