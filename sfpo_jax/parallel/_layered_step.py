"""The training step that releases each layer's gradient the moment it exists.

The data's way: the forward pass saves the inputs of every layer. The backward pass goes
through the layers in a loop whose carry holds all parameters and optimizer states; in
each turn a layer's gradient is made, reduced over the mesh, transformed and applied, in
place, so that no more than one layer's gradient ever exists. Clipping by the global
norm, which needs all gradients before the first update, takes a second backward pass
instead of their memory.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from sfpo_jax._validate import check_at_least
from sfpo_jax.parallel._clipping import check_max_norm, clip_scale
from sfpo_jax.parallel._layered_model import LayeredModel, depth_of
from sfpo_jax.parallel._layered_pass import LayeredPass, check_recompute
from sfpo_jax.parallel._layered_update import LayeredOptState, LayeredUpdate
from sfpo_jax.parallel._leafwise import next_step
from sfpo_jax.parallel._metrics import mean_metrics
from sfpo_jax.parallel._mixing import check_shared, check_unmixed
from sfpo_jax.parallel._offload import (
    Offload,
    check_offload,
    is_on_host,
    offloaded,
)
from sfpo_jax.parallel._recompute import AUTO
from sfpo_jax.parallel._reduction import reduced_beside
from sfpo_jax.parallel._sharding import (
    Axes,
    Kind,
    Layout,
    check_shard,
    given_axes,
    make_layout,
)
from sfpo_jax.parallel._stack_pass import Recompute, Runs, as_runs
from sfpo_jax.parallel._step import Step, TrainState
from sfpo_jax.parallel._unit_update import UnitUpdate, wide_shapes
from sfpo_jax.transforms import make_rounding

_ROUNDING = 2**31  # no step has this number


class LayeredTrainStep(Step):
    """A compiled layered step; made by `make_layered_train_step`."""

    def __init__(
        self,
        model: LayeredModel,
        tx: optax.GradientTransformation,
        mesh: Mesh,
        *,
        has_key: bool,
        microbatches: int,
        recompute: Any,
        max_norm: float | None,
        skip_nonfinite: bool,
        rounding: str | None,
        shard: Kind,
        shard_axes: Axes,
        weight_prefetch: int,
        pipeline_depth: int,
        reduces: Axes | None,
        operator_specs: Any,
        budget: str | None,
        offload: tuple[Offload, ...],
    ) -> None:
        super().__init__(
            mesh,
            has_key=has_key,
            microbatches=microbatches,
            operator_specs=operator_specs,
            recompute=recompute,
            budget=budget,
            pipeline_depth=pipeline_depth,
            offload=offload,
        )
        self._operator_specs = operator_specs
        self._model = model
        self._tx = optax.with_extra_args_support(tx)
        self._max_norm = max_norm
        self._skip_nonfinite = skip_nonfinite
        self._rounding = make_rounding(rounding)
        self._shard: Kind = shard
        self._shard_axes = self._wide(shard_axes) if shard != "none" else ()
        is_far = shard == "weights" or "weights" in offload
        self._weight_prefetch = weight_prefetch if is_far else 0
        self._pipeline_depth = pipeline_depth
        self._reduces = reduces
        # Known once parameters are seen: how they lie over the mesh, and their depths.
        self._outer: Layout
        self._layers: dict[str, Layout]
        self._depths: dict[str, int]

    # ---- state -----------------------------------------------------------------

    def _creation(
        self, params: Any, key: Any, model_state: Any
    ) -> tuple[Callable[..., TrainState], TrainState]:
        if model_state is not None:
            raise ValueError("`model_state` is not used: a layered step carries none.")
        self._model.check(params)
        for stack in self._model.by_name(params["layers"]).values():
            layer = wide_shapes(stack, leading=1)
            check_unmixed(self._tx, layer, self.mesh, "layer by layer")
        self._plan(params)
        check_recompute(self._recompute, self._depths)
        make_opt = self._on_ranks(
            self._layered_update().init, params, self._param_specs(), self._opt_specs
        )

        def create(params: Any, key: Any, model_state: Any) -> TrainState:
            del model_state
            params, key = jax.tree.map(
                # What goes to the host was copied there before.
                lambda x: x if is_on_host(x) else jnp.copy(x),
                (params, key),
            )
            return TrainState(
                params=params,
                opt_state=make_opt(params),
                step=jnp.int32(0),
                model_state=None,
                key=key,
                skipped=jnp.int32(0),
            )

        shapes = jax.eval_shape(create, params, key, model_state)
        check_shared(shapes.opt_state)
        return create, shapes

    def _plan(self, params: Any) -> None:
        """Finds out how `params`, whole, lie over the mesh, and what `tx` reduces."""
        layout = functools.partial(
            make_layout, kind=self._shard, axes=self._shard_axes, mesh=self.mesh
        )
        stacks = self._model.by_name(params["layers"])
        outer, specs = None, dict.fromkeys(stacks)
        if self._operator_specs is not None:
            outer = self._operator_specs["outer"]
            specs = self._model.by_name(self._operator_specs["layers"])
        self._outer = layout(params["outer"], operator_specs=outer)
        self._layers = {
            name: layout(stack, operator_specs=specs[name], leading=1)
            for name, stack in stacks.items()
        }
        self._depths = {name: depth_of(stack) for name, stack in stacks.items()}
        if self._reduces is None:
            layer = wide_shapes(next(iter(stacks.values())), leading=1)
            self._reduces = reduced_beside(
                self._tx, layer, self.mesh, self.batch_axes, self._shard_axes
            )

    def _layered_update(self) -> LayeredUpdate:
        reduces = self._reduces or ()
        done = (*self._shard_axes, *reduces)
        unit = UnitUpdate(
            self._tx,
            self._rounding,
            self._wide(self.batch_axes),
            self._ranks,
            self._wide(tuple(a for a in self.batch_axes if a not in done)),
            bool(self._wide(reduces)),
        )
        return LayeredUpdate(
            self._model,
            self._outer,
            self._layers,
            self._depths,
            unit,
            self._pipeline_depth,
            self.offload,
        )

    def _opt_specs(self, opt_state: LayeredOptState) -> LayeredOptState:
        reduces = self._reduces or ()
        stacks = {
            name: self._layers[name].state_specs(state, reduces, leading=1)
            for name, state in self._model.by_name(opt_state.layers).items()
        }
        outer = self._outer.state_specs(opt_state.outer, reduces)
        return LayeredOptState(outer, self._model.join(stacks))

    def _param_specs(self) -> Any:
        stacks = {
            name: layout.param_specs(leading=1) for name, layout in self._layers.items()
        }
        outer = self._outer.param_specs()
        return {"outer": outer, "layers": self._model.join(stacks)}

    def _specs(self, state: Any) -> TrainState:
        self._plan(state.params)
        replicated = jax.tree.map(lambda _: PartitionSpec(), state)
        return replicated._replace(
            params=self._param_specs(), opt_state=self._opt_specs(state.opt_state)
        )

    def _on_host(self, state: TrainState) -> TrainState:
        found = super()._on_host(state)
        if "weights" in self.offload:
            layers = offloaded(state.params["layers"])
            found = found._replace(params={**found.params, "layers": layers})
        if "states" in self.offload:
            layers = offloaded(state.opt_state.layers)
            opt_state = found.opt_state._replace(layers=layers)
            found = found._replace(opt_state=opt_state)
        return found

    # ---- one step of one rank --------------------------------------------------

    def _local_step(self, state: TrainState, batch: Any, frozen: Any) -> Any:
        del frozen  # the layered step has none
        passes = LayeredPass(
            self._model,
            self._outer,
            self._layers,
            self._depths,
            self._microbatches,
            self._recompute,
            self._weight_prefetch,
            self.offload,
        )
        update = self._layered_update()
        loss, aux, back = passes.forward(state.params, batch, self._step_key(state))
        verdict = norm = None
        if self._max_norm is not None or self._skip_nonfinite:
            norm = jnp.sqrt(update.square(state.params, back))
            scale = None
            if self._max_norm is not None:
                scale = clip_scale(norm, self._max_norm)
            verdict = jnp.isfinite(norm), scale
        # Alike on all ranks, for they round the same weights.
        key = jax.random.key(0) if state.key is None else state.key
        key = jax.random.fold_in(jax.random.fold_in(key, _ROUNDING), state.step)
        new = update.run(state.params, state.opt_state, back, verdict, key)
        skipped = state.skipped + (~new.taken).astype(jnp.int32)
        metrics = mean_metrics(loss, aux, (*self.batch_axes, *self.op_axes))
        metrics["grad_norm"] = jnp.sqrt(new.square) if norm is None else norm
        metrics["skipped"] = skipped
        state = state._replace(
            params=new.params,
            opt_state=new.opt_state,
            step=next_step(state.step),
            skipped=skipped,
        )
        return state, metrics


def make_layered_train_step(
    model: LayeredModel,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    has_key: bool = False,
    microbatches: int = 1,
    recompute: Recompute | Runs | Mapping[str, Recompute | Runs] = "full",
    budget: str | None = None,
    max_norm: float | None = None,
    skip_nonfinite: bool = False,
    rounding: str | None = None,
    shard: Kind = "none",
    shard_axes: Axes = ("data",),
    weight_prefetch: int = 1,
    pipeline_depth: int = 2,
    reduces: str | Axes | None = None,
    operator_specs: Any = None,
    offload: Sequence[Offload] = (),
) -> LayeredTrainStep:
    r"""A training step that never holds more than one layer's gradient.

    Like `make_train_step`, over the axes of a mesh, for a model whose layers stack.
    `tx` is initialised for `outer` and for each layer on its own, and applied the
    moment their gradients exist. So it must not mix layers: clip with `max_norm`, not
    in the chain.

    Args:
      model: the model's three functions.
      tx: the gradient transformation. It sees float32 gradients and parameters where
        the weights are narrower.
      mesh: from `make_mesh`, or any with Auto axes.
      has_key: pass keys, another one for every step, rank, microbatch and layer.
      microbatches: parts a rank's batch is split into; a layer works on them in turn,
        and its gradient is their mean.
      recompute: what a layer computes again in the backward pass. "full": all but its
        inputs is. Names: what `jax.ad_checkpoint.checkpoint_name` calls so is saved.
        "none": all that autodiff would save is. A sequence of (layers, one of
        these): the first so many layers that way, the next another; with several
        stacks a dict of such. "auto": what `plan_recompute` finds for `budget` when the
        first batch is seen; `step.recompute_plan` then tells.
      budget: what a device may hold, with recompute="auto", a size with its unit.
      max_norm: clips by the global norm of all gradients, exactly, by a second backward
        pass; the norm is that of `clip_by_global_norm`, sqrt(mean over ranks of
        \|g_i\|^2).
      skip_nonfinite: keep all parameters and states where any gradient is not finite,
        which takes a second backward pass too (one pass does for both). Without
        either, a layer whose gradient is not finite skips its own update, and the
        others do not.
      rounding: how bfloat16 weights keep small updates: None, they do not (nearest);
        "stochastic", in the mean, for nothing; "error_term", for a byte a weight.
      shard: "states": every device of `shard_axes` keeps optimizer state for its part
        of the parameters only (ZeRO-1). "weights": its part of the parameters, too,
        and weights are gathered layer by layer (ZeRO-3). Gradients are then
        reduce-scattered exactly over these axes; `tx` may compress over the others.
      shard_axes: mesh axes that shards lie along.
      weight_prefetch: layers whose weights are gathered ahead, with shard="weights".
      pipeline_depth: layers whose reduction is in flight. 0: a layer is reduced and
        updated in the turn of the backward loop that made its gradient. Otherwise its
        transfers are spread over so many turns after that, under the products of the
        layers below: exact reduction, the first and second phase of `onebit_adam` and
        `sfpo`, the gathering of parameters whose states are sharded; never more turns
        than there are transfers. A turn keeps what a layer sends for so much longer.
      reduces: the axes `tx` reduces over, where tracing cannot find out.
      operator_specs: {"outer": tree, "layers": tree of one layer, or a dict of them}
        of PartitionSpecs over the axis "op", as in `make_train_step`.
      offload: what of the layers lies in the host's memory, and comes to the device a
        layer at a time, under the products of the layer before: "states" of the
        optimizer, "weights", "activations" (what the forward pass saves). Arrays below
        256 KiB a layer stay, and all that is outside the layers.

    Returns:
      The step: ``state = step.init(params, key)``, ``state, metrics = step(state,
      batch)``.

    Raises:
      ValueError: an argument outside its range; at `init`, layers that do not stack,
        or a `tx` in which one leaf's gradient moves another's update, such as clipping
        by the global norm.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import sfpo_jax as sfpo
      >>> model = sfpo.LayeredModel(
      ...     embed=lambda outer, batch, key: batch["x"] @ outer["in"],
      ...     block=lambda layer, x, key: x + jnp.tanh(x @ layer["w"]),
      ...     loss=lambda outer, x, batch, key: jnp.mean((x.sum(1) - batch["y"]) ** 2),
      ... )
      >>> mesh = sfpo.make_mesh()
      >>> step = sfpo.make_layered_train_step(model, optax.sgd(0.1), mesh, max_norm=1.0)
      >>> layers = {"w": jnp.zeros((3, 4, 4))}
      >>> state = step.init({"outer": {"in": jnp.ones((2, 4))}, "layers": layers})
      >>> batch = {"x": jnp.ones((8, 2)), "y": jnp.zeros(8)}
      >>> state, metrics = step(state, batch)
      >>> print(metrics["loss"])
      64.0
    """
    check_at_least("microbatches", microbatches, 1, "parts of a rank's batch")
    check_at_least("weight_prefetch", weight_prefetch, 0, "layers gathered ahead")
    check_at_least("pipeline_depth", pipeline_depth, 0, "layers in flight")
    check_max_norm(max_norm)
    if isinstance(recompute, str) and recompute != AUTO:
        as_runs(recompute, depth=1)  # its word is looked at before parameters are seen
    check_shard(shard, shard_axes, mesh)
    return LayeredTrainStep(
        model,
        tx,
        mesh,
        has_key=has_key,
        microbatches=microbatches,
        recompute=recompute,
        budget=budget,
        max_norm=max_norm,
        skip_nonfinite=skip_nonfinite,
        rounding=rounding,
        shard=shard,
        shard_axes=tuple(shard_axes),
        weight_prefetch=weight_prefetch,
        pipeline_depth=pipeline_depth,
        reduces=given_axes(reduces, mesh),
        operator_specs=operator_specs,
        offload=check_offload(offload),
    )
