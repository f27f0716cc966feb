"""The updates of a layered step: what is done with the gradients of a backward pass."""

import functools
import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sfpo_jax.parallel._layered_model import LayeredModel
from sfpo_jax.parallel._layered_pass import Backward, Visit, layer_at, put_layer
from sfpo_jax.parallel._pipeline import Pipeline
from sfpo_jax.parallel._sharding import Layout
from sfpo_jax.parallel._unit_update import Applied, Reduced, UnitUpdate, Verdict, wide


class LayeredOptState(NamedTuple):
    """Optimizer states, one of `outer` and one a layer, stacked like the layers.

    Where parameters are cut over the mesh they are led by an axis of the devices that
    hold parts (behind that of the layers).
    """

    outer: Any  # UnitState
    layers: Any  # UnitState, or a dict of them for several stacks


class Updated(NamedTuple):
    """What the updates of a step leave."""

    params: Any
    opt_state: LayeredOptState
    square: jax.Array  # of all gradients, a mean over ranks; 0 where it was known
    taken: jax.Array  # bool[], whether nothing was skipped


class LayeredUpdate(NamedTuple):
    """How the units of a layered model are updated.

    Attributes:
      model: its functions.
      outer: layout of the parameters outside the layers.
      layers: layouts of the layers of each stack.
      depths: layers of each stack.
      unit: how one unit is.
      pipeline_depth: turns of the backward loop that an update may come late.
    """

    model: LayeredModel
    outer: Layout
    layers: Mapping[str, Layout]
    depths: Mapping[str, int]
    unit: UnitUpdate
    pipeline_depth: int

    def init(self, params: Any) -> LayeredOptState:
        """States of what this rank updates; inside `shard_map`."""
        stacks = {
            name: jax.vmap(functools.partial(self.unit.init, self.layers[name]))(stack)
            for name, stack in self.model.by_name(params["layers"]).items()
        }
        outer = self.unit.init(self.outer, params["outer"])
        return LayeredOptState(outer, self.model.join(stacks))

    def square(self, params: Any, back: Backward) -> jax.Array:
        """Squared norm of all gradients, by a backward pass; a mean over the ranks."""
        stacks = self.model.by_name(params["layers"])

        def visit(name: str) -> Visit:
            def use(index: jax.Array, grads: Any, square: jax.Array) -> jax.Array:
                del index
                return square + _square_of(self.layers[name], grads, square.dtype)

            return Visit(lambda carry: stacks[name], use)

        d_outer, square = back.run(visit, _zero(params))
        return self.unit.rank_mean(
            square + _square_of(self.outer, d_outer, square.dtype)
        )

    def run(
        self,
        params: Any,
        opt_state: LayeredOptState,
        back: Backward,
        verdict: Verdict | None,
        key: jax.Array,
    ) -> Updated:
        """One step's updates, by a backward pass.

        Args:
          params: what this rank keeps.
          opt_state: from `init`, or the step before.
          back: the backward pass.
          verdict: see `UnitUpdate.reduce`.
          key: for rounding, alike on all ranks.
        """
        first = dict(zip(self.depths, _starts(self.depths.values()), strict=True))

        def visit(name: str) -> Visit:
            layout = self.layers[name]

            def apply(index: jax.Array, reduced: Reduced, carry: _Carry) -> _Carry:
                stack, held = carry.params[name], carry.states[name]
                done = self.unit.apply(
                    layout,
                    layer_at(stack, index),
                    layer_at(held, index),
                    reduced,
                    jax.random.fold_in(key, first[name] + index),
                )
                return carry.add(done)._replace(
                    params={**carry.params, name: put_layer(stack, done.params, index)},
                    states={**carry.states, name: put_layer(held, done.state, index)},
                )

            pipeline = Pipeline(
                min(self.pipeline_depth, self.unit.stages(layout)),
                lambda grads: self.unit.reduce(layout, grads, verdict),
                apply,
            )

            def use(index: jax.Array, grads: Any, carry: _Carry) -> _Carry:
                waiting, carry = pipeline.turn(index, grads, carry.waiting, carry)
                return carry._replace(waiting=waiting)

            def finish(carry: _Carry) -> _Carry:
                waiting, carry = carry.waiting, carry._replace(waiting=())
                return pipeline.finish(waiting, carry)

            return Visit(lambda carry: carry.params[name], use, pipeline.depth, finish)

        carry = _Carry(
            self.model.by_name(params["layers"]),
            self.model.by_name(opt_state.layers),
            _zero(params),
            jnp.bool_(True),
            (),
        )
        d_outer, carry = back.run(visit, carry)
        outer = self.unit.apply(
            self.outer,
            params["outer"],
            opt_state.outer,
            self.unit.reduce(self.outer, d_outer, verdict),
            jax.random.fold_in(key, 0),
        )
        carry = carry.add(outer)
        return Updated(
            {"outer": outer.params, "layers": self.model.join(carry.params)},
            LayeredOptState(outer.state, self.model.join(carry.states)),
            carry.square,
            carry.taken,
        )


class _Carry(NamedTuple):
    """What goes through the updating loops."""

    params: dict[str, Any]  # stacks by name
    states: dict[str, Any]
    square: jax.Array  # of the gradients so far
    taken: jax.Array  # bool[], whether none was skipped
    waiting: tuple[Any, ...]  # gradients on their way, of the layers above

    def add(self, done: Applied) -> "_Carry":
        return self._replace(
            square=self.square + done.square.astype(self.square.dtype),
            taken=self.taken & done.taken,
        )


def _square_of(layout: Layout, grads: Any, dtype: Any) -> jax.Array:
    """The squared norm of one rank's gradients, as differentiation gives them."""
    return layout.split.square(layout.split.reduce(wide(grads))).astype(dtype)


def _starts(depths: Iterable[int]) -> list[int]:
    """Numbers of the first layers, 1 that of all; 0 is outside the layers."""
    return [1 + n for n in itertools.accumulate(depths, initial=0)][:-1]


def _zero(params: Any) -> jax.Array:
    """0 in the dtype that norms are summed in."""
    is_wide = any(x.dtype == jnp.float64 for x in jax.tree.leaves(params))
    return jnp.zeros([], jnp.float64 if is_wide else jnp.float32)
