"""Transformations whose update comes in two halves, with transfers in both."""

from collections.abc import Callable
from typing import Any

import optax

from sfpo_jax.transforms._in_place import InPlaceTransformation
from sfpo_jax.transforms._phase import Phase


class StagedTransformation(InPlaceTransformation):
    """An in-place transformation that other work may run in the middle of.

    The phase is decided, and it is agreed that all gradients are finite, before.

    Attributes:
      send: (updates, state, phase) -> (what is on its way, state).
      receive: (what is on its way, state, params, phase) -> (updates, state).
    """

    send: Callable[[Any, Any, Phase], tuple[Any, Any]]
    receive: Callable[[Any, Any, Any, Phase], tuple[Any, Any]]

    def __new__(
        cls,
        init: Callable[..., Any],
        update: Callable[..., Any],
        apply: Callable[[Any, Any, Any], tuple[Any, Any]],
        send: Callable[[Any, Any, Phase], tuple[Any, Any]],
        receive: Callable[[Any, Any, Any, Phase], tuple[Any, Any]],
    ) -> "StagedTransformation":
        """The three functions of the base, and the halves."""
        made = optax.GradientTransformationExtraArgs.__new__(cls, init, update)
        made.apply, made.send, made.receive = apply, send, receive
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        """What copies and pickles are made from."""
        return *super().__getnewargs__(), self.send, self.receive
