"""The update of one tree of parameters: reduced, transformed, rounded, applied."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sfpo_jax.collectives import widen
from sfpo_jax.parallel._clipping import scaled
from sfpo_jax.parallel._sharding import Axes, Layout
from sfpo_jax.parallel._stack_pass import wide_dtype
from sfpo_jax.parallel._step import rank_mean, where
from sfpo_jax.transforms import Rounding


class UnitState(NamedTuple):
    """What belongs to the parameters of `outer`, or of a layer."""

    tx: Any  # state of the transformation
    rounding: Any  # int8 error terms of bfloat16 weights; () without


# (whether all gradients of the step are finite, what to scale them by or None)
Verdict = tuple[jax.Array, jax.Array | None]


class Reduced(NamedTuple):
    """A gradient ready for the transformation."""

    grads: Any  # of what this rank updates
    square: jax.Array  # mean over ranks of the gradient's squared norm; 0 if known
    finite: jax.Array  # bool[], whether it may be applied


class Applied(NamedTuple):
    """What an update leaves."""

    params: Any
    state: UnitState
    square: jax.Array  # mean over ranks of the gradient's squared norm; 0 if known
    taken: jax.Array  # bool[], whether anything was applied


class UnitUpdate(NamedTuple):
    """How parameters that are updated together are updated, in two stages.

    Attributes:
      tx: the gradient transformation; it sees float32 in place of what is narrower.
      rounding: how updates are added.
      batch_axes: mesh axes of more than one rank that the batch is split over.
      ranks: ranks along them.
      dense: those over which gradients are averaged before `tx`.
      exchanges: whether `tx` itself sends anything.
    """

    tx: optax.GradientTransformationExtraArgs
    rounding: Rounding
    batch_axes: Axes
    ranks: int
    dense: Axes
    exchanges: bool

    def stages(self, layout: Layout) -> int:
        """How many of `reduce` and `apply` send anything, 0 to 2."""
        reduces = bool(layout.holders or self.dense)
        return int(reduces) + int(self.exchanges or layout.kind == "states")

    def init(self, layout: Layout, params: Any) -> UnitState:
        """The state of what this rank updates, led by the axis of the shards."""
        own = layout.own(params)
        return layout.lead(UnitState(self.tx.init(wide(own)), self.rounding.init(own)))

    def reduce(self, layout: Layout, grads: Any, verdict: Verdict | None) -> Reduced:
        """The exact part of the reduction.

        Args:
          layout: of the parameters.
          grads: whole gradients of this rank's batch.
          verdict: on all gradients of the step, where a pass has found out; None: these
            are looked at.
        """
        grads = layout.split.reduce(wide(grads))
        if verdict is None:
            square, scale = self.rank_mean(layout.split.square(grads)), None
            finite = jnp.isfinite(square)
        else:
            square = jnp.zeros([])
            finite, scale = verdict
        if scale is not None:
            grads = scaled(grads, scale)
        return Reduced(layout.reduce(grads, self.dense), square, finite)

    def apply(
        self,
        layout: Layout,
        params: Any,
        state: UnitState,
        reduced: Reduced,
        key: jax.Array,
    ) -> Applied:
        """The update, with what the transformation itself reduces.

        Args:
          layout: of the parameters.
          params: what this rank keeps.
          state: from `init`, or the update before.
          reduced: from `reduce`.
          key: for rounding, alike on all ranks.
        """
        own, held = layout.own(params), layout.unlead(state)

        def transformed() -> tuple[Any, UnitState]:
            updates, tx = self.tx.update(reduced.grads, held.tx, wide(own))
            new, rounding = self.rounding.apply(own, updates, held.rounding, key)
            return new, UnitState(tx, rounding)

        new, new_held = where(reduced.finite, transformed, (own, held))
        return Applied(
            layout.kept(new), layout.lead(new_held), reduced.square, reduced.finite
        )

    def rank_mean(self, square: jax.Array) -> jax.Array:
        """The mean of a scalar over the ranks."""
        return rank_mean(square, self.batch_axes, self.ranks)


def is_float(x: Any) -> bool:
    """Whether an array has a gradient."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def wide(tree: Any) -> Any:
    """Half precision as float32, in which all is transformed."""
    return jax.tree.map(lambda x: widen(x) if is_float(x) else x, tree)


def wide_shapes(tree: Any, leading: int = 0) -> Any:
    """Likewise of shapes, without their `leading` first axes."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[leading:], wide_dtype(x.dtype)), tree
    )
