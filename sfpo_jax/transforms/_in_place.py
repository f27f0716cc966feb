"""Transformations that can write new parameters where the old ones lie.

Optax's `update` returns updates, an array as large as the parameters that is written
and read once more to add it. A transformation that knows its parameters can leave that
out. Both ways give the same numbers but for the last rounding.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sfpo_jax._validate import (
    Scalar,
    check_at_least,
    check_learning_rate,
    is_known,
)
from sfpo_jax.transforms._state import MaskOrFn, select


class InPlaceTransformation(optax.GradientTransformationExtraArgs):
    """An Optax transformation that also has `apply`, which leaves its updates out.

    Attributes:
      apply: (updates, state, params) -> (new params, new state), what
        `optax.apply_updates` makes of `update`.
    """

    apply: Callable[[Any, Any, Any], tuple[Any, Any]]

    def __new__(
        cls,
        init: Callable[..., Any],
        update: Callable[..., Any],
        apply: Callable[[Any, Any, Any], tuple[Any, Any]],
    ) -> "InPlaceTransformation":
        """The pair of functions that Optax knows, and the third."""
        made = super().__new__(cls, init, update)
        made.apply = apply
        return made

    def __getnewargs__(self) -> tuple[Any, ...]:
        """What copies and pickles are made from."""
        return self.init, self.update, self.apply

    # The inherited one, final to type checkers alone, makes an object without `apply`.
    def _replace(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, **changes: Any
    ) -> optax.GradientTransformationExtraArgs:
        """The pair with changes, alone: what else is here belongs to the old one."""
        return optax.GradientTransformationExtraArgs(*self)._replace(**changes)


def apply_gradients(
    tx: optax.GradientTransformation, grads: Any, state: Any, params: Any
) -> tuple[Any, Any]:
    """(new params, new state) by any transformation, in place where it can.

    Example:
      >>> import sfpo_jax as sfpo
      >>> tx = sfpo.onebit_adam(0.1, warmup_steps=10)
      >>> params = jnp.array([1.0, -2.0])
      >>> params, state = apply_gradients(tx, params, tx.init(params), params)
      >>> [round(float(p), 3) for p in params]
      [0.9, -1.9]
    """
    if isinstance(tx, InPlaceTransformation):
        return tx.apply(grads, state, params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


class Target(NamedTuple):
    """Parameters that are to move along directions u: p - rate (u + decay p).

    Attributes:
      params: float arrays.
      rate: the learning rate.
      decay: the decoupled weight decay.
      is_decayed: which of them decay.
    """

    params: list[jax.Array]
    rate: Any
    decay: Any
    is_decayed: Sequence[bool]

    def of(self, places: Sequence[int]) -> "Target":
        """The target of some of the parameters."""
        params = [self.params[i] for i in places]
        return self._replace(
            params=params, is_decayed=[self.is_decayed[i] for i in places]
        )

    def steps(self, directions: Sequence[jax.Array]) -> list[jax.Array]:
        """-rate (u + decay p), in the directions' dtype."""
        found = []
        for p, u, decays in zip(self.params, directions, self.is_decayed, strict=True):
            if decays:
                u = u + self.decay * p.astype(u.dtype)
            found.append(-jnp.asarray(self.rate, u.dtype) * u)
        return found

    def moved(self, directions: Sequence[jax.Array]) -> list[jax.Array]:
        """The new parameters, in their own dtypes."""
        pairs = zip(self.params, self.steps(directions), strict=True)
        return [(p.astype(step.dtype) + step).astype(p.dtype) for p, step in pairs]


class StepRule(NamedTuple):
    """How large a step is and what decays beside it; made by `step_rule`.

    Attributes:
      learning_rate: a number, or a schedule of the steps that were not skipped.
      weight_decay: decoupled decay.
      mask: leaves to decay, a tree of bools or a function of the parameters to one.
    """

    learning_rate: Any
    weight_decay: Any
    mask: MaskOrFn

    def target(self, updates: Any, params: Any, count: jax.Array) -> Target:
        """The target of the leaves of `updates` that a transformation works on.

        Args:
          updates: a tree like the parameters.
          params: them; None without decay, where only `steps` is asked for.
          count: int32[], steps before this one that were not skipped.

        Raises:
          ValueError: no `params`, but a decay.
        """
        decay, rate = self.weight_decay, self.learning_rate
        has_decay = not (is_known(decay) and decay == 0.0)
        if has_decay and params is None:
            raise ValueError(
                "`params` is None, but `weight_decay` needs them: call "
                "`tx.update(grads, state, params)`."
            )
        chosen = select(updates)
        decayed = set(select(params, self.mask).places) if has_decay else set()
        leaves = chosen.leaves
        if params is not None:
            leaves = chosen.treedef.flatten_up_to(params)
        return Target(
            [leaves[i] for i in chosen.places],
            rate(count) if callable(rate) else rate,
            decay,
            [i in decayed for i in chosen.places],
        )


def step_rule(learning_rate: Any, weight_decay: Scalar, mask: MaskOrFn) -> StepRule:
    """The rule of these arguments; ValueError for what is out of its range."""
    check_learning_rate(learning_rate)
    check_at_least("weight_decay", weight_decay, 0.0, "the decoupled decay")
    return StepRule(learning_rate, weight_decay, mask)
