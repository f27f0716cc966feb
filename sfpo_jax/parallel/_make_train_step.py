"""`make_train_step`: what it takes, checked, and which kind of step it makes."""

from collections.abc import Sequence
from typing import Any, Literal

import optax
from jax.sharding import Mesh

from sfpo_jax._validate import check_at_least
from sfpo_jax.parallel._clipping import check_max_norm
from sfpo_jax.parallel._late_step import LateTrainStep, check_staleness
from sfpo_jax.parallel._loss import LossFn
from sfpo_jax.parallel._recompute import AUTO
from sfpo_jax.parallel._sharding import Axes, Kind, check_shard, given_axes
from sfpo_jax.parallel._train_step import TrainStep


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
    reduces: str | Axes | None = None,
    operator_specs: Any = None,
    frozen: Any = None,
    recompute: Sequence[str] | Literal["auto"] | None = None,
    budget: str | None = None,
    staleness: int = 0,
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
      staleness: 1: a step applies the gradient of the step before, at whose parameters
        it was made, so that what is sent runs under the passes that make the next. The
        first step applies nothing; `grad_norm`, clipping and skipping, which it does
        for any `tx`, are of what is applied. A device keeps its own gradients, whole,
        from step to step in `state.pending`. The learning rate times the curvature, in
        Adam's units, must stay below 1 (see docs/staleness.md).

    Returns:
      The step: ``state = step.init(params, key)``, ``state, metrics = step(state,
      batch)``. It compiles once, both phases of 1-bit Adam in one program.

    Raises:
      ValueError: `microbatches` below 1, `max_norm` not positive, a `staleness` other
        than 0 and 1, or axes that nothing can be sharded or reduced along; at `init`,
        specs that do not fit the parameters, or a `tx` that mixes leaves where
        operators are split; at the first step, aux of a name that the step reports.

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

      A step late:

      >>> late = sfpo.make_train_step(
      ...     loss_fn, optax.sgd(0.1), sfpo.make_mesh(), staleness=1
      ... )
      >>> state, norms = late.init({"w": jnp.zeros(4)}), []
      >>> for _ in range(2):
      ...     state, metrics = late(state, batch)
      ...     norms.append(float(metrics["grad_norm"]))
      >>> norms, state.params["w"].tolist()
      ([0.0, 4.0], [0.20000000298023224, 0.20000000298023224, ...])
    """
    check_at_least("microbatches", microbatches, 1, "parts of a rank's batch")
    check_max_norm(max_norm)
    check_shard(shard, shard_axes, mesh)
    check_staleness(staleness)
    reduces = given_axes(reduces, mesh)
    kind = LateTrainStep if staleness else TrainStep
    return kind(
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
