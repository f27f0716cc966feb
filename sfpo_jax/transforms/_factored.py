r"""A second moment kept as the means of its rows and columns.

Shazeer & Stern 2018, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost",
https://arxiv.org/abs/1804.04235. Over the last two axes, any others being a batch,

    r_i = b2 r_i + (1 - b2) mean_j g_ij^2
    c_j = b2 c_j + (1 - b2) mean_i g_ij^2
    v_ij = r_i c_j / mean(r)

which is the v of these means with the least divergence from the full one. Their
constant 1e-30 added to g^2 is left out: a row or column that never had a gradient has
v = 0, as the full v would, and what follows tells it apart by that.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Below, two vectors save nothing that counts.
_MIN_SIZE = 4096


class Factored(NamedTuple):
    """Running means of g^2 of an array [..., n, m]."""

    rows: Any  # float[..., n], over the last axis
    columns: Any  # float[..., m], over the one before


def is_worth_factoring(shape: tuple[int, ...]) -> bool:
    """Whether a second moment of this shape is factored: a matrix of 4,096 entries."""
    return len(shape) >= 2 and math.prod(shape) >= _MIN_SIZE


def zeros_factored(shape: tuple[int, ...], dtype: jnp.dtype) -> Factored:
    """No gradient so far."""
    rows = jnp.zeros(shape[:-1], dtype)
    return Factored(rows, jnp.zeros((*shape[:-2], shape[-1]), dtype))


def update_factored(
    node: Factored, grads: jax.Array, b2: Any, fresh: Any = None
) -> Factored:
    """The means after one more gradient [..., n, m], of weight `fresh`, or 1 - b2."""
    squares, fresh = grads * grads, 1 - b2 if fresh is None else fresh
    return Factored(
        b2 * node.rows + fresh * jnp.mean(squares, axis=-1),
        b2 * node.columns + fresh * jnp.mean(squares, axis=-2),
    )


def expand(node: Factored) -> jax.Array:
    """The second moment [..., n, m] that the means stand for.

    Example:
      >>> grads = jnp.array([[1.0, 2.0], [3.0, 6.0]])
      >>> means = update_factored(zeros_factored((2, 2), grads.dtype), grads, 0.0)
      >>> print(expand(means).round(3))
      [[ 1.  4.]
       [ 9. 36.]]
    """
    mean = jnp.mean(node.rows, axis=-1, keepdims=True)
    # Divided before it is multiplied: the product of two small means underflows.
    share = node.columns / jnp.where(mean > 0, mean, 1)
    return node.rows[..., :, None] * share[..., None, :]
