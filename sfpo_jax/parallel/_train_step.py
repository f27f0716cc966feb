"""The data-parallel training step: one program, state sharded and donated.

The data's way through a step: the batch is split over the mesh; each rank computes
gradients of its own part; axes the transformation does not reduce over are averaged
exactly; the transformation does the rest. Nothing is reduced twice, and nothing dense
that was to be compressed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from sfpo_jax._validate import check_at_least
from sfpo_jax.collectives import axis_mean
from sfpo_jax.parallel._loss import LossFn, loss_and_grads
from sfpo_jax.parallel._reduction import reduced_axes
from sfpo_jax.parallel._step import (
    Step,
    TrainState,
    average,
    check_given,
    choose,
    next_step,
)
from sfpo_jax.transforms import global_norm, state_specs


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
        skip_nonfinite: bool,
        reduces: tuple[str, ...] | None,
    ) -> None:
        super().__init__(mesh, has_key=has_key, microbatches=microbatches)
        self._tx = optax.with_extra_args_support(tx)
        self._loss_fn = loss_fn
        self._has_model_state = has_model_state
        self._skip_nonfinite = skip_nonfinite
        self._reduces = reduces

    def _creation(
        self, params: Any, key: Any, model_state: Any
    ) -> tuple[Callable[..., TrainState], TrainState]:
        check_given("model_state", model_state, self._has_model_state)
        if self._reduces is None:
            self._reduces = reduced_axes(self._tx, params, self.mesh, self.batch_axes)

        def create(params: Any, key: Any, model_state: Any) -> TrainState:
            copy = jax.tree.map(jnp.copy, (params, key, model_state))
            return TrainState(
                params=copy[0],
                opt_state=self._tx.init(params),
                step=jnp.int32(0),
                model_state=copy[2],
                key=copy[1],
                skipped=jnp.int32(0),
            )

        return create, jax.eval_shape(create, params, key, model_state)

    def _specs(self, state: Any) -> TrainState:
        replicated = jax.tree.map(lambda _: PartitionSpec(), state)
        axes = self._reduces or None
        return replicated._replace(opt_state=state_specs(state.opt_state, axes))

    def _local_step(self, state: TrainState, batch: Any) -> Any:
        assert self._reduces is not None
        loss, aux, model_state, grads = loss_and_grads(
            self._loss_fn,
            state.params,
            batch,
            self._step_key(state),
            state.model_state,
            self._microbatches,
        )
        norm = global_norm(grads, self.batch_axes)
        finite = jnp.isfinite(norm)
        dense = self._wide(tuple(a for a in self.batch_axes if a not in self._reduces))
        if dense:
            leaves, treedef = jax.tree.flatten(grads)
            grads = treedef.unflatten(axis_mean(leaves, dense))
        updates, opt_state = self._tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        if self._skip_nonfinite:
            params = choose(finite, params, state.params)
            opt_state = choose(finite, opt_state, state.opt_state)
        if self._has_model_state:
            model_state = average(model_state, self.batch_axes)
            model_state = choose(finite, model_state, state.model_state)
        skipped = state.skipped + (~finite).astype(jnp.int32)
        metrics = average({**aux, "loss": loss}, self.batch_axes)
        metrics |= {"grad_norm": norm, "skipped": skipped}
        new = TrainState(
            params=params,
            opt_state=opt_state,
            step=next_step(state.step),
            model_state=model_state,
            key=state.key,
            skipped=skipped,
        )
        return new, metrics


def make_train_step(
    loss_fn: LossFn,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    has_key: bool = False,
    has_model_state: bool = False,
    microbatches: int = 1,
    skip_nonfinite: bool = False,
    reduces: tuple[str, ...] | None = None,
) -> TrainStep:
    """A data-parallel training step over the `node` and `data` axes of a mesh.

    Axes that `tx` reduces over itself (its `axis_name`) are left to it; over the others
    the gradient is averaged exactly before. So a plain Optax optimizer trains densely,
    `onebit_adam(axis_name="data")` compresses, and `onebit_adam(axis_name="node")`
    reduces exactly inside a node and compresses between nodes.

    Args:
      loss_fn: ``loss_fn(params, batch[, key=][, model_state=]) -> loss | (loss, aux)``,
        the mean loss of the local batch, a scalar; aux a dict of scalars, with
        `has_model_state` also the new "model_state".
      tx: the gradient transformation.
      mesh: from `make_mesh`, or any with Auto axes.
      has_key: pass `key`, another one for every step, rank and microbatch.
      has_model_state: pass `model_state`; what comes back is averaged over the ranks.
      microbatches: parts a rank's batch is split into, their gradients averaged before
        anything is sent.
      skip_nonfinite: keep parameters and optimizer state where the gradient is not
        finite, for any `tx`; SFPO's transformations do so by themselves.
      reduces: the axes `tx` reduces over, where tracing cannot find out.

    Returns:
      The step: ``state = step.init(params, key)``, ``state, metrics = step(state,
      batch)``. It compiles once, both phases of 1-bit Adam in one program.

    Raises:
      ValueError: `microbatches` below 1.

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
    return TrainStep(
        loss_fn,
        tx,
        mesh,
        has_key=has_key,
        has_model_state=has_model_state,
        microbatches=microbatches,
        skip_nonfinite=skip_nonfinite,
        reduces=reduces,
    )
