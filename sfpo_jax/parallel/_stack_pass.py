"""Forward and backward through a stack of layers, one layer's gradient at a time.

What the backward pass needs of a layer is saved by the forward pass, but for the
layer's own weights: these are read again, which is what lets them be updated, or be
gathered from other devices, while the pass goes on.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sfpo_jax.collectives import is_float
from sfpo_jax.memory import Halves
from sfpo_jax.parallel._offload import (
    Offload,
    in_order,
    is_worth,
    layer_at,
    to_host,
)

Recompute = str | Sequence[str]
# (layers, what they compute again), from the first layer on; or what learns of it.
Runs = Sequence[tuple[int, Recompute]]
Learn = Callable[[Callable[..., Any], tuple[Any, ...]], None]
# (stack, layer number) -> the weights of one layer.
Fetch = Callable[[Any, jax.Array], Any]
# (layer number, gradient, carry) -> carry.
Consume = Callable[[jax.Array, Any, Any], Any]


class Saved(NamedTuple):
    """What the forward pass leaves for the backward pass."""

    stacked: list[list[jax.Array]]  # by run, [layers, microbatches, ...] each
    through: list[jax.Array]  # [microbatches, ...], what no layer changed


class StackPass:
    """The passes through one stack.

    Args:
      block: (layer, x, key) -> x.
      depth: layers of the stack.
      microbatches: parts of the batch; every leaf of x is led by an axis of them.
      recompute: "full" saves the inputs of each layer, a sequence of names also what
        `jax.ad_checkpoint.checkpoint_name` names so, "none" all that autodiff saves;
        or runs, that differ in it.
      fetch: reads, or gathers, the weights of a layer.
      ahead: layers fetched before they are needed.
      learn: told of the block, as it is differentiated.
      offload: what of the stack lies in the host's memory.
    """

    def __init__(
        self,
        block: Callable[..., Any],
        depth: int,
        microbatches: int,
        recompute: Recompute | Runs,
        fetch: Fetch,
        ahead: int,
        learn: Learn | None = None,
        offload: Sequence[Offload] = (),
    ) -> None:
        self._block, self._depth = block, depth
        self._microbatches = microbatches
        self._runs = as_runs(recompute, depth)
        self._fetch, self._ahead = fetch, ahead
        self._learn = learn
        self._is_far = bool(offload)
        self._saves_far = "activations" in offload
        # Known once the forward pass is traced, of each run: the pullback's leaves, in
        # order, each ("layer" | "through" | "saved", place) or ("static", object).
        self._pullbacks: list[tuple[Any, list[tuple[str, Any]]]] = []

    def forward(self, stack: Any, x: Any, keys: Any) -> tuple[Any, Saved]:
        """(x after the last layer, what `backward` needs); keys: [microbatches, depth]
        or None."""

        def body(run: int, carry: Any, index: jax.Array) -> Any:
            x, queue = carry
            layer, queue = self._take(stack, queue, index, 1)
            own_keys = None if keys is None else keys[:, index]
            y, saved = self._each(
                lambda part: self._apply(run, layer, *part), (x, own_keys)
            )
            return (y, queue), [self._put_by(x) for x in saved]

        carry, stacked = (x, self._first(stack, [0, 1])), []
        self._pullbacks = [(None, [])] * len(self._runs)
        for run, (start, stop, _) in enumerate(self._runs):
            one = functools.partial(body, run)
            carry, saved = lax.scan(one, carry, jnp.arange(start, stop))
            stacked.append(saved)
        floats = _split(carry[0])[0]
        return carry[0], Saved(stacked, floats)

    def backward(
        self,
        stack: Callable[[Any], Any],
        saved: Saved,
        dx: list[jax.Array],
        use: Consume,
        carry: Any,
        lead: int = 0,
        before: Callable[[jax.Array, Any], Any] = lambda index, carry: carry,
    ) -> tuple[list[jax.Array], Any]:
        """From the last layer to the first: (gradient of x before the first, carry).

        Args:
          stack: (carry) -> the stacked weights; the carry may hold them changed.
          saved: from `forward`.
          dx: gradients of the floating leaves of x after the last layer.
          use: called with each layer's gradient.
          carry: the first carry.
          lead: first turns that change the structure of the carry, and so stand before
            the loop.
          before: (layer number, carry) -> carry, called before each layer.
        """
        last = self._depth - 1

        def saved_of(run: int, index: jax.Array) -> list[jax.Array]:
            place = jnp.maximum(index - self._runs[run][0], 0)
            return layer_at(saved.stacked[run], place)

        def body(run: int, step: jax.Array, state: Any) -> Any:
            dx, queue, fetched, carry = state
            index = last - step
            layer, queue = self._take(stack(carry), queue, index, -1)
            own = saved_of(run, index)
            carry = before(index, carry)
            grads, dx = self._pull(run, layer, own, saved.through, dx)
            return dx, queue, fetched, use(index, grads, carry)

        def body_far(run: int, step: jax.Array, state: Any) -> Any:
            dx, queue, fetched, carry = state
            index = last - step
            carry = before(index, carry)
            layer = queue[0] if queue else self._fetch(stack(carry), index)
            own = fetched if self._saves_far else saved_of(run, index)
            pull = functools.partial(self._pull, run)
            halves = Halves(pull, (layer, own, saved.through, dx))
            # What goes to the host goes under the first half of the arithmetic, what
            # comes from there under the second. Not in order, XLA would copy all of a
            # stack in every turn lest one disturb the other.
            carry, middle = in_order(carry, halves.first())
            if queue:
                ahead = self._inside(index - self._ahead)
                queue = (*queue[1:], self._fetch(stack(carry), ahead))
            if self._saves_far:
                fetched = saved_of(run, index - 1)
            grads, dx = halves.second(middle)
            return dx, queue, fetched, use(index, grads, carry)

        turn = body_far if self._is_far else body
        state = dx, self._first(stack(carry), [last, last - 1]), [], carry
        for run, (start, stop, _) in reversed(list(enumerate(self._runs))):
            begin, end = self._depth - stop, self._depth - start
            one = functools.partial(turn, run)
            if self._saves_far:
                fetched = saved_of(run, jnp.int32(stop - 1))
                state = state[0], state[1], fetched, state[3]
            for step in range(begin, min(lead, end)):
                state = one(jnp.int32(step), state)
            if max(lead, begin) < end:
                state = lax.fori_loop(max(lead, begin), end, one, state)
        return state[0], state[3]

    def _put_by(self, saved: jax.Array) -> jax.Array:
        """What is saved of one layer, in the memory where it waits."""
        return to_host(saved) if self._saves_far and is_worth(saved) else saved

    def _first(self, stack: Any, indices: Sequence[int]) -> tuple[Any, ...]:
        """The layers fetched before a loop begins."""
        way = indices[1] - indices[0]
        places = [indices[0] + way * step for step in range(self._ahead)]
        return tuple(self._fetch(stack, self._inside(jnp.int32(p))) for p in places)

    def _take(
        self, stack: Any, queue: tuple[Any, ...], index: jax.Array, way: int
    ) -> tuple[Any, tuple[Any, ...]]:
        """(weights of layer `index`, the queue with the next one in)."""
        if not queue:
            return self._fetch(stack, index), ()
        new = self._fetch(stack, self._inside(index + way * self._ahead))
        return queue[0], (*queue[1:], new)

    def _inside(self, index: jax.Array) -> jax.Array:
        return jnp.clip(index, 0, self._depth - 1)

    def _apply(
        self, number: int, layer: Any, x: Any, key: Any
    ) -> tuple[Any, list[jax.Array]]:
        """One layer on one microbatch: (y, what the pullback needs besides weights)."""
        floats, rest, join = _split(x)
        through: list[bool] = []

        def run(layer: Any, floats: list[jax.Array]) -> Any:
            y = self._block(layer, join(floats, rest), key)
            y_floats, y_rest, _ = _split(y)
            _check_alike(x, y)
            through[:] = [a is b for a, b in zip(y_floats, floats, strict=True)]
            return y_floats, y_rest

        start, stop, recompute = self._runs[number]
        if self._learn is not None:
            self._learn(run, (layer, floats))
        if recompute != "none":
            policy = jax.checkpoint_policies.nothing_saveable
            if recompute != "full":
                policy = jax.checkpoint_policies.save_only_these_names(*recompute)
            # A loop shares nothing with another pass; of one turn, XLA makes no loop.
            is_one = stop - start == 1
            run = jax.checkpoint(run, policy=policy, prevent_cse=is_one)
        y_floats, pullback, y_rest = jax.vjp(run, layer, floats, has_aux=True)
        known = {id(w): ("layer", i) for i, w in enumerate(jax.tree.leaves(layer))}
        known |= {
            id(f): ("through", i)
            for i, (f, is_through) in enumerate(zip(floats, through, strict=True))
            if is_through
        }
        leaves, structure = jax.tree.flatten(pullback)
        slots, saved = [], []
        for leaf in leaves:
            if not isinstance(leaf, jax.Array):
                slots.append(("static", leaf))
            elif id(leaf) in known:
                slots.append(known[id(leaf)])
            else:
                slots.append(("saved", len(saved)))
                saved.append(leaf)
        self._pullbacks[number] = structure, slots
        return join(y_floats, y_rest), saved

    def _pull(
        self,
        run: int,
        layer: Any,
        saved: list[jax.Array],
        through: list[jax.Array],
        dx: list[jax.Array],
    ) -> tuple[Any, list[jax.Array]]:
        """(gradient of the weights, of x) of one layer, means over microbatches."""
        weights = jax.tree.leaves(layer)
        pullback, slots = self._pullbacks[run]

        def one(part: Any) -> tuple[Any, list[jax.Array]]:
            saved, through, dy = part
            found = {"layer": weights, "saved": saved, "through": through}
            leaves = [
                place if kind == "static" else found[kind][place]
                for kind, place in slots
            ]
            grads, dx = jax.tree.unflatten(pullback, leaves)(dy)
            return jax.tree.map(as_gradient, grads, layer), dx

        return accumulate(one, (saved, through, dx), self._microbatches)

    def _each(self, fn: Callable[[Any], Any], parts: Any) -> Any:
        return each(fn, parts, self._microbatches)


def as_runs(recompute: Any, depth: int) -> list[tuple[int, int, Recompute]]:
    """(first layer, the one behind the last, what is computed again) of each run.

    Raises:
      ValueError: runs that do not have as many layers as the stack, or an unknown word.
    """
    if isinstance(recompute, str) or not any(isinstance(r, tuple) for r in recompute):
        recompute = ((depth, recompute),)
    runs, start = [], 0
    for layers, way in recompute:
        if isinstance(way, str) and way not in ("full", "none"):
            raise ValueError(
                '`recompute` must be "full", "none" or a sequence of names, runs of '
                f'them, or "auto", got {way!r}.'
            )
        runs.append((start, start + layers, way))
        start += layers
    if start != depth:
        raise ValueError(
            f"`recompute` is about {start} layers, the stack has {depth}: plan it anew."
        )
    return runs


def each(fn: Callable[[Any], Any], parts: Any, microbatches: int) -> Any:
    """`fn` of every microbatch; arrays in and out are led by their axis."""
    if microbatches == 1:
        return jax.tree.map(lambda y: y[None], fn(jax.tree.map(lambda x: x[0], parts)))
    return lax.map(fn, parts)


def accumulate(
    fn: Callable[[Any], tuple[Any, Any]], parts: Any, microbatches: int
) -> tuple[Any, Any]:
    """(mean of the first results, the second ones led by the axis of microbatches).

    Several are summed in float32 or wider, and the mean comes back in that.
    """
    if microbatches == 1:
        grads, out = fn(jax.tree.map(lambda x: x[0], parts))
        return grads, jax.tree.map(lambda y: y[None], out)
    one = jax.tree.map(lambda x: x[0], parts)
    shapes = jax.eval_shape(fn, one)[0]

    def body(total: Any, part: Any) -> Any:
        grads, out = fn(part)
        return jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, grads), out

    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, wide_dtype(s.dtype)), shapes)
    total, out = lax.scan(body, zeros, parts)
    return jax.tree.map(lambda t: t / microbatches if is_float(t) else t, total), out


def wide_dtype(dtype: Any) -> Any:
    """float32 for what is narrower; others as they are."""
    is_narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
    return jnp.dtype(jnp.float32) if is_narrow else jnp.dtype(dtype)


def as_gradient(grad: Any, param: jax.Array) -> jax.Array:
    """The gradient as an array: differentiation gives integers a float0."""
    return grad if is_float(param) else jnp.zeros_like(param)


def floats_of(x: Any) -> list[jax.Array]:
    """The floating leaves of x, those that have gradients."""
    return _split(x)[0]


def with_floats(x: Any, floats: list[jax.Array]) -> Any:
    """x with its floating leaves replaced."""
    _, rest, join = _split(x)
    return join(floats, rest)


def _split(x: Any) -> tuple[list[jax.Array], list[jax.Array], Callable[..., Any]]:
    """(floating leaves, the others, a function that joins such lists again)."""
    leaves, treedef = jax.tree.flatten(x)
    marks = [is_float(leaf) for leaf in leaves]

    def join(floats: Sequence[Any], rest: Sequence[Any]) -> Any:
        a, b = iter(floats), iter(rest)
        return treedef.unflatten([next(a) if f else next(b) for f in marks])

    floats = [x for x, f in zip(leaves, marks, strict=True) if f]
    rest = [x for x, f in zip(leaves, marks, strict=True) if not f]
    return floats, rest, join


def _check_alike(x: Any, y: Any) -> None:
    """Raises ValueError where a block changes the structure, a shape or a dtype."""

    def forms(tree: Any) -> dict[str, tuple[Any, ...]]:
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(p): (a.shape, a.dtype) for p, a in leaves}

    before, after = forms(x), forms(y)
    for path in sorted(before | after):
        a, b = before.get(path), after.get(path)
        if a != b:
            raise ValueError(
                "`block` must return x with the shapes and dtypes it got, but x"
                f"{path} came as {_form(a)} and went as {_form(b)}."
            )


def _form(form: tuple[Any, ...] | None) -> str:
    return f"{form[1]}{list(form[0])}" if form else "nothing"
