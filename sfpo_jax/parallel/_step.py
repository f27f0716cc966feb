"""What all training steps share: state, donation, sharding, and questions to them."""

import abc
import copy
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sfpo_jax._validate import check_real
from sfpo_jax.collectives import Transfer, transfers, wire_bytes
from sfpo_jax.memory import RecomputePlan
from sfpo_jax.parallel import _offload
from sfpo_jax.parallel._agreement import make_check
from sfpo_jax.parallel._batch import (
    place_batch,
    replicated,
    shape_of,
    whole_shape,
)
from sfpo_jax.parallel._compiler_options import transfer_options
from sfpo_jax.parallel._operator_split import AXIS
from sfpo_jax.parallel._recompute import AUTO, check_budget, plan_step
from sfpo_jax.transforms import PHASE_SCOPES, scope_of

Axes = tuple[str, ...]
S = TypeVar("S", bound="Step")


class TrainState(NamedTuple):
    """All that a step reads and writes; donated to it."""

    params: Any  # replicated, or cut where the step says so
    opt_state: Any  # residuals one to a rank; the rest as the parameters
    step: jax.Array  # int32[], steps taken, skipped ones included
    model_state: Any  # e.g. batch statistics, replicated; None without
    key: jax.Array | None  # the run's random key, replicated; never changes
    skipped: jax.Array  # int32[], steps whose gradient was not finite
    pending: Any = ()  # gradients one to a rank, of the step before; () at staleness 0


class Step(abc.ABC):
    """A training step over the axes of a mesh, compiled once.

    A kind of step says how its state is made and sharded, and what one rank does; this
    class places, donates, lowers and counts.
    """

    mesh: Mesh
    batch_axes: Axes  # the batch is split over them
    op_axes: Axes  # ("op",) where operators are split, else ()
    frozen: Any  # what the loss reads and nobody trains, on every device; or None
    offload: tuple[_offload.Offload, ...]  # what lies in the host's memory
    staleness: int = 0  # steps that an update comes late
    _reduces: Axes | None  # None until parameters are seen

    def __init__(
        self,
        mesh: Mesh,
        *,
        has_key: bool,
        microbatches: int,
        operator_specs: Any,
        recompute: Any,
        budget: str | None,
        pipeline_depth: int = 0,
        begins_early: bool = False,
        frozen: Any = None,
        offload: tuple[_offload.Offload, ...] = (),
    ) -> None:
        self.mesh = mesh
        self.offload = offload
        self.frozen = replicated(frozen, mesh)
        self.recompute_plan: RecomputePlan | None = None
        self._recompute, self._budget = recompute, check_budget(recompute, budget)
        self.batch_axes = tuple(name for name in mesh.axis_names if name != AXIS)
        is_split = operator_specs is not None and mesh.shape.get(AXIS, 1) > 1
        self.op_axes = (AXIS,) if is_split else ()
        self._has_key = has_key
        self._agreement: Callable[[Any], jax.Array] | None = None
        self._microbatches = microbatches
        self._ranks = math.prod(mesh.shape[name] for name in self.batch_axes)
        self._stages, self._begins_early = max(2, pipeline_depth), begins_early
        self._jitted = self._jit()

    @property
    def reduces(self) -> Axes:
        """The axes `tx` reduces over itself; () before parameters are seen."""
        return self._reduces or ()

    def _jit(self) -> Any:
        # A function of its own each time, for JAX keeps what it traced by function.
        def step(state: TrainState, batch: Any, frozen: Any = None) -> Any:
            return self._sharded_step(state, batch, frozen)

        return jax.jit(
            step,
            donate_argnums=0,
            compiler_options=transfer_options(
                self.mesh, self._stages, bool(self.offload), self._begins_early
            ),
        )

    @abc.abstractmethod
    def _creation(
        self, params: Any, key: Any, model_state: Any
    ) -> tuple[Callable[..., TrainState], TrainState]:
        """A function from these arguments to the first state, and what it returns.

        Of the arguments only shapes are read. Runs under `jax.set_mesh`; the second is
        of ShapeDtypeStructs without shardings.
        """

    @abc.abstractmethod
    def _specs(self, state: Any) -> TrainState:
        """PartitionSpecs of a state, of which only shapes are read."""

    def _on_host(self, state: TrainState) -> TrainState:
        """Which arrays of a state, of which shapes are read, lie on the host."""
        return jax.tree.map(lambda _: False, state)

    @abc.abstractmethod
    def _local_step(self, state: TrainState, batch: Any, frozen: Any) -> Any:
        """(state, metrics) of one rank, inside `shard_map`."""

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
          TypeError: a complex parameter.
        """
        create, shapes = self._created(params, key, model_state)
        shardings = jax.tree.map(lambda x: x.sharding, shapes)
        with jax.set_mesh(self.mesh):
            create = jax.jit(create, out_shardings=shardings)
            params = _offload.place(params, shardings.params)
            return create(params, key, model_state)

    def init_shapes(
        self, params: Any, key: Any = None, model_state: Any = None
    ) -> TrainState:
        """What `init` would return, as ShapeDtypeStructs with their shardings.

        Arguments, of which only shapes are read, and errors are those of `init`. The
        devices of the mesh need not exist: this is how a step is planned.
        """
        return self._created(params, key, model_state)[1]

    def _created(
        self, params: Any, key: Any, model_state: Any
    ) -> tuple[Callable[..., TrainState], TrainState]:
        check_given("key", key, self._has_key)
        check_real(params)
        with jax.set_mesh(self.mesh):
            create, shapes = self._creation(params, key, model_state)
        shapes = jax.tree.map(
            lambda x, spec, on_host: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=_offload.sharding(self.mesh, spec, on_host)
            ),
            shapes,
            self._specs(shapes),
            self._on_host(shapes),
        )
        return create, shapes

    def with_recompute(self: S, recompute: Any) -> S:
        """The same step, compiled anew, with another choice of what is computed again.

        Args:
          recompute: as the function that made the step takes it.
        """
        other = copy.copy(self)
        other._recompute, other.recompute_plan = recompute, None
        other._jitted = other._jit()
        return other

    def _settle(self, state: Any, batch: Any) -> None:
        """Plans what is computed again, once shapes are known."""
        if self._recompute != AUTO or self._budget is None:
            return
        batch = jax.tree.map(self._batch_shape, batch)
        self.recompute_plan = plan_step(self, state, batch, self._budget)
        self._recompute = self.recompute_plan.keep
        self._jitted = self._jit()

    def _batch_shape(self, x: Any) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(self.mesh, self._batch_spec())
        return jax.ShapeDtypeStruct(whole_shape(x), x.dtype, sharding=sharding)

    def __call__(
        self, state: TrainState, batch: Any
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """One step.

        Args:
          state: from `init` or the step before; its buffers are reused.
          batch: a pytree of arrays led by the global batch axis; with several
            processes, of this one's share of it (see `shard_batch`).

        Returns:
          The new state and metrics, float32 scalars but for `skipped`: `loss` (mean
          over ranks), `grad_norm` (see `clip_by_global_norm`), `skipped` (steps so far
          whose gradient was not finite, int32) and the scalars of the loss' aux.

        Raises:
          ValueError: a batch that the ranks and microbatches do not divide.
        """
        batch = self.shard_batch(batch)
        self._settle(state, batch)
        return self._jitted(state, batch, *self._held())

    def shard_batch(self, batch: Any) -> Any:
        """Puts a batch where the step wants it, split along the leading axis.

        With several processes each gives its share of the rows: all the same number,
        that of the whole batch divided by theirs, in the order of the processes. An
        array that lies on devices of several of them is taken as the whole.

        Raises:
          ValueError: a batch that the ranks and microbatches do not divide.
        """
        self._check_batch(batch)
        return place_batch(batch, NamedSharding(self.mesh, self._batch_spec()))

    def lower(self, state: Any, batch: Any) -> Any:
        """The step lowered for arguments of these shapes, as `jax.jit` has it.

        Arguments and errors are those of `trace`. Compiled, it is called with a state,
        a batch as `shard_batch` returns it, and `step.frozen` where that is not None.
        """
        return self.trace(state, batch).lower()

    def trace(self, state: Any, batch: Any) -> Any:
        """The step traced for arguments of these shapes, as `jax.jit` has it.

        Args:
          state: from `init` or `init_shapes`.
          batch: arrays or ShapeDtypeStructs, led by the global batch axis.

        Raises:
          ValueError: a batch that the ranks and microbatches do not divide.
        """
        self._check_batch(batch)
        self._settle(state, batch)
        shapes = jax.tree.map(self._batch_shape, batch)
        state, held = jax.tree.map(shape_of, (state, self._held()))
        return self._jitted.trace(state, shapes, *held)

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
          phase: "warmup", "compressed", "local" (a step that ranks take by themselves)
            or "refresh" (one that sends bits and a dense gradient), of a
            transformation that has these; None for the largest.

        Raises:
          ValueError: an unknown phase.
        """
        scope_of(phase)  # refused before anything is compiled
        return self.transfers_in(self.compiled_text(state, batch), phase)

    def transfers_in(self, text: str, phase: str | None = None) -> list[Transfer]:
        """`transfers` of a program that is compiled already, from `compiled_text`."""
        scopes = tuple(PHASE_SCOPES.values())
        return transfers(text, dict(self.mesh.shape), scope_of(phase), scopes)

    def wire_bytes(
        self, state: TrainState, batch: Any, phase: str | None = None
    ) -> dict[str, int]:
        """Bytes one device sends in a step, by mesh axis, from the compiled program.

        Arguments and errors are those of `transfers`.
        """
        return wire_bytes(self.transfers(state, batch, phase))

    def differing(self, state: TrainState) -> list[str]:
        """Arrays whose copies on several devices are not alike, by name.

        A checksum of each copy is compared: one pass over the memory, and four bytes an
        array on the network.

        Args:
          state: from `init` or a step; it stays as it is.

        Returns:
          Places in the state, in its order, e.g. ".params['w']"; [] where all is well.
        """
        if self._agreement is None:
            self._agreement = make_check(self.mesh, self._specs(state))
        found = np.asarray(self._agreement(state)).tolist()
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
        return [
            jax.tree_util.keystr(path)
            for path, differs in zip(paths, found, strict=True)
            if differs
        ]

    def _check_batch(self, batch: Any) -> None:
        parts = self._ranks * self._microbatches
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
            shape = whole_shape(leaf)
            if not shape or shape[0] % parts:
                raise ValueError(
                    f"`batch`{jax.tree_util.keystr(path)} of shape {shape} "
                    f"cannot be split into {parts} parts ({self._ranks} ranks x "
                    f"{self._microbatches} microbatches): make its leading axis a "
                    f"multiple of {parts}."
                )

    def _held(self) -> tuple[Any, ...]:
        """What the program takes beside state and batch."""
        return () if self.frozen is None else (self.frozen,)

    def _batch_spec(self) -> PartitionSpec:
        return PartitionSpec(self.batch_axes)

    def _sharded_step(self, state: TrainState, batch: Any, frozen: Any) -> Any:
        specs = self._specs(state)
        return jax.shard_map(
            self._local_step,
            mesh=self.mesh,
            in_specs=(specs, self._batch_spec(), PartitionSpec()),
            out_specs=(specs, PartitionSpec()),
            # With the checks on, differentiating replicated parameters would insert
            # the dense all-reduce by itself.
            check_vma=False,
        )(state, batch, frozen)

    def _on_ranks(
        self,
        make: Callable[[Any], Any],
        params: Any,
        param_specs: Any,
        specs: Callable[[Any], Any],
    ) -> Callable[[Any], Any]:
        """`make` of each rank's parameters, as a function of the whole ones.

        Args:
          make: runs inside `shard_map`.
          params: whole parameters, of which only shapes are read.
          param_specs: how they lie over the mesh.
          specs: from what `make` returns, shapes, to how that lies over the mesh.
        """

        def sharded(out_specs: Any) -> Callable[[Any], Any]:
            return jax.shard_map(
                make,
                mesh=self.mesh,
                in_specs=(param_specs,),
                out_specs=out_specs,
                check_vma=False,
            )

        return sharded(specs(jax.eval_shape(sharded(PartitionSpec()), params)))

    def _step_key(self, state: TrainState) -> jax.Array | None:
        """This rank's key of this step."""
        if state.key is None:
            return None
        key = jax.random.fold_in(state.key, state.step)
        # Ranks that share a sample have tokens of their own to drop.
        axes = (*self.batch_axes, *self.op_axes)
        return jax.random.fold_in(key, lax.axis_index(axes))

    def _wide(self, axes: Axes) -> Axes:
        """Those of `axes` that have more than one rank."""
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)


def check_given(name: str, value: Any, is_wanted: bool) -> None:
    """Raises ValueError where an argument of `init` is missing or not used."""
    if is_wanted and value is None:
        raise ValueError(
            f"`{name}` is missing: the step was made with has_{name}=True."
        )
    if not is_wanted and value is not None:
        raise ValueError(f"`{name}` is not used: make the step with has_{name}=True.")
