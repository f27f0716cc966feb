"""The training step for any model: one program, state sharded and donated.

The data's way through a step: the batch is split over the mesh; each rank computes
gradients of its own part; where operators are split, parameters that all ranks of the
operator axis hold get the mean of theirs; axes the transformation does not reduce over
are averaged exactly; the transformation does the rest. Nothing is reduced twice, and
nothing dense that was to be compressed.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from sfpo_jax._validate import check_at_least
from sfpo_jax.memory import Keep, recomputed
from sfpo_jax.parallel._clipping import check_max_norm, clip_scale, scaled
from sfpo_jax.parallel._leafwise import average, choose, next_step, rank_mean
from sfpo_jax.parallel._loss import LossFn, loss_and_grads
from sfpo_jax.parallel._mixing import check_unmixed
from sfpo_jax.parallel._recompute import AUTO
from sfpo_jax.parallel._reduction import reduced_beside
from sfpo_jax.parallel._sharding import (
    Axes,
    Kind,
    Layout,
    check_shard,
    make_layout,
)
from sfpo_jax.parallel._step import Step, TrainState, check_given
from sfpo_jax.transforms import apply_gradients


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

        return create, jax.eval_shape(create, params, key, model_state)

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
        assert self._reduces is not None
        loss_fn = self._loss_fn
        if frozen is not None:
            loss_fn = functools.partial(loss_fn, frozen=frozen)
        layout = self._placed()
        if self._recompute is not None:
            loss_fn = recomputed(loss_fn, self._recompute)
        loss, aux, model_state, grads = loss_and_grads(
            loss_fn,
            layout.full(state.params),
            batch,
            self._step_key(state),
            state.model_state,
            self._microbatches,
        )
        grads = layout.split.reduce(grads)
        square = rank_mean(layout.split.square(grads), self.batch_axes, self._ranks)
        norm = jnp.sqrt(square)
        finite = jnp.isfinite(norm)
        if self._max_norm is not None:
            grads = scaled(grads, clip_scale(norm, self._max_norm))
        done = (*self._shard_axes, *self._reduces)
        dense = self._wide(tuple(a for a in self.batch_axes if a not in done))
        grads = layout.reduce(grads, dense)
        own, held = layout.own(state.params), layout.unlead(state.opt_state)
        new, new_held = apply_gradients(self._tx, grads, held, own)
        # A transformation sees its part alone, and could not agree with the others.
        if self._skip_nonfinite or layout.holders:
            new, new_held = choose(finite, (new, new_held), (own, held))
        if self._has_model_state:
            model_state = average(model_state, self.batch_axes)
            model_state = choose(finite, model_state, state.model_state)
        skipped = state.skipped + (~finite).astype(jnp.int32)
        metrics = average({**aux, "loss": loss}, (*self.batch_axes, *self.op_axes))
        metrics |= {"grad_norm": norm, "skipped": skipped}
        state = TrainState(
            params=layout.kept(new),
            opt_state=layout.lead(new_held),
            step=next_step(state.step),
            model_state=model_state,
            key=state.key,
            skipped=skipped,
        )
        return state, metrics


def make_train_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    has_key: bool = False,
    has_model_state: bool = False,
    microbatches: int = 1,
    max_norm: float | None = None,
    skip_nonfinite: bool = False,
    shard: Kind = "none",
    shard_axes: Axes = ("data",),
    reduces: Axes | None = None,
    operator_specs: Any = None,
    frozen: Any = None,
    recompute: Sequence[str] | Literal["auto"] | None = None,
    budget: str | None = None,
) -> TrainStep:
    r"""A training step over the `node`, `data` and `op` axes of a mesh.

    Axes that `tx` reduces over itself (its `axis_name`) are left to it; over the others
    the gradient is averaged exactly before. So a plain Optax optimizer trains densely,
    `onebit_adam(axis_name="data")` compresses, and `onebit_adam(axis_name="node")`
    reduces exactly inside a node and compresses between nodes.

    Ranks of the axis `op` work on the same part of the batch. With `operator_specs`,
    `loss_fn` sees its rank's parts of the parameters, moves activations itself (see
    `column_parallel`), and returns this rank's loss; the objective is the mean of these
    over all ranks. Without, they all do the same.

    Args:
      loss_fn: ``loss_fn(params, batch[, key=][, model_state=][, frozen=])`` to loss or
        (loss, aux), the mean loss of the local batch, a scalar; aux a dict of scalars,
        with `has_model_state` also the new "model_state".
      tx: the gradient transformation.
      mesh: from `make_mesh`, or any with Auto axes.
      has_key: pass `key`, another one for every step, rank and microbatch.
      has_model_state: pass `model_state`; what comes back is averaged over the ranks.
      microbatches: parts a rank's batch is split into, their gradients averaged before
        anything is sent.
      max_norm: clips by the global norm of all gradients, before `tx`; the norm is that
        of `clip_by_global_norm`, sqrt(mean over ranks of \|g_i\|^2).
      skip_nonfinite: keep parameters and optimizer state where the gradient is not
        finite, for any `tx`; SFPO's transformations do so by themselves.
      shard: "states": every device of `shard_axes` keeps optimizer state for its part
        of the parameters only (ZeRO-1). "weights": its part of the parameters, too
        (FSDP); they are gathered for the step. Gradients are then reduce-scattered
        exactly over these axes, and `tx` may compress over the others. A `tx` that
        looks at whole leaves, or at several, sees a device's parts of them.
      shard_axes: mesh axes that shards lie along.
      reduces: the axes `tx` reduces over, where tracing cannot find out.
      operator_specs: a tree like the parameters of PartitionSpecs: P("op") in the place
        of the axis of a parameter that is cut over the operator axis, P() for one that
        every rank holds. `tx` must then not mix leaves: clip with `max_norm`.
      frozen: a pytree that `loss_fn` reads besides, such as the weights under adapters
        (see `sfpo_jax.lora`): whole on every device, and neither differentiated nor
        reduced nor part of the state.
      recompute: what the backward pass keeps, names that `loss_fn` gives by
        `jax.ad_checkpoint.checkpoint_name`; all else it computes again (see
        `sfpo_jax.memory.recomputed`). "auto": what `plan_recompute` finds for `budget`,
        when the first batch is seen; `step.recompute_plan` then tells. None: all that
        `loss_fn` does not compute again by itself is kept.
      budget: what a device may hold, with recompute="auto", a size with its unit.

    Returns:
      The step: ``state = step.init(params, key)``, ``state, metrics = step(state,
      batch)``. It compiles once, both phases of 1-bit Adam in one program.

    Raises:
      ValueError: `microbatches` below 1, `max_norm` not positive, or axes that nothing
        can be sharded along; at `init`, specs that do not fit the parameters, or a `tx`
        that mixes leaves where operators are split.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import sfpo_jax as sfpo
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
      >>> tx = sfpo.onebit_adam(0.1, warmup_steps=2, axis_name="data")
      >>> step = sfpo.make_train_step(loss_fn, tx, sfpo.make_mesh())
      >>> state = step.init({"w": jnp.zeros(4)})
      >>> batch = {"x": jnp.ones((16, 4)), "y": jnp.ones(16)}
      >>> for _ in range(3):
      ...     state, metrics = step(state, batch)
      >>> sorted(metrics)
      ['grad_norm', 'loss', 'skipped']
    """
    check_at_least("microbatches", microbatches, 1, "parts of a rank's batch")
    check_max_norm(max_norm)
    check_shard(shard, shard_axes, mesh)
    return TrainStep(
        loss_fn,
        tx,
        mesh,
        has_key=has_key,
        has_model_state=has_model_state,
        microbatches=microbatches,
        max_norm=max_norm,
        skip_nonfinite=skip_nonfinite,
        shard=shard,
        shard_axes=tuple(shard_axes),
        reduces=reduces,
        operator_specs=operator_specs,
        frozen=frozen,
        recompute=_names(recompute),
        budget=budget,
    )


def _names(recompute: Any) -> Any:
    """The argument with its names in a tuple."""
    if isinstance(recompute, str) and recompute != AUTO:
        raise ValueError(
            f'`recompute` must be "auto", a sequence of names or None, got '
            f"{recompute!r}."
        )
    return recompute if recompute in (None, AUTO) else tuple(recompute)
