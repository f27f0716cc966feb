"""What logits are worth: the loss, and whether the likeliest class is right."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from sfpo_jax.training import PADDING


class Scores(NamedTuple):
    """Of each example, float32[...]."""

    loss: jax.Array  # cross-entropy, in nats
    is_correct: jax.Array  # 1 where the likeliest class is the label
    is_real: jax.Array  # 0 where the label is PADDING


def score(logits: jax.Array, labels: jax.Array) -> Scores:
    """Scores logits [..., V] against labels int[...]."""
    is_real = labels != PADDING
    labels = jnp.maximum(labels, 0)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    is_correct = jnp.argmax(logits, axis=-1) == labels
    return Scores(
        loss.astype(jnp.float32),
        is_correct.astype(jnp.float32),
        is_real.astype(jnp.float32),
    )


def mean_score(
    logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(mean loss, {"accuracy": share}) of a training batch, which has no padding."""
    scores = score(logits, labels)
    return scores.loss.mean(), {"accuracy": scores.is_correct.mean()}


def total_score(
    logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(correct, summed loss, examples) of a test batch; padding does not count."""
    loss, is_correct, is_real = score(logits, labels)
    return (is_correct * is_real).sum(), (loss * is_real).sum(), is_real.sum()
