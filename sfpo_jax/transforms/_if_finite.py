"""A reduction that a gradient which is not finite must not enter."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from sfpo_jax.collectives import (
    AxisName,
    all_finite,
    axis_names,
    vary,
    varying_axes,
)
from sfpo_jax.transforms._state import Selection

State = TypeVar("State")


def reduce_if_finite(
    reduce: Callable[[], tuple[list[jax.Array], State]],
    gradient: Selection,
    state: State,
    axis_name: AxisName,
    is_finite: bool,
) -> tuple[list[jax.Array], State]:
    """(means, new state) by `reduce`, or NaN and the old state.

    Args:
      reduce: () -> (means of the chosen leaves, new state).
      gradient: what is reduced, of one leaf at least.
      state: the old one, what each rank has for its own typed as varying over the axis.
      axis_name: mesh axis (or axes) of the reduction.
      is_finite: whether the caller knows already that all of it is, on all ranks;
        otherwise one scalar crosses the wire to tell.
    """
    if is_finite:
        return reduce()
    leaves = gradient.chosen()

    def skip() -> tuple[list[jax.Array], State]:
        # Typed for `shard_map` as the mean would be: alike along `axis_name` only.
        others = varying_axes(leaves[0]) - set(axis_names(axis_name))
        work = gradient.working_dtype()
        nans = [jnp.full(shape, jnp.nan, work) for shape in gradient.shapes()]
        return vary(nans, tuple(others)), state

    return lax.cond(all_finite(leaves, axis_name), reduce, skip)
