"""Scores against the definition of the cross-entropy."""

import jax.numpy as jnp
import numpy as np

from experiments.scores import mean_score, score, total_score
from sfpo_jax.training import PADDING

LOGITS = np.array([[2.0, 0.0, 1.0], [0.0, 3.0, 0.0], [1.0, 0.0, 0.0]], np.float32)
LABELS = np.array([0, 2, 1], np.int32)


def test_loss_and_accuracy() -> None:
    shares = np.exp(LOGITS) / np.exp(LOGITS).sum(axis=1, keepdims=True)
    losses = -np.log(shares[np.arange(3), LABELS])
    found = score(jnp.asarray(LOGITS), jnp.asarray(LABELS))
    np.testing.assert_allclose(found.loss, losses, rtol=1e-6)
    np.testing.assert_array_equal(found.is_correct, [1, 0, 0])
    loss, aux = mean_score(jnp.asarray(LOGITS), jnp.asarray(LABELS))
    np.testing.assert_allclose([loss, aux["accuracy"]], [losses.mean(), 1 / 3])


def test_padding_does_not_count() -> None:
    labels = jnp.array([0, PADDING, PADDING])
    correct, loss, count = total_score(jnp.asarray(LOGITS), labels)
    assert (float(correct), float(count)) == (1.0, 1.0)
    np.testing.assert_allclose(loss, score(jnp.asarray(LOGITS), labels).loss[0])
