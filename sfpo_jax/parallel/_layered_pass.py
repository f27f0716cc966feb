"""Forward and backward through a layered model: embedding, stacks, loss."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sfpo_jax.memory import Recorder
from sfpo_jax.parallel._layered_model import LayeredModel
from sfpo_jax.parallel._metrics import as_metrics
from sfpo_jax.parallel._offload import Offload, layer_at
from sfpo_jax.parallel._recompute import AUTO
from sfpo_jax.parallel._sharding import Layout
from sfpo_jax.parallel._stack_pass import (
    Consume,
    Learn,
    Recompute,
    Runs,
    Saved,
    StackPass,
    accumulate,
    as_gradient,
    as_runs,
    each,
    floats_of,
    with_floats,
)

_EMBED, _LOSS, _LAYERS = 0, 1, 2  # what a microbatch's keys are for


class Visit(NamedTuple):
    """What a backward pass does with one stack.

    Attributes:
      weights: (carry) -> the stacked weights; the carry may hold them changed.
      use: (layer number, gradient, carry) -> carry.
      before: (layer number, carry) -> carry, what is done for other layers before the
        layer is differentiated.
      lead: first turns in which `use` gives the carry another structure.
      finish: (carry) -> carry, after the last turn.
    """

    weights: Callable[[Any], Any]
    use: Consume
    before: Callable[[jax.Array, Any], Any] = lambda index, carry: carry
    lead: int = 0
    finish: Callable[[Any], Any] = lambda carry: carry


class Backward(NamedTuple):
    """What backward passes begin with; several may."""

    passes: dict[str, StackPass]
    saved: dict[str, Saved]
    dx: list[jax.Array]  # gradients of x after the last layer
    d_outer: Any  # gradient of outer in the loss
    embed_grad: Callable[[list[jax.Array]], Any]  # of x at first -> of outer in embed

    def run(self, visit: Callable[[str], Visit], carry: Any) -> tuple[Any, Any]:
        """From the last layer to the first.

        Args:
          visit: name of a stack -> what is done with the gradients of its layers.
          carry: the first carry.

        Returns:
          (gradient of outer, last carry).
        """
        dx = self.dx
        for name in reversed(self.passes):
            does = visit(name)
            dx, carry = self.passes[name].backward(
                does.weights,
                self.saved[name],
                dx,
                does.use,
                carry,
                does.lead,
                does.before,
            )
            carry = does.finish(carry)
        d_outer = jax.tree.map(
            lambda x, y: x + y.astype(x.dtype), self.d_outer, self.embed_grad(dx)
        )
        return d_outer, carry


class LayeredPass(NamedTuple):
    """How a model is run on one rank.

    Attributes:
      model: its functions.
      outer: layout of the parameters outside the layers.
      layers: layouts of the layers of each stack.
      depths: layers of each stack.
      microbatches: parts of the batch.
      recompute: what layers compute again, of all stacks or by their names; or what
        learns of it.
      ahead: layers whose weights are fetched before they are needed.
      offload: what of the layers lies in the host's memory.
    """

    model: LayeredModel
    outer: Layout
    layers: Mapping[str, Layout]
    depths: Mapping[str, int]
    microbatches: int
    recompute: Recompute | Runs | Mapping[str, Recompute | Runs] | Recorder
    ahead: int
    offload: tuple[Offload, ...] = ()

    def _learn(self, name: str) -> Learn | None:
        if not isinstance(self.recompute, Recorder):
            return None
        recorder, size = self.recompute, (self.depths[name], self.microbatches)
        return lambda block, args: recorder.record_block(name, block, args, *size)

    def forward(
        self, params: Any, batch: Any, key: jax.Array | None
    ) -> tuple[jax.Array, dict[str, jax.Array], Backward]:
        """(loss, aux, what the backward passes need) of this rank's batch."""
        model, parts = self.model, self.microbatches
        batch = jax.tree.map(
            lambda x: x.reshape(parts, x.shape[0] // parts, *x.shape[1:]), batch
        )
        keys = None
        if key is not None:
            count = _LAYERS + sum(self.depths.values())
            keys = jax.vmap(
                lambda part: jax.random.split(jax.random.fold_in(key, part), count)
            )(jnp.arange(parts))

        def key_of(place: int) -> Any:
            return None if keys is None else keys[:, place]

        outer = self.outer.full(params["outer"])
        x = each(lambda part: model.embed(outer, *part), (batch, key_of(_EMBED)), parts)
        passes, saved, start = {}, {}, _LAYERS
        for name, block in model.blocks().items():
            depth = self.depths[name]
            passes[name] = StackPass(
                block,
                depth,
                parts,
                _recompute_of(self.recompute, name),
                functools.partial(fetch, self.layers[name]),
                self.ahead,
                self._learn(name),
                self.offload,
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
                return value, dict(aux)

            (value, aux), (d_outer, dx) = jax.value_and_grad(
                run, argnums=(0, 1), has_aux=True, allow_int=True
            )(outer, floats_of(x))
            value, aux = as_metrics(value, aux)
            return jax.tree.map(as_gradient, d_outer, outer), (value, aux, dx)

        d_outer, (losses, auxes, dx) = accumulate(
            loss_of, (x, batch, key_of(_LOSS)), parts
        )
        loss, aux = jax.tree.map(lambda v: jnp.mean(v, axis=0), (losses, auxes))

        def embed_grad(dx: list[jax.Array]) -> Any:
            def one(part: Any) -> Any:
                batch, key, dx = part
                # Gathered again rather than kept all the way.
                outer = self.outer.full(params["outer"])
                _, pull = jax.vjp(
                    lambda outer: floats_of(model.embed(outer, batch, key)), outer
                )
                return jax.tree.map(as_gradient, pull(dx)[0], outer), None

            return accumulate(one, (batch, key_of(_EMBED), dx), parts)[0]

        return loss, aux, Backward(passes, saved, dx, d_outer, embed_grad)


def check_recompute(recompute: Any, depths: Mapping[str, int]) -> None:
    """Looks at what layers compute again before the first batch is seen.

    Args:
      recompute: as the step is given it.
      depths: layers of each stack.

    Raises:
      ValueError: stacks that the model does not have, or lacks, runs of other depths.
    """
    if isinstance(recompute, Mapping) and set(recompute) != set(depths):
        wanted = f"a dict of the stacks {sorted(depths)}"
        if not all(depths):  # the only one has no name
            wanted = "one choice, as the model has one stack"
        raise ValueError(f"`recompute` must be {wanted}, got {sorted(recompute)}.")
    for name, depth in depths.items():
        as_runs(_recompute_of(recompute, name), depth)


def _recompute_of(recompute: Any, name: str) -> Recompute | Runs:
    if isinstance(recompute, Recorder) or recompute == AUTO:
        return "full"
    return recompute[name] if isinstance(recompute, Mapping) else recompute


def fetch(layout: Layout, stack: Any, index: jax.Array) -> Any:
    """Whole weights of one layer."""
    return layout.full(layer_at(stack, index))
