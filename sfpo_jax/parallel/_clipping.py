"""Clipping by the global norm inside a step, which knows all parts of the gradient."""

from typing import Any

import jax
import jax.numpy as jnp

from sfpo_jax._validate import check_range
from sfpo_jax.collectives import is_float


def check_max_norm(max_norm: float | None) -> None:
    """Raises ValueError for a norm that is not positive."""
    if max_norm is not None:
        check_range(
            "max_norm", max_norm, 0.0, float("inf"), "a gradient norm", open_low=True
        )


def clip_scale(norm: jax.Array, max_norm: float) -> jax.Array:
    """min(1, max_norm / norm); 1 where the norm is not finite, for others to skip."""
    limit = jnp.asarray(max_norm, norm.dtype)
    return jnp.where(jnp.isfinite(norm) & (norm > limit), limit / norm, 1)


def scaled(grads: Any, scale: jax.Array) -> Any:
    """The floating leaves times a scalar, in their own dtypes."""

    def times(g: jax.Array) -> jax.Array:
        return g * scale.astype(g.dtype) if is_float(g) else g

    return jax.tree.map(times, grads)
