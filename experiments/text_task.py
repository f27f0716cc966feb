"""Predicting the next token of a text with a GPT: parameters, loss and test."""

from typing import Any

import jax
from flax import nnx

from experiments.models.gpt import GPT, GPTConfig
from experiments.models.layered import layered_gpt
from experiments.models.operator import operator_specs
from experiments.models.transformer import cast_weights
from experiments.task import Task, make_scored_task
from sfpo_jax import Operator


def make_text_task(
    model: GPTConfig, *, recompute: bool = False, operator: Operator | None = None
) -> Task:
    """The task whose batches are windows int32[b, model.length + 1].

    Its test counts tokens: a window of PADDING counts none.

    Args:
      model: sizes of the network.
      recompute: compute the activations inside each block again in the backward pass.
      operator: how large products are shared over the axis `op`.
    """

    def create(key: jax.Array) -> GPT:
        gpt = GPT(model, recompute=recompute, rngs=nnx.Rngs(key))
        if operator is not None:
            gpt.set_attributes(operator=operator)
        return cast_weights(gpt, model.param_dtype)

    shapes = nnx.eval_shape(lambda: create(jax.random.key(0)))
    graph, _ = nnx.split(shapes)

    def logits(params: Any, windows: jax.Array, key: jax.Array | None) -> jax.Array:
        return nnx.merge(graph, params)(windows[:, :-1], key=key)

    return make_scored_task(
        lambda key: nnx.split(create(key))[1],
        logits,
        lambda windows: windows[:, 1:],
        layered=layered_gpt(model, operator),
        has_key=model.dropout > 0,
        specs=None if operator is None else operator_specs(shapes),
        operator=operator,
    )
