"""A function with named values, and what its backward pass keeps of them.

`jax.ad_checkpoint.checkpoint_name` names values. Here the k-th value called "conv" is
"conv/k", in the order of the program, so that each can be kept or computed again by
itself. A named value through which everything flows, such as what a block returns, is
a cut: kept, it ends a segment, and each segment is differentiated under a
`jax.checkpoint` of its own. One checkpoint around all would keep the same values, but
XLA then computes much of what is computed again long before it is needed: the row "one
checkpoint around all" of `experiments.bench.recompute`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

# Calls that do nothing but hold a jaxpr; names inside are as good as names outside.
_CALLS = ("jit", "pjit", "closed_call", "core_closed_call", "checkpoint", "remat2")
# Of the bytes of a cut: what may flow past it, such as random keys.
_PAST = 1 / 64


class Named(NamedTuple):
    """A function, traced: names numbered, at the top level.

    Attributes:
      closed: its jaxpr; inputs and outputs are flat.
      cuts: names of the cuts, in order.
      out_tree: the structure of what it returns.
    """

    closed: core.ClosedJaxpr
    cuts: tuple[str, ...]
    out_tree: Any

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in order."""
        return tuple(
            equation.params["name"]
            for equation in self.closed.jaxpr.eqns
            if is_name(equation)
        )

    def run(self, leaves: Sequence[Any], saved: frozenset[str] | None) -> Any:
        """What the function returns.

        Args:
          leaves: its inputs, flat.
          saved: what is kept for the backward pass; None keeps what autodiff would.
            What lies behind the last cut that is kept is never computed again.
        """
        jaxpr = self.closed.jaxpr
        known = dict(zip(jaxpr.constvars, self.closed.consts, strict=True))
        known |= dict(zip(jaxpr.invars, leaves, strict=True))
        parts = _split(jaxpr.eqns, frozenset() if saved is None else saved, self.cuts)
        for place, (part, wanted) in enumerate(interfaces(jaxpr, parts)):
            fn = core.jaxpr_as_fun(core.ClosedJaxpr(part, ()))
            if place < len(parts) - 1:
                assert saved is not None
                policy = jax.checkpoint_policies.save_only_these_names(*sorted(saved))
                fn = jax.checkpoint(fn, policy=policy)
            found = fn(*(known[variable] for variable in part.invars))
            known |= dict(zip(wanted, found, strict=True))
        outs = [
            v.val if isinstance(v, core.Literal) else known[v] for v in jaxpr.outvars
        ]
        return jax.tree.unflatten(self.out_tree, outs)


def trace_named(fn: Callable[..., Any], args: Any, kwargs: Any) -> Named:
    """Traces a function, numbers its names and finds its cuts."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    out_tree: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        args, kwargs = jax.tree.unflatten(tree, leaves)
        out, structure = jax.tree.flatten(fn(*args, **kwargs))
        out_tree[:] = [structure]
        return out

    closed = jax.make_jaxpr(flat)(*leaves)
    if any(_holds_names(equation) for equation in closed.jaxpr.eqns):
        run = functools.partial(inline, closed, _holds_names)
        closed = jax.make_jaxpr(run)(*leaves)
    closed = _number(closed)
    return Named(closed, _find_cuts(closed.jaxpr), out_tree[0])


def is_name(equation: Any) -> bool:
    """Whether an equation only names a value."""
    return equation.primitive.name == "name"


def select(known: Sequence[str], chosen: Sequence[str]) -> frozenset[str]:
    """Numbered names, of such and of names that stand for all of their numbers.

    Raises:
      ValueError: a name that nothing has.
    """
    found: set[str] = set()
    for name in chosen:
        same = {k for k in known if name in (k, k.rpartition("/")[0])}
        if not same:
            kinds = sorted({k.rpartition("/")[0] for k in known})
            raise ValueError(
                f"`recompute` names {name!r}, which no value is called: "
                f"jax.ad_checkpoint.checkpoint_name calls values "
                f"{', '.join(kinds) or 'nothing'} here."
            )
        found |= same
    return frozenset(found)


def bytes_of(variable: Any) -> int:
    """Bytes of a variable of a jaxpr."""
    aval = variable.aval
    return int(getattr(aval, "size", 0)) * int(
        getattr(getattr(aval, "dtype", None), "itemsize", 0)
    )


def inner_call(equation: Any) -> core.ClosedJaxpr | None:
    """The jaxpr of a plain call; None for any other equation."""
    if equation.primitive.name not in _CALLS:
        return None
    for value in equation.params.values():
        if isinstance(value, core.ClosedJaxpr):
            return value
        if isinstance(value, core.Jaxpr):
            return core.ClosedJaxpr(value, ())
    return None


def _holds_names(equation: Any) -> bool:
    inner = inner_call(equation)
    if inner is None:
        return False
    return any(is_name(e) or _holds_names(e) for e in inner.jaxpr.eqns)


def inline(
    closed: core.ClosedJaxpr, opens: Callable[[Any], bool], *leaves: Any
) -> list[Any]:
    """Evaluates, with plain calls replaced by what they hold.

    Args:
      closed: what is evaluated.
      opens: (equation of a plain call) -> whether it is replaced.
      *leaves: the inputs.
    """
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known |= dict(zip(jaxpr.invars, leaves, strict=True))

    def read(variable: Any) -> Any:
        is_literal = isinstance(variable, core.Literal)
        return variable.val if is_literal else known[variable]

    for equation in jaxpr.eqns:
        values = [read(v) for v in equation.invars]
        inner = inner_call(equation)
        if is_name(equation):
            found = [checkpoint_name(values[0], equation.params["name"])]
        elif inner is not None and opens(equation):
            found = inline(inner, opens, *values)
        else:
            places = [i for i, v in enumerate(equation.invars) if not _literal(v)]
            ins = list(dict.fromkeys(equation.invars[i] for i in places))
            one = _part(jaxpr, [equation], ins, list(equation.outvars))
            run = core.jaxpr_as_fun(core.ClosedJaxpr(one, ()))
            found = run(*(known[v] for v in ins))
        known |= dict(zip(equation.outvars, found, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _number(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    seen: dict[str, int] = {}
    equations = []
    for equation in closed.jaxpr.eqns:
        if is_name(equation):
            name = equation.params["name"]
            number = seen[name] = seen.get(name, -1) + 1
            equation = equation.replace(
                params={**equation.params, "name": f"{name}/{number}"}
            )
        equations.append(equation)
    return core.ClosedJaxpr(closed.jaxpr.replace(eqns=equations), closed.consts)


def _find_cuts(jaxpr: Any) -> tuple[str, ...]:
    """Names of values that nothing but trifles flows past."""
    last_use: dict[Any, int] = {}
    for place, equation in enumerate(jaxpr.eqns):
        for variable in equation.invars:
            if not _literal(variable):
                last_use[variable] = place
    cuts, live = [], {}
    for place, equation in enumerate(jaxpr.eqns):
        live |= {
            v: bytes_of(v) for v in equation.outvars if last_use.get(v, -1) > place
        }
        for variable in equation.invars:
            if not _literal(variable) and last_use[variable] <= place:
                live.pop(variable, None)
        if is_name(equation):
            size = live.get(equation.outvars[0], 0)
            if size and sum(live.values()) - size <= _PAST * size:
                cuts.append(equation.params["name"])
    return tuple(cuts)


def _split(
    equations: Sequence[Any], saved: frozenset[str], cuts: Sequence[str]
) -> list[list[Any]]:
    """Equations in segments, each but the last ending with a cut that is kept."""
    ends = saved.intersection(cuts)
    parts: list[list[Any]] = [[]]
    for equation in equations:
        parts[-1].append(equation)
        if is_name(equation) and equation.params["name"] in ends:
            parts.append([])
    return parts


def interfaces(jaxpr: Any, parts: list[list[Any]]) -> list[tuple[Any, list[Any]]]:
    """(jaxpr, its output variables) of each part; the constants are inputs."""
    made_by = {v: i for i, part in enumerate(parts) for e in part for v in e.outvars}
    outer = {*jaxpr.constvars, *jaxpr.invars}
    read: list[dict[Any, None]] = [
        {v: None for e in part for v in e.invars if not _literal(v)} for part in parts
    ]
    result = []
    for i, part in enumerate(parts):
        ins = [v for v in read[i] if v in outer or made_by[v] < i]
        later = {v for later in read[i + 1 :] for v in later}
        later |= {v for v in jaxpr.outvars if not _literal(v)}
        outs = [v for v in made_by if made_by[v] == i and v in later]
        result.append((_part(jaxpr, part, ins, outs), outs))
    return result


def _part(jaxpr: Any, equations: list[Any], ins: list[Any], outs: list[Any]) -> Any:
    """Some equations of a jaxpr as one of its own."""
    return jaxpr.replace(constvars=[], invars=ins, outvars=outs, eqns=equations)


def _literal(variable: Any) -> bool:
    return isinstance(variable, core.Literal)
