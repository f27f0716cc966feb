"""The update of one tree of parameters: reduced, sent, transformed, rounded, kept."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sfpo_jax.collectives import is_float, widen
from sfpo_jax.parallel._clipping import scaled
from sfpo_jax.parallel._leafwise import rank_mean, where
from sfpo_jax.parallel._sharding import Axes, Layout
from sfpo_jax.parallel._stack_pass import wide_dtype
from sfpo_jax.transforms import Phase, Rounding, StagedTransformation


class UnitState(NamedTuple):
    """What belongs to the parameters of `outer`, or of a layer."""

    tx: Any  # state of the transformation
    rounding: Any  # int8 error terms of bfloat16 weights; () without


# (whether all gradients of the step are finite, what to scale them by or None)
Verdict = tuple[jax.Array, jax.Array | None]


class Reduced(NamedTuple):
    """A gradient on its way to the transformation, or inside it."""

    value: Any  # of what this rank updates; after `send`, what it sent
    square: jax.Array  # mean over ranks of the gradient's squared norm; 0 if known
    finite: jax.Array  # bool[], whether it may be applied


class Applied(NamedTuple):
    """What an update leaves."""

    own: Any  # what this rank updates, for `Layout.kept`
    state: UnitState
    square: jax.Array  # as above
    taken: jax.Array  # bool[], whether anything was applied


class UnitUpdate(NamedTuple):
    """How parameters that are updated together are updated, in stages.

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

    def init(self, layout: Layout, params: Any) -> UnitState:
        """The state of what this rank updates, led by the axis of the holders."""
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

    def send(
        self, layout: Layout, state: UnitState, reduced: Reduced, phase: Phase | None
    ) -> tuple[Reduced, UnitState]:
        """The first half of the transformation, where it has halves."""
        tx = self.tx
        if phase is None or not isinstance(tx, StagedTransformation):
            return reduced, state

        def sent(held: UnitState) -> tuple[Any, UnitState]:
            way, new = tx.send(reduced.value, held.tx, phase)
            return way, held._replace(tx=new)

        way, state = _where(layout, reduced.finite, sent, state)
        return reduced._replace(value=way), state

    def receive(
        self,
        layout: Layout,
        params: Any,
        state: UnitState,
        sent: Reduced,
        key: jax.Array,
        phase: Phase | None,
    ) -> Applied:
        """The update.

        Args:
          layout: of the parameters.
          params: what this rank keeps.
          state: from `send`.
          sent: from there.
          key: for rounding, alike on all ranks.
          phase: which phase of 1-bit Adam the step is, where `tx` has phases.
        """
        own, run = layout.own(params), self._update(phase)

        def transformed(held: UnitState) -> tuple[Any, UnitState]:
            updates, tx = run(sent.value, held.tx, wide(own))
            new, rounding = self.rounding.apply(
                own, updates, held.rounding, key, layout.parts()
            )
            return new, UnitState(tx, rounding)

        new, state = _where(layout, sent.finite, transformed, state, own)
        return Applied(new, state, sent.square, sent.finite)

    def _update(self, phase: Phase | None) -> Callable[[Any, Any, Any], Any]:
        tx = self.tx
        if phase is not None and isinstance(tx, StagedTransformation):
            return lambda value, state, params: tx.receive(value, state, params, phase)
        return lambda value, state, params: tx.update(
            value, state, params, phase=phase, is_finite=True
        )

    def rank_mean(self, square: jax.Array) -> jax.Array:
        """The mean of a scalar over the ranks."""
        return rank_mean(square, self.batch_axes, self.ranks)


def _where(
    layout: Layout,
    condition: jax.Array,
    make: Callable[[UnitState], tuple[Any, UnitState]],
    state: UnitState,
    default: Any = None,
) -> tuple[Any, UnitState]:
    """`make` of the state without its axis of holders, where the condition holds.

    Arrays of the state that `make` leaves alone come back as the same objects: written
    back into a stack beside other writes they would cost a copy of all of it.

    Args:
      layout: of the parameters.
      condition: bool[], alike on all ranks.
      make: (state) -> (value, state).
      state: led by the axis of the holders.
      default: the value where the condition does not hold; None for zeros.
    """
    leaves, treedef = jax.tree.flatten(state)
    old = jax.tree.leaves(layout.unlead(state))
    changed: list[int] = []

    def made() -> tuple[Any, list[jax.Array]]:
        value, new = make(treedef.unflatten(old))
        found = jax.tree.leaves(new)
        changed[:] = [i for i, x in enumerate(found) if x is not old[i]]
        return value, [found[i] for i in changed]

    shapes = jax.eval_shape(made)[0]
    if default is None:
        default = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    value, new = where(condition, made, (default, [old[i] for i in changed]))
    for place, leaf in zip(changed, layout.lead(new), strict=True):
        leaves[place] = leaf
    return value, treedef.unflatten(leaves)


def wide(tree: Any) -> Any:
    """Half precision as float32, in which all is transformed."""
    return jax.tree.map(lambda x: widen(x) if is_float(x) else x, tree)


def wide_shapes(tree: Any, leading: int = 0) -> Any:
    """Likewise of shapes, without their `leading` first axes."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[leading:], wide_dtype(x.dtype)), tree
    )
