"""What logits are worth: the loss, and whether the likeliest class is right."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sfpo_jax import Operator, shard_sequence
from sfpo_jax.collectives import widen
from sfpo_jax.training import PADDING


class Scores(NamedTuple):
    """Of each example, float32[...]; the loss float64 where the logits are."""

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
        widen(loss),
        is_correct.astype(jnp.float32),
        is_real.astype(jnp.float32),
    )


def mean_score(
    logits: jax.Array, labels: jax.Array, operator: Operator | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """(mean loss, {"accuracy": share}) of a training batch, which has no padding.

    Args:
      logits: [..., V]; with an operator, those of this rank's part of the sequences.
      labels: int[...], whole.
      operator: whose ranks share sequences; the mean over ranks of what each returns is
        then that over all tokens.
    """
    if operator is not None and operator.size() > 1:
        return masked_score(logits, labels, operator)
    scores = score(logits, labels)
    return scores.loss.mean(), {"accuracy": scores.is_correct.mean()}


def masked_score(
    logits: jax.Array, labels: jax.Array, operator: Operator | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """As `mean_score`, over labels that are not PADDING; 0 where all are."""
    total = (labels != PADDING).sum()
    if operator is not None:
        labels = shard_sequence(labels, operator, axis=-1, fill=PADDING)
    loss, is_correct, is_real = score(logits, labels)
    # Each rank sums its own tokens; the steps take the mean over ranks, not the sum.
    ranks = 1 if operator is None else operator.size()

    def mean(x: jax.Array) -> jax.Array:
        whole = jnp.maximum(total, 1).astype(x.dtype)
        return ranks * (x * is_real.astype(x.dtype)).sum() / whole

    return mean(loss), {"accuracy": mean(is_correct)}


def total_score(
    logits: jax.Array, labels: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(correct, summed loss, examples) of a test batch; padding does not count."""
    loss, is_correct, is_real = score(logits, labels)
    return (is_correct * is_real).sum(), (loss * is_real).sum(), is_real.sum()


def pretraining_score(
    logits: Any, labels: Any, operator: Operator | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """BERT's loss of hidden words plus that of the class; the accuracy is of words.

    Args:
      logits: of words [B, l, V] and of classes [B, C].
      labels: int32[B, L], PADDING where the word was not hidden, and int32[B].
      operator: as in `mean_score`.
    """
    (words, classes), (hidden, wanted) = logits, labels
    loss, aux = masked_score(words, hidden, operator)
    other, _ = mean_score(classes, wanted)
    return loss + other, aux


def pretraining_total(
    logits: Any, labels: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`total_score` of the hidden words alone; arguments as in `pretraining_score`."""
    return total_score(logits[0], labels[0])
