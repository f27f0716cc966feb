"""What computing a function's values again costs, and what keeping them takes.

Read from the jaxpr of the forward pass that autodiff leaves: its outputs are what the
backward pass needs. Whatever is needed and not kept is computed again, from what is
kept: so the cost of a value depends on which others are kept, and is told by names.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from sfpo_jax.memory._flops import equation_flops
from sfpo_jax.memory._named import Named, bytes_of, is_name

# Which missing names make an equation run again; None: it runs again in any case.
Cause = frozenset[str] | None
_NEVER: frozenset[str] = frozenset()


class Value(NamedTuple):
    """A named value.

    Attributes:
      name: its name and number.
      bytes: what keeping it takes.
      stretch: the stretch that makes it; those that cuts end are numbered in order.
      is_cut: whether it ends its stretch.
      is_needed: whether the backward pass itself reads it.
      cause: which missing names make it needed.
    """

    name: str
    bytes: int
    stretch: int
    is_cut: bool
    is_needed: bool
    cause: Cause


class Work(NamedTuple):
    """Equations of one stretch that run again for the same cause."""

    stretch: int
    cause: Cause
    flops: int  # of products, as `count_flops` counts
    operations: int  # these, and one for every entry that is made again


class Graph(NamedTuple):
    """A function between its inputs, told in stretches that cuts end.

    Attributes:
      values: the named values.
      work: what may have to run again.
      residual: bytes that autodiff keeps of each stretch; inputs are not counted.
      grads: bytes of the gradients of inputs that each stretch is the first to read.
      passing: bytes of what its backward pass makes and drops.
    """

    values: tuple[Value, ...]
    work: tuple[Work, ...]
    residual: tuple[int, ...]
    grads: tuple[int, ...]
    passing: tuple[int, ...]


def make_graph(
    named: Named, is_input: Sequence[bool], is_output: Sequence[bool]
) -> Graph:
    """Differentiates a function and reads what is left.

    Args:
      named: the function.
      is_input: which of its inputs it is differentiated by.
      is_output: which of its outputs are differentiated.
    """
    jaxpr = _forward(named, is_input, is_output)
    stretches = _stretches(jaxpr, named.cuts)
    needed = {v for v in jaxpr.outvars if not isinstance(v, core.Literal)}
    causes: dict[Any, Cause] = dict.fromkeys(needed, None)
    values: list[Value] = []
    work: dict[tuple[int, Cause], list[int]] = {}
    for equation, stretch in reversed(list(zip(jaxpr.eqns, stretches, strict=True))):
        cause = _union([causes.get(v, _NEVER) for v in equation.outvars])
        if is_name(equation):
            name, out = equation.params["name"], equation.outvars[0]
            values.append(
                Value(
                    name,
                    bytes_of(out),
                    stretch,
                    name in named.cuts,
                    out in needed,
                    cause,
                )
            )
            cause = _NEVER if cause == _NEVER else frozenset((name,))
        elif cause != _NEVER:
            flops = equation_flops(equation).total
            entries = sum(int(getattr(v.aval, "size", 0)) for v in equation.outvars)
            total = work.setdefault((stretch, cause), [0, 0])
            total[0] += flops
            total[1] += flops + entries
        for variable in equation.invars:
            if not isinstance(variable, core.Literal) and cause != _NEVER:
                known = causes.get(variable, _NEVER)
                causes[variable] = _union([known, cause])
    residual, constants = [0] * (len(named.cuts) + 1), set()
    largest = list(residual)
    for equation, stretch in zip(jaxpr.eqns, stretches, strict=True):
        # What is made of literals alone, XLA makes wherever it is read.
        if all(isinstance(v, core.Literal) or v in constants for v in equation.invars):
            constants.update(equation.outvars)
            continue
        sizes = [bytes_of(variable) for variable in equation.outvars]
        largest[stretch] = max(largest[stretch], *sizes, 0)
        residual[stretch] += sum(bytes_of(v) for v in equation.outvars if v in needed)
    return Graph(
        tuple(reversed(values)),
        tuple(Work(*key, *total) for key, total in work.items()),
        tuple(residual),
        _gradients(named, is_input),
        # The gradients of what an operation makes and of what it reads.
        tuple(2 * size for size in largest),
    )


def _forward(named: Named, is_input: Sequence[bool], is_output: Sequence[bool]) -> Any:
    """The jaxpr whose outputs are what the backward pass needs."""
    run = core.jaxpr_as_fun(named.closed)

    def keep(*leaves: Any) -> Any:
        def split(*chosen: Any) -> Any:
            place = iter(chosen)
            outs = run(
                *(
                    next(place) if wanted else leaf
                    for leaf, wanted in zip(leaves, is_input, strict=True)
                )
            )
            pairs = list(zip(outs, is_output, strict=True))
            return [o for o, w in pairs if w], [o for o, w in pairs if not w]

        chosen = [x for x, w in zip(leaves, is_input, strict=True) if w]
        _, pull, _ = jax.vjp(split, *chosen, has_aux=True)
        return [x for x in jax.tree.leaves(pull) if isinstance(x, jax.Array)]

    avals = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype)
        for v in named.closed.jaxpr.invars
    ]
    return jax.make_jaxpr(keep)(*avals).jaxpr


def _stretches(jaxpr: Any, cuts: Sequence[str]) -> list[int]:
    """The stretch of each equation."""
    ends, now, found = set(cuts), 0, []
    for equation in jaxpr.eqns:
        found.append(now)
        now += is_name(equation) and equation.params["name"] in ends
    return found


def _union(causes: Sequence[Cause]) -> Cause:
    merged: frozenset[str] = _NEVER
    for cause in causes:
        if cause is None:
            return None
        merged |= cause
    return merged


def _gradients(named: Named, is_input: Sequence[bool]) -> tuple[int, ...]:
    jaxpr = named.closed.jaxpr
    wanted = {v for v, w in zip(jaxpr.invars, is_input, strict=True) if w}
    grads = [0] * (len(named.cuts) + 1)
    for equation, stretch in zip(
        jaxpr.eqns, _stretches(jaxpr, named.cuts), strict=True
    ):
        for variable in equation.invars:
            if not isinstance(variable, core.Literal) and variable in wanted:
                grads[stretch] += bytes_of(variable)
                wanted.remove(variable)
    return tuple(grads)


def cost(
    graph: Graph, saved: frozenset[str], first: int | None = None
) -> tuple[int, int]:
    """(FLOPs, operations) that run again where these values are kept.

    Args:
      graph: of the function.
      saved: names.
      first: the stretch from which on nothing runs again; None for the one that
        follows the last cut that is kept.
    """
    first = last_segment(graph, saved) if first is None else first
    missing = {
        v.name for v in graph.values if v.name not in saved and v.stretch < first
    }

    def runs(cause: Cause) -> bool:
        return cause is None or any(is_run[name] for name in cause)

    is_run = dict.fromkeys((v.name for v in graph.values), False)
    # A value's cause names later values only.
    for value in reversed(graph.values):
        is_run[value.name] = value.name in missing and runs(value.cause)
    again = [w for w in graph.work if w.stretch < first and runs(w.cause)]
    return sum(w.flops for w in again), sum(w.operations for w in again)


def last_segment(graph: Graph, saved: frozenset[str]) -> int:
    """The first stretch of the last segment, which is never computed again."""
    ends = [v.stretch for v in graph.values if v.is_cut and v.name in saved]
    return max(ends, default=-1) + 1
