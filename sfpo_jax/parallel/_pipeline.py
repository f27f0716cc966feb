"""Layers whose gradient waits while the layers below are differentiated.

A collective cannot stay open from one turn of a loop to the next. So a gradient goes
through the backward loop one stage a turn: made in one turn, reduced in a later one,
exchanged and applied in the last. What a turn does for layers above needs nothing of
the layer it differentiates, and the compiler may run the transfers of the one under the
products of the other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

# Oldest last: place p waits for layer (the layer just differentiated) + 1 + p.
Waiting = tuple[Any, ...]


class Pipeline(NamedTuple):
    """How far behind its gradient a layer's update is.

    Attributes:
      depth: 0, a layer is updated in the turn that made its gradient; 1, it is reduced
        and updated in the next; 2, reduced in the next and updated in the one after.
      reduce: (gradient) -> reduced gradient.
      apply: (layer number, reduced gradient, carry) -> carry.
    """

    depth: int
    reduce: Callable[[Any], Any]
    apply: Callable[[jax.Array, Any, Any], Any]

    def turn(
        self, index: jax.Array, grads: Any, waiting: Waiting, carry: Any
    ) -> tuple[Waiting, Any]:
        """Takes in the gradient of layer `index`; the first `depth` turns only wait."""
        if self.depth == 0:
            return (), self.apply(index, self.reduce(grads), carry)
        if not waiting:
            return (grads,), carry
        reduced = self.reduce(waiting[0])
        if self.depth == 1:
            return (grads,), self.apply(index + 1, reduced, carry)
        if len(waiting) == 2:
            carry = self.apply(index + 2, waiting[1], carry)
        return (grads, reduced), carry

    def finish(self, waiting: Waiting, carry: Any) -> Any:
        """Updates what still waits after layer 0 was differentiated."""
        for place in reversed(range(len(waiting))):
            found = waiting[place]
            reduced = self.reduce(found) if place == 0 else found
            carry = self.apply(jax.numpy.int32(place), reduced, carry)
        return carry
