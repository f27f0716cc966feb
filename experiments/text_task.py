"""Predicting the next byte of a text with a small GPT: parameters, loss and test."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.models.gpt import GPT, GPTConfig
from experiments.task import Task
from sfpo_jax.training import PADDING


def make_text_task(model: GPTConfig) -> Task:
    """The task whose batches are windows int32[b, model.length + 1].

    Its test counts tokens: a window of PADDING counts none.
    """

    def create(key: jax.Array) -> tuple[Any, Any]:
        return nnx.split(GPT(model, rngs=nnx.Rngs(key)))

    graph, shapes = nnx.eval_shape(lambda: create(jax.random.key(0)))

    def scores(
        params: Any, windows: jax.Array | np.ndarray, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """(loss, whether the likeliest token is right), float32[b, length]."""
        windows = jnp.maximum(windows, 0)
        logits = nnx.merge(graph, params)(windows[:, :-1], key=key)
        targets = windows[:, 1:]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        is_correct = jnp.argmax(logits, axis=-1) == targets
        return loss, is_correct.astype(jnp.float32)

    def loss_fn(
        params: Any, windows: jax.Array, key: jax.Array | None = None
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        loss, is_correct = scores(params, windows, key)
        return loss.mean(), {"accuracy": is_correct.mean()}

    def test(params: Any, windows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        loss, is_correct = scores(params, windows, None)
        is_real = (windows[:, 1:] != PADDING).astype(jnp.float32)
        return (is_correct * is_real).sum(), (loss * is_real).sum(), is_real.sum()

    create_params = jax.jit(lambda key: create(key)[1])
    return Task(
        init=lambda seed: create_params(jax.random.key(seed)),
        loss_fn=loss_fn,
        test=jax.jit(test),
        has_key=model.dropout > 0,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(shapes)),
    )
