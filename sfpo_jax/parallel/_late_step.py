"""The training step whose update comes a whole step late.

The update of step t is made of the gradient of step t - 1,

    p_{t+1} = p_t - U(mean_i g_i(p_{t-1})),

as in PipeDream-2BW (Narayanan et al. 2020, https://arxiv.org/abs/2006.09503), so that
what one gradient is sent for and the passes that make the next need nothing of each
other. The gradients that wait lie in the state, each rank's own.

What runs beside what is for XLA to choose, and four orders make it choose well, each
given where it is used: weights are read behind a barrier, the first transfer of several
ends with the forward pass, weights are written when they have been read, and scalars of
this step's batch are summed last.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from sfpo_jax.collectives import is_float, square_norm
from sfpo_jax.parallel._leafwise import after, rank_mean
from sfpo_jax.parallel._step import TrainState
from sfpo_jax.parallel._train_step import Fresh, TrainStep
from sfpo_jax.transforms import (
    SCOPES,
    PerRank,
    Phase,
    StagedTransformation,
    compresses_next,
    run_once,
)


class LateTrainStep(TrainStep):
    """A training step with `staleness=1`; made by `make_train_step`."""

    staleness = 1

    def _creation(
        self, params: Any, key: Any, model_state: Any
    ) -> tuple[Callable[..., TrainState], TrainState]:
        create, _ = super()._creation(params, key, model_state)
        layout = self._placed()

        def zeros(params: Any) -> PerRank:
            shapes = jax.eval_shape(layout.full, params)
            return self._put(
                jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
            )

        def create_late(params: Any, key: Any, model_state: Any) -> TrainState:
            make = self._on_ranks(
                zeros, params, layout.param_specs(), self._pending_specs
            )
            state = create(params, key, model_state)
            return state._replace(pending=make(params))

        return create_late, jax.eval_shape(create_late, params, key, model_state)

    def _specs(self, state: Any) -> TrainState:
        specs = super()._specs(state)
        return specs._replace(pending=self._pending_specs(state.pending))

    # ---- gradients that wait ---------------------------------------------------

    @property
    def _leading(self) -> tuple[tuple[str, ...], ...]:
        """Mesh axes of the axes in front of each array that waits.

        Ranks that share operators have different gradients, too, but of parameters that
        are theirs: their axis is one of its own, for the other's mean is what stays
        when hosts come or go.
        """
        return (self.batch_axes, self.op_axes) if self.op_axes else (self.batch_axes,)

    def _pending_specs(self, pending: Any) -> Any:
        # As XLA writes what it returns: else the second step would compile again.
        names: list[Any] = [self._wide(axes) or None for axes in self._leading]
        spec = PartitionSpec(*(names if any(names) else ()))
        return jax.tree.map(lambda _: spec, pending)

    def _put(self, grads: Any) -> PerRank:
        """This rank's gradients in the form in which a state holds them."""
        ones = (1,) * len(self._leading)
        return PerRank(jax.tree.map(lambda g: g.reshape(*ones, *g.shape), grads))

    def _take(self, pending: PerRank) -> Any:
        """The inverse of `_put`."""
        count = len(self._leading)
        return jax.tree.map(lambda x: x.reshape(x.shape[count:]), pending.tree)

    # ---- one step of one rank --------------------------------------------------

    def _local_step(self, state: TrainState, batch: Any, frozen: Any) -> Any:
        compresses = compresses_next(state.opt_state)
        if compresses is None:
            return self._run(state, batch, frozen, None)

        # A transformation that decides on its phase by itself does so around its
        # transfers, and nothing could run beside them: the whole step goes in there.
        def take(phase: Phase) -> Callable[[Any], Any]:
            def run(given: Any) -> Any:
                with jax.named_scope(SCOPES[phase]):
                    return self._run(given[0], batch, frozen, phase)

            return run

        shapes = jax.eval_shape(take("warmup"), (state, None))[1]
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        given = run_once(~compresses, take("warmup"), (state, zeros))
        return run_once(compresses, take("compressed"), given)

    def _run(
        self, state: TrainState, batch: Any, frozen: Any, phase: Phase | None
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """The step, in a phase where `tx` has phases."""
        # Without a barrier XLA fuses the first reading of a weight with its update.
        read = lax.optimization_barrier(state.params)
        fresh = self._differentiate(state, read, batch, frozen)
        grads, norm, finite = self._reduce(self._take(state.pending))
        # Nothing waits before the first step.
        taken = finite & (state.step > 0)
        updated = self._update(state, grads, fresh, taken, phase)
        waits = self._put(fresh.grads)
        # XLA makes one sum of several that may be one, and the sums of the gradients
        # that waited would wait for those of this step's batch.
        square = is_sound = None
        if self._has_model_state:
            leaves = jax.tree.leaves(fresh.grads)
            square = square_norm([g for g in leaves if is_float(g)])
        fresh, square = after((fresh._replace(grads=()), square), updated[0])
        if square is not None:
            axes = (*self.batch_axes, *self.op_axes)
            is_sound = jnp.isfinite(rank_mean(square, axes, 1))
        state, metrics = self._done(state, fresh, updated, norm, finite, is_sound)
        return state._replace(pending=waits), metrics

    def _update(
        self,
        state: TrainState,
        grads: Any,
        fresh: Fresh,
        taken: jax.Array,
        phase: Phase | None,
    ) -> tuple[Any, Any]:
        """(parameters, optimizer state) of what this rank updates.

        Args:
          state: that the step began with.
          grads: that waited, reduced.
          fresh: of this step's batch.
          taken: bool[], whether it is applied.
          phase: as in `_run`.
        """
        layout = self._placed()
        own, held = layout.own(state.params), layout.unlead(state.opt_state)
        send, receive = _halves(self._tx, phase)
        # Whole gradients over the slow links go under the forward pass; else what the
        # fast links carry does so, where they carry anything.
        is_slow = phase == "warmup" and layout.kind == "states" and send is not None
        is_exact = bool(self._dense or self._shard_axes)
        goes_on = bool(self.reduces) or layout.kind == "states"
        way, sent = grads, held
        if goes_on and is_exact and not is_slow:
            way = after(way, fresh.loss)
        if send is not None:
            way, sent = send(way, held)
            if is_slow or not is_exact:
                way = after(way, fresh.loss)
        if layout.kind != "states":
            # Where they lie, which all must have read before.
            own = after(own, fresh.grads)
        updates, new = receive(way, sent, own)
        applied = optax.apply_updates(own, updates), new
        return optax.tree.where(taken, applied, (own, held))


def _halves(
    tx: optax.GradientTransformationExtraArgs, phase: Phase | None
) -> tuple[Callable[[Any, Any], Any] | None, Callable[[Any, Any, Any], Any]]:
    """(the first half of an update or None, the second or all of it)."""
    if phase is not None and isinstance(tx, StagedTransformation):
        return (
            lambda grads, state: tx.send(grads, state, phase),
            lambda way, state, params: tx.receive(way, state, params, phase),
        )
    return None, lambda grads, state, params: tx.update(
        grads, state, params, phase=phase, is_finite=True
    )


def check_staleness(staleness: int, name: str = "staleness") -> None:
    """Raises ValueError for a delay that is not built."""
    if staleness not in (0, 1):
        raise ValueError(
            f"`{name}` must be 0 or 1, got {staleness}: the steps that an update comes "
            "late; one hides what is sent, more would only add to the error."
        )
