"""Layers whose gradient travels while the layers below are differentiated.

A collective cannot stay open from one turn of a loop to the next. So a gradient goes
through the backward loop a stage a turn: made in one turn, reduced in a later one, sent
and applied in others. What a turn does for layers above needs nothing of the layer it
differentiates, and the compiler may run the transfers of the one under the products of
the other. Two transfers of one gradient in the same turn would wait for each other.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# (layer number, value, what is the layer's) -> (value for the next stage, the same new)
Run = Callable[[jax.Array, Any, Any], tuple[Any, Any]]


class Stage(NamedTuple):
    """A part of a layer's update.

    Attributes:
      run: (layer number, value, what is the layer's) -> (value for the next stage, what
        is the layer's, new).
      sends: whether it has a collective, which can run under products.
    """

    run: Run
    sends: bool


class Pipeline:
    """Stages of a layer's update, spread over turns of the backward loop.

    Args:
      stages: in their order; the first takes the gradient.
      read: (carry as the turn began, carry now, layer number) -> what is the layer's.
        A read behind a write to the same stack has to wait for another layer's
        transfers; one beside it may cost a copy of the stack.
      write: (carry, layer number, that as it was, new) -> carry.
      depth: at most so many turns after the one that made the gradient; 0: in that.
      enter: (carry, layer number, gradient) -> what the first stage takes, in the turn
        that makes the gradient.

    Attributes:
      turns: the turns it takes, no more than there are stages that send.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        read: Callable[[Any, Any, jax.Array], Any],
        write: Callable[[Any, jax.Array, Any, Any], Any],
        depth: int,
        enter: Callable[[Any, jax.Array, Any], Any] = lambda carry, index, grads: grads,
    ) -> None:
        self._read, self._write, self._enter = read, write, enter
        senders = sum(stage.sends for stage in stages)
        self.turns = min(depth, senders)
        self._groups: list[list[Run]] = [[] for _ in range(max(1, self.turns))]
        found = -1
        for stage in stages:
            found += stage.sends
            group = max(found, 0) * self.turns // max(1, senders)
            self._groups[group].append(stage.run)

    def advance(
        self, index: jax.Array, waiting: tuple[Any, ...], carry: Any
    ) -> tuple[tuple[Any, ...], Any]:
        """Moves those that wait, which needs nothing of this turn's layer.

        Args:
          index: the layer that is differentiated in this turn.
          waiting: at place p what layer index + 1 + p waits with; () before the first
            of `turns` turns, in which it grows.
          carry: of the loop.

        Returns:
          (what goes on waiting, carry).
        """
        before, moved = carry, []
        for place, value in reversed(list(enumerate(waiting))):
            value, carry = self._run(place, index + 1 + place, value, before, carry)
            if place + 1 < self.turns:
                moved.insert(0, value)
        return tuple(moved), carry

    def enter(
        self, index: jax.Array, grads: Any, waiting: tuple[Any, ...], carry: Any
    ) -> tuple[tuple[Any, ...], Any]:
        """Takes in the gradient of layer `index`.

        Arguments and results are those of `advance`, from which `waiting` comes.
        """
        entered = self._enter(carry, index, grads)
        if self.turns == 0:
            return (), self._run(0, index, entered, carry, carry)[1]
        return (entered, *waiting), carry

    def finish(self, waiting: tuple[Any, ...], carry: Any) -> Any:
        """Brings to its end what waits after layer 0 was differentiated."""
        for layer, value in reversed(list(enumerate(waiting))):
            for group in range(layer, self.turns):
                value, carry = self._run(group, jnp.int32(layer), value, carry, carry)
        return carry

    def _run(
        self, group: int, index: jax.Array, value: Any, before: Any, carry: Any
    ) -> tuple[Any, Any]:
        old = new = self._read(before, carry, index)
        for run in self._groups[group]:
            value, new = run(index, value, new)
        return value, self._write(carry, index, old, new)
