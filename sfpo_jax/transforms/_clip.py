"""Clipping by one norm for all ranks, without reducing the gradient first."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from sfpo_jax._validate import Scalar, check_range
from sfpo_jax.collectives import AxisName, axis_size, square_norm, vary, widen
from sfpo_jax.transforms._state import select


def global_norm(tree: Any, axis_name: AxisName = None) -> jax.Array:
    r"""sqrt(mean over ranks of \|g_i\|^2), one scalar over the wire; float32.

    It exceeds the norm of the mean gradient by up to sqrt(N), where the ranks'
    gradients are unrelated.
    """
    total = square_norm(select(tree).chosen())
    if axis_name is not None:
        total = lax.psum(vary(total, axis_name), axis_name) / axis_size(axis_name)
    return jnp.sqrt(total)


def clip_by_global_norm(
    max_norm: Scalar, axis_name: AxisName = None
) -> optax.GradientTransformationExtraArgs:
    r"""Scales the gradients of all ranks by min(1, max_norm / norm).

    With `axis_name`, norm = sqrt(mean over ranks of \|g_i\|^2): one scalar crosses the
    wire, all ranks scale alike, and no dense reduction is needed before a compressed
    one. It exceeds the norm of the mean gradient by up to sqrt(N): where a threshold
    was tuned on averaged gradients, expect to raise it. A non-finite gradient passes as
    it is, for what follows to skip.

    Args:
      max_norm: the largest norm that passes unscaled, positive.
      axis_name: the mesh axis of data parallelism; None leaves the norm local.

    Raises:
      ValueError: `max_norm` is not positive.

    Example:
      >>> import jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> tx = sfpo.clip_by_global_norm(1.0)
      >>> grads = jnp.array([3.0, 4.0])
      >>> updates, _ = tx.update(grads, tx.init(grads))
      >>> print(updates)
      [0.6 0.8]
    """
    check_range(
        "max_norm", max_norm, 0.0, float("inf"), "a gradient norm", open_low=True
    )

    def init_fn(params: optax.Params) -> optax.EmptyState:
        del params
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        del params, extra_args
        norm = global_norm(updates, axis_name)
        scale = jnp.where(norm > max_norm, max_norm / norm, 1.0)
        scale = jnp.where(jnp.isfinite(norm), scale, 1.0).astype(norm.dtype)
        chosen = select(updates)
        scaled = [widen(g) * scale.astype(widen(g).dtype) for g in chosen.chosen()]
        return chosen.replace(scaled), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
