"""A function in two halves of equal arithmetic, with something else done in between."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend import core

from sfpo_jax.memory._flops import count_flops, equation_flops
from sfpo_jax.memory._named import inline, inner_call, interfaces


class Halves:
    """A function of some arguments, traced and cut where half of its FLOPs are done.

    What runs inside one loop or one kernel stays in one half.

    Args:
      fn: (*args) -> a tree of arrays.
      args: what it is called with.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.full((4, 4), 0.5)
      >>> halves = Halves(lambda x: jnp.tanh(x @ x) @ x @ x, (x,))
      >>> middle = halves.first()
      >>> middle = jax.lax.optimization_barrier(middle)
      >>> print(halves.second(middle).shape)
      (4, 4)
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        leaves, tree = jax.tree.flatten(args)
        self._out_tree: Any = None

        def flat(*leaves: Any) -> list[Any]:
            out, structure = jax.tree.flatten(fn(*jax.tree.unflatten(tree, leaves)))
            self._out_tree = structure
            return out

        closed = jax.make_jaxpr(flat)(*leaves)
        closed = jax.make_jaxpr(functools.partial(inline, closed, _has_work))(*leaves)
        jaxpr = closed.jaxpr
        self._known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        self._known |= dict(zip(jaxpr.invars, leaves, strict=True))
        equations, middle = list(jaxpr.eqns), _middle(jaxpr.eqns)
        self._parts = interfaces(jaxpr, [equations[:middle], equations[middle:]])
        self._outs = jaxpr.outvars

    def first(self) -> list[Any]:
        """What the first half hands to the second, or returns already."""
        return self._run(0)

    def second(self, middle: list[Any]) -> Any:
        """What the function returns.

        Args:
          middle: from `first`.
        """
        self._known |= dict(zip(self._parts[0][1], middle, strict=True))
        found = self._run(1)
        self._known |= dict(zip(self._parts[1][1], found, strict=True))
        outs = [
            v.val if isinstance(v, core.Literal) else self._known[v] for v in self._outs
        ]
        return jax.tree.unflatten(self._out_tree, outs)

    def _run(self, half: int) -> list[Any]:
        part, _ = self._parts[half]
        run = core.jaxpr_as_fun(core.ClosedJaxpr(part, ()))
        return run(*(self._known[variable] for variable in part.invars))


def _middle(equations: list[Any]) -> int:
    """The number of equations that do the first half of the FLOPs."""
    work = [equation_flops(equation).total for equation in equations]
    done, half = 0, sum(work) / 2
    for place, own in enumerate(work):
        # On the side that it lies closer to.
        if done + own / 2 > half:
            return place
        done += own
    return len(equations)


def _has_work(equation: Any) -> bool:
    inner = inner_call(equation)
    return inner is not None and count_flops(inner).total > 0
