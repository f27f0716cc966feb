"""The training step for any model: one program, state sharded and donated.

The data's way through a step: the batch is split over the mesh; each rank computes
gradients of its own part; where operators are split, parameters that all ranks of the
operator axis hold get the mean of theirs; axes the transformation does not reduce over
are averaged exactly; the transformation does the rest. Nothing is reduced twice, and
nothing dense that was to be compressed.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from sfpo_jax.memory import Keep, recomputed
from sfpo_jax.parallel._clipping import clip_scale, scaled
from sfpo_jax.parallel._leafwise import average, next_step, rank_mean
from sfpo_jax.parallel._loss import LossFn, loss_and_grads
from sfpo_jax.parallel._metrics import mean_metrics
from sfpo_jax.parallel._mixing import check_shared, check_unmixed
from sfpo_jax.parallel._reduction import reduced_beside
from sfpo_jax.parallel._sharding import Axes, Kind, Layout, make_layout
from sfpo_jax.parallel._step import Step, TrainState, check_given
from sfpo_jax.transforms import apply_gradients, local_params


class Fresh(NamedTuple):
    """What one rank's passes over its part of the batch give."""

    loss: jax.Array
    aux: dict[str, jax.Array]
    model_state: Any
    grads: Any  # of the whole weights, or of this rank's parts of split ones


class TrainStep(Step):
    """A compiled training step; made by `make_train_step`."""

    def __init__(
        self,
        loss_fn: LossFn,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        *,
        has_key: bool,
        has_model_state: bool,
        microbatches: int,
        max_norm: float | None,
        skip_nonfinite: bool,
        shard: Kind,
        shard_axes: Axes,
        reduces: Axes | None,
        operator_specs: Any,
        frozen: Any,
        recompute: Keep | Literal["auto"] | None,
        budget: str | None,
    ) -> None:
        super().__init__(
            mesh,
            has_key=has_key,
            microbatches=microbatches,
            operator_specs=operator_specs,
            frozen=frozen,
            recompute=recompute,
            budget=budget,
            # A gradient is sent as soon as it is there.
            begins_early=True,
        )
        self._operator_specs = operator_specs
        self._max_norm = max_norm
        self._tx = optax.with_extra_args_support(tx)
        self._loss_fn = loss_fn
        self._has_model_state = has_model_state
        self._skip_nonfinite = skip_nonfinite
        self._shard: Kind = shard
        self._shard_axes = self._wide(shard_axes) if shard != "none" else ()
        self._reduces = reduces
        self._layout: Layout | None = None

    def _creation(
        self, params: Any, key: Any, model_state: Any
    ) -> tuple[Callable[..., TrainState], TrainState]:
        check_given("model_state", model_state, self._has_model_state)
        if self.op_axes:
            check_unmixed(self._tx, params, self.mesh, "with operators split")
        self._plan(params)
        layout = self._placed()

        def opt_state(params: Any) -> Any:
            return layout.lead(self._tx.init(layout.own(params)))

        def create(params: Any, key: Any, model_state: Any) -> TrainState:
            copy = jax.tree.map(jnp.copy, (params, key, model_state))
            make_opt = self._on_ranks(
                opt_state, params, layout.param_specs(), self._opt_specs
            )
            return TrainState(
                params=copy[0],
                opt_state=make_opt(params),
                step=jnp.int32(0),
                model_state=copy[2],
                key=copy[1],
                skipped=jnp.int32(0),
            )

        shapes = jax.eval_shape(create, params, key, model_state)
        if layout.kind != "none" or self.staleness:
            check_shared(shapes.opt_state)
        return create, shapes

    def _plan(self, params: Any) -> None:
        """Finds out how `params`, whole, lie over the mesh, and what `tx` reduces."""
        self._layout = make_layout(
            params, self._shard, self._shard_axes, self.mesh, self._operator_specs
        )
        if self._reduces is None:
            self._reduces = reduced_beside(
                self._tx, params, self.mesh, self.batch_axes, self._shard_axes
            )

    def _placed(self) -> Layout:
        assert self._layout is not None
        return self._layout

    def _opt_specs(self, opt_state: Any) -> Any:
        return self._placed().state_specs(opt_state, self._reduces or ())

    def _specs(self, state: Any) -> TrainState:
        self._plan(state.params)
        replicated = jax.tree.map(lambda _: PartitionSpec(), state)
        return replicated._replace(
            params=self._placed().param_specs(),
            opt_state=self._opt_specs(state.opt_state),
        )

    def _local_step(self, state: TrainState, batch: Any, frozen: Any) -> Any:
        layout = self._placed()
        own, held = layout.own(state.params), layout.unlead(state.opt_state)
        params = local_params(state.params, held)
        fresh = self._differentiate(state, params, batch, frozen)
        grads, norm, finite = self._reduce(fresh.grads)
        new, new_held = apply_gradients(self._tx, grads, held, own)
        # A transformation sees its part alone, and could not agree with the others.
        if self._skip_nonfinite or layout.holders:
            applied, before = (new, new_held), (own, held)
            new, new_held = optax.tree.where(finite, applied, before)
        return self._done(state, fresh, (new, new_held), norm, finite)

    def _differentiate(
        self, state: TrainState, params: Any, batch: Any, frozen: Any
    ) -> Fresh:
        """The passes of one rank over its part of the batch.

        Args:
          state: all but its parameters is read.
          params: what this rank keeps of them.
          batch: its part.
          frozen: what the loss reads besides, or None.
        """
        loss_fn = self._loss_fn
        if frozen is not None:
            loss_fn = functools.partial(loss_fn, frozen=frozen)
        if self._recompute is not None:
            loss_fn = recomputed(loss_fn, self._recompute)
        return Fresh(
            *loss_and_grads(
                loss_fn,
                self._placed().full(params),
                batch,
                self._step_key(state),
                state.model_state,
                self._microbatches,
            )
        )

    @property
    def _dense(self) -> Axes:
        """Axes averaged over exactly besides those of the shards."""
        done = (*self._shard_axes, *self.reduces)
        return self._wide(tuple(a for a in self.batch_axes if a not in done))

    def _reduce(self, grads: Any) -> tuple[Any, jax.Array, jax.Array]:
        """(what `tx` takes, norm before clipping, whether finite) of a rank's grads."""
        assert self._reduces is not None
        layout = self._placed()
        grads = layout.split.reduce(grads)
        square = rank_mean(layout.split.square(grads), self.batch_axes, self._ranks)
        norm = jnp.sqrt(square)
        finite = jnp.isfinite(norm)
        # Reduced first, for the norm is known when all gradients are.
        grads = layout.reduce(grads, self._dense)
        if self._max_norm is not None:
            grads = scaled(grads, clip_scale(norm, self._max_norm))
        return grads, norm, finite

    def _done(
        self,
        state: TrainState,
        fresh: Fresh,
        updated: tuple[Any, Any],
        norm: jax.Array,
        finite: jax.Array,
        is_sound: jax.Array | None = None,
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """The new state, but for what waits, and the metrics.

        Args:
          state: that the step began with.
          fresh: of this step's batch.
          updated: parameters and optimizer state of what this rank updates.
          norm: of the gradients applied.
          finite: whether they all were.
          is_sound: whether the new model state is kept; None: where `finite`.
        """
        layout, model_state = self._placed(), fresh.model_state
        axes = (*self.batch_axes, *self.op_axes)
        if self._has_model_state:
            kept = finite if is_sound is None else is_sound
            model_state = average(model_state, axes)
            model_state = optax.tree.where(kept, model_state, state.model_state)
        skipped = state.skipped + (~finite).astype(jnp.int32)
        metrics = mean_metrics(fresh.loss, fresh.aux, axes)
        metrics |= {"grad_norm": norm, "skipped": skipped}
        state = TrainState(
            params=layout.kept(updated[0]),
            opt_state=layout.lead(updated[1]),
            step=next_step(state.step),
            model_state=model_state,
            key=state.key,
            skipped=skipped,
        )
        return state, metrics
