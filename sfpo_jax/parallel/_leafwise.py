"""Scalars and trees inside a step: means over ranks, and choices between two trees."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

from sfpo_jax.collectives import axis_mean, is_float

Axes = tuple[str, ...]


def rank_mean(x: jax.Array, axes: Axes, ranks: int) -> jax.Array:
    """The mean of a scalar over the ranks along some axes."""
    return lax.psum(x, axes) / ranks if axes else x


def next_step(step: jax.Array) -> jax.Array:
    """step + 1, staying at the largest int32."""
    return jnp.asarray(optax.safe_increment(step))


def after(tree: Any, others: Any) -> Any:
    """The tree, which whoever reads it gets only when the others are there."""
    return lax.optimization_barrier((tree, others))[0]


def where(condition: jax.Array, make: Callable[[], Any], old: Any) -> Any:
    """What `make` returns where the condition holds, else `old`.

    The condition is alike on all ranks. On a CPU it is a branch: in a loop whose carry
    holds `old`, stacked, XLA's CPU compiler would otherwise fuse reads of one stack
    into writes of another, and copy them all in each turn. On a GPU it is a choice
    entry by entry, which fuses with the update and never waits for the host.
    """

    def branch() -> Any:
        return lax.cond(condition, make, lambda: old)

    def entries() -> Any:
        return optax.tree.where(condition, make(), old)

    return lax.platform_dependent(cpu=branch, default=entries)


def average(tree: Any, axes: Axes) -> Any:
    """Means of the floating leaves over the ranks; the others as they are."""
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if is_float(x)]
    means = axis_mean([leaves[i] for i in places], axes)
    for place, mean in zip(places, means, strict=True):
        leaves[place] = mean
    return treedef.unflatten(leaves)
