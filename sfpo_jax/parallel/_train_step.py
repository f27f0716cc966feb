"""The data-parallel training step: one program, state sharded and donated.

The data's way through a step: the batch is split over the mesh; each rank computes
gradients of its own part; axes the transformation does not reduce over are averaged
exactly; the transformation does the rest. Nothing is reduced twice, and nothing dense
that was to be compressed.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sfpo_jax._validate import check_at_least
from sfpo_jax.collectives import Transfer, axis_mean, transfers, wire_bytes
from sfpo_jax.parallel._loss import LossFn, loss_and_grads
from sfpo_jax.parallel._reduction import reduced_axes
from sfpo_jax.transforms import (
    COMPRESSED_SCOPE,
    WARMUP_SCOPE,
    global_norm,
    state_specs,
)

_PHASES = {"warmup": WARMUP_SCOPE, "compressed": COMPRESSED_SCOPE}


class TrainState(NamedTuple):
    """All that a step reads and writes; donated to it."""

    params: Any  # replicated
    opt_state: Any  # replicated but for residuals, one to a rank
    step: jax.Array  # int32[], steps taken, skipped ones included
    model_state: Any  # e.g. batch statistics, replicated; None without
    key: jax.Array | None  # the run's random key, replicated; never changes
    skipped: jax.Array  # int32[], steps whose gradient was not finite


class TrainStep:
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
        self.mesh = mesh
        self.batch_axes = tuple(name for name in mesh.axis_names if name != "op")
        self._tx = optax.with_extra_args_support(tx)
        self._loss_fn = loss_fn
        self._has_key = has_key
        self._has_model_state = has_model_state
        self._microbatches = microbatches
        self._skip_nonfinite = skip_nonfinite
        self._reduces = reduces
        self._ranks = math.prod(mesh.shape[name] for name in self.batch_axes)
        self._jitted = jax.jit(self._sharded_step, donate_argnums=0)

    def init(
        self, params: Any, key: jax.Array | None = None, model_state: Any = None
    ) -> TrainState:
        """The state before the first step, sharded as the step keeps it.

        Args:
          params: a pytree of arrays; copied, never donated.
          key: the run's random key, with `has_key`.
          model_state: with `has_model_state`, e.g. batch statistics.

        Raises:
          ValueError: `key` or `model_state` missing, or given and not asked for.
        """
        shapes = self.init_shapes(params, key, model_state)
        shardings = jax.tree.map(lambda x: x.sharding, shapes)
        create = jax.jit(self._create, out_shardings=shardings)
        with jax.set_mesh(self.mesh):
            return create(params, key, model_state)

    def init_shapes(
        self, params: Any, key: Any = None, model_state: Any = None
    ) -> TrainState:
        """What `init` would return, as ShapeDtypeStructs with their shardings.

        Arguments, of which only shapes are read, and errors are those of `init`. The
        devices of the mesh need not exist: this is how a step is planned.
        """
        _check_given("key", key, self._has_key)
        _check_given("model_state", model_state, self._has_model_state)
        if self._reduces is None:
            self._reduces = reduced_axes(self._tx, params, self.mesh, self.batch_axes)
        with jax.set_mesh(self.mesh):
            shapes = jax.eval_shape(self._create, params, key, model_state)
        return jax.tree.map(
            lambda x, spec: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec)
            ),
            shapes,
            self._specs(shapes),
        )

    def lower(self, state: Any, batch: Any) -> Any:
        """The step lowered for arguments of these shapes, as `jax.jit` has it.

        Args:
          state: from `init` or `init_shapes`.
          batch: arrays or ShapeDtypeStructs, led by the global batch axis.

        Raises:
          ValueError: a batch that the ranks and microbatches do not divide.
        """
        self._check_batch(batch)
        sharding = NamedSharding(self.mesh, self._batch_spec())
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(jnp.shape(x), x.dtype, sharding=sharding),
            batch,
        )
        return self._jitted.lower(jax.tree.map(_shape_of, state), shapes)

    def _create(self, params: Any, key: Any, model_state: Any) -> TrainState:
        copy = jax.tree.map(jnp.copy, (params, key, model_state))
        return TrainState(
            params=copy[0],
            opt_state=self._tx.init(params),
            step=jnp.int32(0),
            model_state=copy[2],
            key=copy[1],
            skipped=jnp.int32(0),
        )

    def __call__(
        self, state: TrainState, batch: Any
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step.

        Args:
          state: from `init` or the step before; its buffers are reused.
          batch: a pytree of arrays led by the global batch axis.

        Returns:
          The new state and metrics, float32 scalars but for `skipped`: `loss` (mean
          over ranks), `grad_norm` (see `clip_by_global_norm`), `skipped` (steps so far
          whose gradient was not finite, int32) and the scalars of the loss' aux.

        Raises:
          ValueError: a batch that the ranks and microbatches do not divide.
        """
        return self._jitted(state, self.shard_batch(batch))

    def shard_batch(self, batch: Any) -> Any:
        """Puts a batch where the step wants it, split along the leading axis."""
        self._check_batch(batch)
        return jax.device_put(batch, NamedSharding(self.mesh, self._batch_spec()))

    def _check_batch(self, batch: Any) -> None:
        parts = self._ranks * self._microbatches
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            if jnp.ndim(leaf) == 0 or jnp.shape(leaf)[0] % parts:
                raise ValueError(
                    f"`batch`{jax.tree_util.keystr(path)} of shape {jnp.shape(leaf)} "
                    f"cannot be split into {parts} parts ({self._ranks} ranks x "
                    f"{self._microbatches} microbatches): make its leading axis a "
                    f"multiple of {parts}."
                )

    def compiled_text(self, state: TrainState, batch: Any) -> str:
        """The optimised HLO of the step for arguments of these shapes."""
        return self.lower(state, batch).compile().as_text() or ""

    def transfers(
        self, state: TrainState, batch: Any, phase: str | None = None
    ) -> list[Transfer]:
        """The collectives one step runs, from the compiled program.

        Args:
          state: a state, only its shapes are read.
          batch: a batch, only its shapes are read.
          phase: "warmup" or "compressed", of a transformation that has these; None for
            the larger of them.

        Raises:
          ValueError: an unknown phase.
        """
        if phase is not None and phase not in _PHASES:
            raise ValueError(
                f"`phase` must be one of {', '.join(_PHASES)} or None, got {phase!r}."
            )
        scope = _PHASES[phase] if phase else None
        text = self.compiled_text(state, batch)
        return transfers(text, dict(self.mesh.shape), scope, tuple(_PHASES.values()))

    def wire_bytes(
        self, state: TrainState, batch: Any, phase: str | None = None
    ) -> dict[str, int]:
        """Bytes one device sends in a step, by mesh axis, from the compiled program.

        Arguments and errors are those of `transfers`.
        """
        return wire_bytes(self.transfers(state, batch, phase))

    def _batch_spec(self) -> PartitionSpec:
        return PartitionSpec(self.batch_axes)

    def _specs(self, state: Any) -> TrainState:
        replicated = jax.tree.map(lambda _: PartitionSpec(), state)
        axes = self._reduces or None
        return replicated._replace(opt_state=state_specs(state.opt_state, axes))

    def _sharded_step(self, state: TrainState, batch: Any) -> Any:
        specs = self._specs(state)
        return jax.shard_map(
            self._local_step,
            mesh=self.mesh,
            in_specs=(specs, self._batch_spec()),
            out_specs=(specs, PartitionSpec()),
            # With the checks on, differentiating replicated parameters would insert
            # the dense all-reduce by itself.
            check_vma=False,
        )(state, batch)

    def _local_step(self, state: TrainState, batch: Any) -> Any:
        assert self._reduces is not None
        key = None
        if state.key is not None:
            key = jax.random.fold_in(state.key, state.step)
            key = jax.random.fold_in(key, lax.axis_index(self.batch_axes))
        loss, aux, model_state, grads = loss_and_grads(
            self._loss_fn,
            state.params,
            batch,
            key,
            state.model_state,
            self._microbatches,
        )
        norm = global_norm(grads, self.batch_axes)
        finite = jnp.isfinite(norm)
        dense = tuple(
            axis
            for axis in self.batch_axes
            if axis not in self._reduces and self.mesh.shape[axis] > 1
        )
        if dense:
            leaves, treedef = jax.tree.flatten(grads)
            grads = treedef.unflatten(axis_mean(leaves, dense))
        updates, opt_state = self._tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        if self._skip_nonfinite:
            params = _select(finite, params, state.params)
            opt_state = _select(finite, opt_state, state.opt_state)
        if self._has_model_state:
            model_state = _average(model_state, self.batch_axes)
            model_state = _select(finite, model_state, state.model_state)
        skipped = state.skipped + (~finite).astype(jnp.int32)
        metrics = _average({**aux, "loss": loss}, self.batch_axes)
        metrics |= {"grad_norm": norm, "skipped": skipped}
        new = TrainState(
            params=params,
            opt_state=opt_state,
            step=jnp.asarray(optax.safe_increment(state.step)),
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


def _check_given(name: str, value: Any, is_wanted: bool) -> None:
    if is_wanted and value is None:
        raise ValueError(
            f"`{name}` is missing: the step was made with has_{name}=True."
        )
    if not is_wanted and value is not None:
        raise ValueError(f"`{name}` is not used: make the step with has_{name}=True.")


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _select(condition: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda n, o: jnp.where(condition, n, o), new, old)


def _average(tree: Any, axes: tuple[str, ...]) -> Any:
    """Means of the floating leaves over the ranks; the others as they are."""
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
    means = axis_mean([leaves[i] for i in places], axes)
    for place, mean in zip(places, means, strict=True):
        leaves[place] = mean
    return treedef.unflatten(leaves)
