"""The updates of a layered step: what is done with the gradients of a backward pass."""

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sfpo_jax.parallel._layered_model import LayeredModel
from sfpo_jax.parallel._layered_pass import Backward, Visit
from sfpo_jax.parallel._offload import Offload, is_worth, layer_at, put_layer, to_host
from sfpo_jax.parallel._pipeline import Pipeline, Run, Stage
from sfpo_jax.parallel._sharding import Layout
from sfpo_jax.parallel._unit_update import Applied, Reduced, UnitUpdate, Verdict, wide
from sfpo_jax.transforms import SCOPES, Phase, compresses_next, run_once


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
      offload: what of the layers lies in the host's memory.
    """

    model: LayeredModel
    outer: Layout
    layers: Mapping[str, Layout]
    depths: Mapping[str, int]
    unit: UnitUpdate
    pipeline_depth: int
    offload: tuple[Offload, ...] = ()

    def init(self, params: Any) -> LayeredOptState:
        """States of what this rank updates; inside `shard_map`."""
        stacks = {
            name: self._init_stack(self.layers[name], self.depths[name], stack)
            for name, stack in self.model.by_name(params["layers"]).items()
        }
        outer = self.unit.init(self.outer, params["outer"])
        return LayeredOptState(outer, self.model.join(stacks))

    def _init_stack(self, layout: Layout, depth: int, stack: Any) -> Any:
        if not self.offload:
            return jax.vmap(functools.partial(self.unit.init, layout))(stack)

        # One by one: all at once the states may be more than the device holds.
        def one(index: jax.Array) -> Any:
            state = self.unit.init(layout, layer_at(stack, index))
            if "states" not in self.offload:
                return state
            return jax.tree.map(lambda x: to_host(x) if is_worth(x) else x, state)

        return jax.lax.map(one, jnp.arange(depth))

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

        Where the transformation has phases there are two such passes in the program,
        one a phase, of which one runs.

        Args:
          params: what this rank keeps.
          opt_state: from `init`, or the step before.
          back: the backward pass.
          verdict: see `UnitUpdate.reduce`.
          key: for rounding, alike on all ranks.
        """
        given = Updated(params, opt_state, _zero(params), jnp.bool_(True))
        compresses = compresses_next(opt_state)
        if compresses is None:
            return self._run(given, back, verdict, key, None)

        def take(phase: Phase) -> Callable[[Updated], Updated]:
            def update(given: Updated) -> Updated:
                with jax.named_scope(SCOPES[phase]):
                    return self._run(given, back, verdict, key, phase)

            return update

        given = run_once(~compresses, take("warmup"), given)
        return run_once(compresses, take("compressed"), given)

    def _run(
        self,
        given: Updated,
        back: Backward,
        verdict: Verdict | None,
        key: jax.Array,
        phase: Phase | None,
    ) -> Updated:
        params, opt_state = given.params, given.opt_state
        first = dict(zip(self.depths, _starts(self.depths.values()), strict=True))

        def visit(name: str) -> Visit:
            pipeline = Pipeline(
                self._stages(
                    self.layers[name], verdict, phase, lambda i: first[name] + i, key
                ),
                # No transfer begins with parameters, so these reads may wait. Beside
                # the write they would make XLA copy the stack in every turn.
                lambda began, now, index: _Layer(
                    layer_at(now.params[name], index),
                    layer_at(began.states[name], index),
                ),
                lambda carry, index, old, new: carry.write(name, index, old, new),
                self.pipeline_depth,
                functools.partial(self._enter, name),
            )

            def before(index: jax.Array, carry: _Carry) -> _Carry:
                waiting, carry = pipeline.advance(index, carry.waiting, carry)
                return carry._replace(waiting=waiting)

            def use(index: jax.Array, grads: Any, carry: _Carry) -> _Carry:
                waiting, carry = pipeline.enter(index, grads, carry.waiting, carry)
                return carry._replace(waiting=waiting)

            def finish(carry: _Carry) -> _Carry:
                waiting, carry = carry.waiting, carry._replace(waiting=())
                return pipeline.finish(waiting, carry)

            return Visit(
                lambda carry: carry.params[name], use, before, pipeline.turns, finish
            )

        carry = _Carry(
            self.model.by_name(params["layers"]),
            self.model.by_name(opt_state.layers),
            _zero(params),
            jnp.bool_(True),
            (),
        )
        d_outer, carry = back.run(visit, carry)
        reduced = self.unit.reduce(self.outer, d_outer, verdict)
        sent, held = self.unit.send(self.outer, opt_state.outer, reduced, phase)
        key = jax.random.fold_in(key, 0)
        outer = self.unit.receive(self.outer, params["outer"], held, sent, key, phase)
        carry = carry.add(outer)
        return Updated(
            {
                "outer": self.outer.kept(outer.own),
                "layers": self.model.join(carry.params),
            },
            LayeredOptState(outer.state, self.model.join(carry.states)),
            carry.square,
            carry.taken,
        )

    def _stages(
        self,
        layout: Layout,
        verdict: Verdict | None,
        phase: Phase | None,
        number: Callable[[jax.Array], jax.Array],
        key: jax.Array,
    ) -> list[Stage]:
        """From the gradient of a layer of one stack to its new parameters."""
        unit = self.unit

        def reduce(index: jax.Array, grads: Any, layer: _Layer) -> Any:
            del index
            return unit.reduce(layout, grads, verdict), layer

        def send(index: jax.Array, reduced: Reduced, layer: _Layer) -> Any:
            del index
            sent, state = unit.send(layout, layer.state, reduced, phase)
            return sent, layer._replace(state=state)

        def receive(index: jax.Array, sent: Reduced, layer: _Layer) -> Any:
            own_key = jax.random.fold_in(key, number(index))
            done = unit.receive(layout, layer.params, layer.state, sent, own_key, phase)
            return done.own, layer._replace(state=done.state, done=(done,))

        def keep(index: jax.Array, own: Any, layer: _Layer) -> Any:
            del index
            return None, layer._replace(params=layout.kept(own))

        fetched = self._fetched
        stages = [
            Stage(reduce, bool(layout.holders or unit.dense)),
            Stage(send, unit.exchanges and phase is not None),
            Stage(receive, unit.exchanges or bool(fetched)),
            Stage(keep, layout.kind == "states"),
        ]
        if not fetched:
            return stages
        *first, last = stages
        return [
            *(s._replace(run=_travelling(s.run, fetched, False)) for s in first),
            last._replace(run=_travelling(last.run, fetched, True)),
        ]

    @property
    def _fetched(self) -> tuple[str, ...]:
        """Fields of a layer that come from the host before its update, and go back."""
        fields = {"weights": "params", "states": "state"}
        return tuple(fields[name] for name in self.offload if name in fields)

    def _enter(self, name: str, carry: "_Carry", index: jax.Array, grads: Any) -> Any:
        """The gradient, and what of its layer comes from the host meanwhile."""
        if not self._fetched:
            return grads
        layer = _Layer(
            layer_at(carry.params[name], index), layer_at(carry.states[name], index)
        )
        return grads, tuple(getattr(layer, field) for field in self._fetched)


class _Layer(NamedTuple):
    """What is one layer's while it is updated."""

    params: Any
    state: Any
    done: tuple[Applied, ...] = ()  # once its state is new


def _travelling(run: Run, fields: tuple[str, ...], is_last: bool) -> Run:
    """A stage of a layer some fields of which travel beside its gradient.

    They are written by the last stage, once, and not by those before.
    """

    def with_fields(index: jax.Array, value: Any, layer: _Layer) -> tuple[Any, _Layer]:
        value, parts = value
        held = layer._replace(**dict(zip(fields, parts, strict=True)))
        value, new = run(index, value, held)
        if is_last:
            return value, new
        parts = tuple(getattr(new, field) for field in fields)
        return (value, parts), new._replace(**{f: getattr(layer, f) for f in fields})

    return with_fields


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

    def write(self, name: str, index: jax.Array, old: _Layer, new: _Layer) -> "_Carry":
        """With a layer of one stack new, where it is not the same arrays as before."""
        params = _put_changed(self.params[name], index, old.params, new.params)
        states = _put_changed(self.states[name], index, old.state, new.state)
        carry = self._replace(
            params={**self.params, name: params}, states={**self.states, name: states}
        )
        for done in new.done:
            carry = carry.add(done)
        return carry


def _put_changed(stack: Any, index: jax.Array, old: Any, new: Any) -> Any:
    leaves, treedef = jax.tree.flatten(stack)
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    for place, (before, after) in enumerate(pairs):
        if after is not before:
            leaves[place] = put_layer(leaves[place], after, index)
    return treedef.unflatten(leaves)


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
