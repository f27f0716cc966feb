"""Sums over a test set, one batch at a time."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from sfpo_jax.training._signals import Stop


def evaluate(
    test: Callable[[Any, Any], Any],
    params: Any,
    batches: Iterable[Any],
    stop: Stop | None = None,
) -> np.ndarray | None:
    """Adds up what a test gives for each batch.

    Args:
      test: (params, batch) -> a tuple of scalars, e.g. correct answers, summed loss and
        examples.
      params: the parameters.
      batches: the test set, on the devices already or not.
      stop: where given and requested, the test ends early.

    Returns:
      float64[scalars], or None where it ended early.

    Raises:
      ValueError: no batches.
    """
    sums: np.ndarray | None = None
    for batch in batches:
        if stop and stop.requested:
            return None
        # One at a time: independent programs with collectives, all in flight on eight
        # devices of one CPU, wait for each other's threads for ever.
        found = np.asarray(jax.device_get(test(params, batch)), np.float64)
        sums = found if sums is None else sums + found
    if sums is None:
        raise ValueError(
            "`batches` must hold at least one batch, got none: give a larger test set."
        )
    return sums
