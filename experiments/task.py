"""What a contender trains: parameters, loss and test."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Task(NamedTuple):
    """What a contender trains, whichever optimizer it uses.

    Attributes:
      init: seed -> parameters, a pytree of float32 arrays.
      loss_fn: (parameters, batch[, key]) -> (mean loss, {"accuracy": share}).
      test: (parameters, batch) -> (correct, summed loss, examples), float32
        scalars; rows of PADDING do not count.
      has_key: whether the loss takes a random key.
      parameters: number of entries to train.
    """

    init: Callable[[int], Any]
    loss_fn: Callable[..., Any]
    test: Callable[[Any, Any], tuple[jax.Array, jax.Array, jax.Array]]
    has_key: bool
    parameters: int
