"""The training step that releases each layer's gradient the moment it exists.

The data's way: the forward pass saves the inputs of every layer. The backward pass goes
through the layers in a loop whose carry holds all parameters and optimizer states; in
each turn a layer's gradient is made, reduced over the mesh, transformed and applied, in
place, so that no more than one layer's gradient ever exists. Clipping by the global
norm, which needs all gradients before the first update, takes a second backward pass
instead of their memory.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from sfpo_jax._validate import check_at_least, check_range
from sfpo_jax.collectives import square_norm, widen
from sfpo_jax.parallel._layered_model import LayeredModel, depth_of
from sfpo_jax.parallel._mixing import check_unmixed
from sfpo_jax.parallel._reduction import reduced_axes
from sfpo_jax.parallel._sharding import Axes, Kind, Layout, check_shard, make_layout
from sfpo_jax.parallel._stack_pass import (
    Recompute,
    Saved,
    StackPass,
    accumulate,
    as_gradient,
    each,
    floats_of,
    wide_dtype,
    with_floats,
)
from sfpo_jax.parallel._step import Step, TrainState, average, next_step, where
from sfpo_jax.transforms import make_rounding

_EMBED, _LOSS, _LAYERS = 0, 1, 2  # what a microbatch's keys are for
_ROUNDING = 2**31  # no step has this number


class UnitState(NamedTuple):
    """What belongs to the parameters of `outer`, or of a layer."""

    tx: Any  # state of the transformation
    rounding: Any  # int8 error terms of bfloat16 weights; () without


class LayeredOptState(NamedTuple):
    """Optimizer states, one of `outer` and one a layer, stacked like the layers.

    With `shard` they are led by an axis of the devices that shards lie on (behind that
    of the layers).
    """

    outer: Any  # UnitState
    layers: Any  # UnitState, or a dict of them for several stacks


class _Backward(NamedTuple):
    """What both backward passes begin with."""

    passes: dict[str, StackPass]
    saved: dict[str, Saved]
    dx: list[jax.Array]  # gradients of x after the last layer
    d_outer: Any  # gradient of outer in the loss
    embed_grad: Callable[[list[jax.Array]], Any]  # of x at first -> of outer in embed


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
        recompute: Recompute,
        max_norm: float | None,
        skip_nonfinite: bool,
        rounding: str | None,
        shard: Kind,
        shard_axes: Axes,
        weight_prefetch: int,
        reduces: Axes | None,
    ) -> None:
        super().__init__(mesh, has_key=has_key, microbatches=microbatches)
        self._model = model
        self._tx = optax.with_extra_args_support(tx)
        self._recompute = recompute
        self._max_norm = max_norm
        self._skip_nonfinite = skip_nonfinite
        self._rounding = make_rounding(rounding)
        self._shard: Kind = shard
        self._shard_axes = self._wide(shard_axes) if shard != "none" else ()
        self._weight_prefetch = weight_prefetch if shard == "weights" else 0
        self._reduces = reduces
        self._layouts: dict[str, Any] = {}

    # ---- state -----------------------------------------------------------------

    def _creation(
        self, params: Any, key: Any, model_state: Any
    ) -> tuple[Callable[..., TrainState], TrainState]:
        if model_state is not None:
            raise ValueError("`model_state` is not used: a layered step carries none.")
        self._model.check(params)
        for stack in self._model.by_name(params["layers"]).values():
            check_unmixed(self._tx, _wide_shapes(stack, leading=1), self.mesh)
        self._plan(params)
        make_opt = self._on_ranks(
            self._local_opt_state, params, self._param_specs(), self._opt_specs
        )

        def create(params: Any, key: Any, model_state: Any) -> TrainState:
            del model_state
            params, key = jax.tree.map(jnp.copy, (params, key))
            return TrainState(
                params=params,
                opt_state=make_opt(params),
                step=jnp.int32(0),
                model_state=None,
                key=key,
                skipped=jnp.int32(0),
            )

        return create, jax.eval_shape(create, params, key, model_state)

    def _plan(self, params: Any) -> None:
        """Finds out how `params`, whole, lie over the mesh, and what `tx` reduces."""
        layout = functools.partial(
            make_layout, kind=self._shard, axes=self._shard_axes, mesh=self.mesh
        )
        stacks = self._model.by_name(params["layers"])
        self._layouts = {
            "outer": layout(params["outer"]),
            "layers": {n: layout(s, leading=1) for n, s in stacks.items()},
        }
        self._depths = {name: depth_of(stack) for name, stack in stacks.items()}
        if self._reduces is None:
            axes = tuple(a for a in self.batch_axes if a not in self._shard_axes)
            layer = _wide_shapes(next(iter(stacks.values())), leading=1)
            self._reduces = reduced_axes(self._tx, layer, self.mesh, axes)

    def _local_opt_state(self, params: Any) -> LayeredOptState:
        """States of what this rank updates, with the axes that `_opt_specs` shards."""

        def init(layout: Layout, params: Any) -> UnitState:
            own = layout.own(params)
            made = UnitState(self._tx.init(_wide(own)), self._rounding.init(own))
            return layout.lead(made)

        stacks = {
            name: jax.vmap(functools.partial(init, self._layer_layout(name)))(stack)
            for name, stack in self._model.by_name(params["layers"]).items()
        }
        return LayeredOptState(
            init(self._outer, params["outer"]), self._model.join(stacks)
        )

    def _opt_specs(self, opt_state: LayeredOptState) -> LayeredOptState:
        reduces = self._reduces or ()
        stacks = {
            name: self._layer_layout(name).state_specs(state, reduces, leading=1)
            for name, state in self._model.by_name(opt_state.layers).items()
        }
        outer = self._outer.state_specs(opt_state.outer, reduces)
        return LayeredOptState(outer, self._model.join(stacks))

    def _param_specs(self) -> Any:
        stacks = {
            name: layout.param_specs(leading=1)
            for name, layout in self._layouts["layers"].items()
        }
        outer = self._outer.param_specs()
        return {"outer": outer, "layers": self._model.join(stacks)}

    def _specs(self, state: Any) -> TrainState:
        self._plan(state.params)
        replicated = jax.tree.map(lambda _: PartitionSpec(), state)
        return replicated._replace(
            params=self._param_specs(), opt_state=self._opt_specs(state.opt_state)
        )

    @property
    def _outer(self) -> Layout:
        return self._layouts["outer"]

    def _layer_layout(self, name: str) -> Layout:
        return self._layouts["layers"][name]

    # ---- one step of one rank --------------------------------------------------

    def _local_step(self, state: TrainState, batch: Any) -> Any:
        loss, aux, back = self._forward(state.params, batch, self._step_key(state))
        true = jnp.bool_(True)
        finite, scale, norm = true, None, None
        if self._max_norm is not None or self._skip_nonfinite:
            norm = self._norm(state.params, back)
            finite = jnp.isfinite(norm)
            if self._max_norm is not None:
                limit = jnp.asarray(self._max_norm, norm.dtype)
                scale = jnp.where(finite & (norm > limit), limit / norm, 1)
        params, opt_state, square, taken = self._update(state, back, scale, finite)
        if norm is None:
            norm = jnp.sqrt(square)
        skipped = state.skipped + (~taken).astype(jnp.int32)
        metrics = average({**aux, "loss": loss}, self.batch_axes)
        metrics |= {"grad_norm": norm, "skipped": skipped}
        new = state._replace(
            params=params,
            opt_state=opt_state,
            step=next_step(state.step),
            skipped=skipped,
        )
        return new, metrics

    def _forward(
        self, params: Any, batch: Any, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array], _Backward]:
        """(loss, aux, what the backward passes need) of this rank's batch."""
        model, parts = self._model, self._microbatches
        batch = jax.tree.map(
            lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch
        )
        keys = None
        if key is not None:
            count = _LAYERS + sum(self._depths.values())
            keys = jax.vmap(
                lambda m: jax.random.split(jax.random.fold_in(key, m), count)
            )
            keys = keys(jnp.arange(parts))

        def key_of(place: int) -> Any:
            return None if keys is None else keys[:, place]

        outer = self._outer.full(params["outer"])
        x = each(lambda part: model.embed(outer, *part), (batch, key_of(_EMBED)), parts)
        passes, saved, start = {}, {}, _LAYERS
        for name, block in model.blocks().items():
            depth = self._depths[name]
            passes[name] = StackPass(
                block,
                depth,
                parts,
                self._recompute,
                functools.partial(self._fetch, name),
                self._weight_prefetch,
            )
            own = None if keys is None else keys[:, start : start + depth]
            stack = model.by_name(params["layers"])[name]
            x, saved[name] = passes[name].forward(stack, x, own)
            start += depth

        def loss_of(part: Any) -> Any:
            x, batch, key = part

            def run(outer: Any, floats: list[jax.Array]) -> Any:
                out = model.loss(outer, with_floats(x, floats), batch, key)
                value, aux = out if isinstance(out, tuple) else (out, {})
                return value, {n: jnp.asarray(a) for n, a in dict(aux).items()}

            (value, aux), (d_outer, dx) = jax.value_and_grad(
                run, argnums=(0, 1), has_aux=True, allow_int=True
            )(outer, floats_of(x))
            return jax.tree.map(as_gradient, d_outer, outer), (value, aux, dx)

        d_outer, (losses, auxes, dx) = accumulate(
            loss_of, (x, batch, key_of(_LOSS)), parts
        )
        loss, aux = jax.tree.map(lambda v: jnp.mean(v, axis=0), (losses, auxes))

        def embed_grad(dx: list[jax.Array]) -> Any:
            def one(part: Any) -> Any:
                batch, key, dx = part
                # Gathered again rather than kept all the way.
                outer = self._outer.full(params["outer"])
                _, pull = jax.vjp(
                    lambda outer: floats_of(model.embed(outer, batch, key)), outer
                )
                return jax.tree.map(as_gradient, pull(dx)[0], outer), None

            return accumulate(one, (batch, key_of(_EMBED), dx), parts)[0]

        return loss, aux, _Backward(passes, saved, dx, d_outer, embed_grad)

    def _fetch(self, name: str, stack: Any, index: jax.Array) -> Any:
        """Whole weights of one layer."""
        return self._layer_layout(name).full(_at(stack, index))

    def _norm(self, params: Any, back: _Backward) -> jax.Array:
        """The norm of `clip_by_global_norm`, by a backward pass of its own."""
        dx, square = back.dx, _zero(params)
        stacks = self._model.by_name(params["layers"])

        def use(index: Any, layer: Any, grads: Any, dx: Any, square: Any) -> Any:
            del index, layer
            return dx, square + _square(grads, square)

        for name in reversed(back.passes):
            dx, square = back.passes[name].backward(
                lambda carry, name=name: stacks[name],
                back.saved[name],
                dx,
                use,
                square,
            )
        d_outer = _add(back.d_outer, back.embed_grad(dx))
        return jnp.sqrt(self._rank_mean(square + _square(d_outer, square)))

    def _update(
        self, state: TrainState, back: _Backward, scale: Any, finite: jax.Array
    ) -> tuple[Any, LayeredOptState, jax.Array, jax.Array]:
        """(params, optimizer state, squared norm, whether all was updated)."""
        params = self._model.by_name(state.params["layers"])
        states = self._model.by_name(state.opt_state.layers)
        # Alike on all ranks, for they round the same weights.
        base = jax.random.key(0) if state.key is None else state.key
        key = jax.random.fold_in(jax.random.fold_in(base, _ROUNDING), state.step)
        unit = 1
        square, taken, dx = _zero(state.params), finite, back.dx
        for name in reversed(back.passes):
            layout = self._layer_layout(name)

            def use(
                index: jax.Array,
                layer: Any,
                grads: Any,
                dx: Any,
                carry: Any,
                layout: Layout = layout,
                unit: int = unit,
            ) -> Any:
                del layer
                stack, stack_state, square, taken = carry
                new, new_state, own_square, ok = self._apply(
                    layout,
                    _at(stack, index),
                    _at(stack_state, index),
                    grads,
                    scale,
                    finite,
                    jax.random.fold_in(key, unit + index),
                )
                stack = _put(stack, new, index)
                stack_state = _put(stack_state, new_state, index)
                square += own_square.astype(square.dtype)
                return dx, (stack, stack_state, square, taken & ok)

            carry = (params[name], states[name], square, taken)
            dx, carry = back.passes[name].backward(
                lambda carry: carry[0], back.saved[name], dx, use, carry
            )
            params[name], states[name], square, taken = carry
            unit += self._depths[name]
        grads = _add(back.d_outer, back.embed_grad(dx))
        outer, outer_state, own_square, ok = self._apply(
            self._outer,
            state.params["outer"],
            state.opt_state.outer,
            grads,
            scale,
            finite,
            jax.random.fold_in(key, 0),
        )
        new = {"outer": outer, "layers": self._model.join(params)}
        opt_state = LayeredOptState(outer_state, self._model.join(states))
        square += own_square.astype(square.dtype)
        return new, opt_state, square, taken & ok

    def _apply(
        self,
        layout: Layout,
        params: Any,
        unit_state: UnitState,
        grads: Any,
        scale: Any,
        finite: jax.Array,
        key: jax.Array,
    ) -> tuple[Any, Any, jax.Array, jax.Array]:
        """Reduces, transforms and applies one tree of gradients.

        Returns:
          (params, state, squared norm of the gradient, whether it was applied).
        """
        assert self._reduces is not None
        grads = _wide(grads)
        square = self._rank_mean(square_norm(_floats(grads)))
        finite = finite & jnp.isfinite(square)
        if scale is not None:
            grads = jax.tree.map(
                lambda g: g * scale.astype(g.dtype) if _is_float(g) else g, grads
            )
        done = (*self._shard_axes, *self._reduces)
        dense = self._wide(tuple(a for a in self.batch_axes if a not in done))
        grads = layout.reduce(grads, dense)
        own = layout.own(params)
        held = layout.unlead(unit_state)

        def transformed() -> tuple[Any, UnitState]:
            updates, new_tx = self._tx.update(grads, held.tx, _wide(own))
            new, rounding = self._rounding.apply(own, updates, held.rounding, key)
            return new, UnitState(new_tx, rounding)

        new, new_held = where(finite, transformed, (own, held))
        return layout.kept(new), layout.lead(new_held), square, finite

    def _rank_mean(self, square: jax.Array) -> jax.Array:
        axes = self._wide(self.batch_axes)
        return lax.psum(square, axes) / self._ranks if axes else square


def make_layered_train_step(
    model: LayeredModel,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    *,
    has_key: bool = False,
    microbatches: int = 1,
    recompute: Recompute = "full",
    max_norm: float | None = None,
    skip_nonfinite: bool = False,
    rounding: str | None = None,
    shard: Kind = "none",
    shard_axes: Axes = ("data",),
    weight_prefetch: int = 1,
    reduces: Axes | None = None,
) -> LayeredTrainStep:
    r"""A training step that never holds more than one layer's gradient.

    Like `make_train_step`, over the `node` and `data` axes of a mesh, for a model whose
    layers stack. `tx` is initialised for `outer` and for each layer on its own, and
    applied the moment their gradients exist. So it must not mix layers: clip with
    `max_norm`, not in the chain.

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
        "none": all that autodiff would save is.
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
      reduces: the axes `tx` reduces over, where tracing cannot find out.

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
    if max_norm is not None:
        check_range(
            "max_norm", max_norm, 0.0, float("inf"), "a gradient norm", open_low=True
        )
    if isinstance(recompute, str) and recompute not in ("full", "none"):
        raise ValueError(
            f'`recompute` must be "full", "none" or a sequence of names, got '
            f"{recompute!r}."
        )
    check_shard(shard, shard_axes, mesh)
    return LayeredTrainStep(
        model,
        tx,
        mesh,
        has_key=has_key,
        microbatches=microbatches,
        recompute=recompute if isinstance(recompute, str) else tuple(recompute),
        max_norm=max_norm,
        skip_nonfinite=skip_nonfinite,
        rounding=rounding,
        shard=shard,
        shard_axes=tuple(shard_axes),
        weight_prefetch=weight_prefetch,
        reduces=reduces,
    )


def _at(stack: Any, index: jax.Array) -> Any:
    return jax.tree.map(
        lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), stack
    )


def _put(stack: Any, layer: Any, index: jax.Array) -> Any:
    return jax.tree.map(
        lambda s, x: lax.dynamic_update_index_in_dim(s, x, index, 0), stack, layer
    )


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _zero(params: Any) -> jax.Array:
    """0 in the dtype that norms are summed in."""
    is_wide = any(x.dtype == jnp.float64 for x in jax.tree.leaves(params))
    return jnp.zeros([], jnp.float64 if is_wide else jnp.float32)


def _square(tree: Any, like: jax.Array) -> jax.Array:
    return square_norm(_floats(tree)).astype(like.dtype)


def _floats(tree: Any) -> list[jax.Array]:
    return [x for x in jax.tree.leaves(tree) if _is_float(x)]


def _wide(tree: Any) -> Any:
    """Half precision as float32, in which all is transformed."""
    return jax.tree.map(lambda x: widen(x) if _is_float(x) else x, tree)


def _wide_shapes(tree: Any, leading: int = 0) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[leading:], wide_dtype(x.dtype)), tree
    )


def _add(a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), a, b)
