"""A conditional that works in place."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

T = TypeVar("T")


def run_once(condition: jax.Array, update: Callable[[T], T], value: T) -> T:
    """`update(value)` where the condition holds, else `value`.

    A loop of one turn or none. XLA gives the results of a conditional buffers of their
    own, so that an optimizer's state would be copied in every step and be there twice
    within it; what a loop carries stays where it is.

    Args:
      condition: bool[], alike on all ranks where `update` has collectives.
      update: a function of a tree to one of the same shapes, dtypes and varying axes.
      value: the tree.

    Example:
      >>> run_once(jnp.array(True), lambda x: x + 1, jnp.array(2)).item()
      3
    """

    def turn(carry: tuple[jax.Array, T]) -> tuple[jax.Array, T]:
        return jnp.zeros_like(condition), update(carry[1])

    return lax.while_loop(lambda carry: carry[0], turn, (condition, value))[1]
