"""Floating-point operations, counted in a jaxpr with its loops run as often as they do.

`compiled.cost_analysis()` counts the body of a loop once and says nothing at all for a
GPU that is not there. Counted are matrix products and convolutions, two operations for
each multiply-add, padding included; elementwise work, reductions and factorisations are
not, being bound by memory rather than arithmetic.
"""

import math
import re
from typing import Any, NamedTuple

import jax
from jax.extend import core

from sfpo_jax.transforms import PHASE_SCOPES

# Of loops of one turn or none that stand for branches.
_PHASES = tuple(PHASE_SCOPES.values())


class Flops(NamedTuple):
    """What all devices together do in one run."""

    total: int
    unknown_loops: int  # loops of unknown length, counted as running once


def count_flops(jaxpr: Any) -> Flops:
    """Operations of one run of a program, over all devices.

    Args:
      jaxpr: a (closed) jaxpr. A `scan` counts its length, a `while` its trip count
        where counter, bound and step are literals, a `cond` its costliest branch, the
        body of a `shard_map` once for every device it runs on. Of the loops for the
        phases of an optimizer, one of which runs, the costliest phase counts.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.zeros((8, 16))
      >>> count_flops(jax.make_jaxpr(lambda x: x @ x.T)(x)).total == 2 * 8 * 16 * 8
      True
    """
    parts: list[Flops] = []
    phases: dict[str, list[Flops]] = {}
    for equation in _open(jaxpr).eqns:
        phase = _phase_of(equation)
        into = parts if phase is None else phases.setdefault(phase, [])
        into.append(equation_flops(equation))
    return _sum([*parts, max(map(_sum, phases.values()), default=Flops(0, 0))])


def equation_flops(equation: Any) -> Flops:
    """Operations of one equation of a jaxpr, counted as `count_flops` does."""
    name, times, unknown = equation.primitive.name, 1, 0
    if name in _EXACT:
        return Flops(_EXACT[name](equation), 0)
    parts = [count_flops(inner) for inner in _inner(equation)]
    if name == "scan":
        times = equation.params["length"]
    elif name == "shard_map":
        times = _manual_devices(equation)
    elif name == "while":
        trips = _trip_count(equation)
        if trips is None and _phase_of(equation):
            trips = 1
        # Its condition and body are the parts; a condition has no products.
        unknown = int(trips is None and any(part.total for part in parts))
        times = 1 if trips is None else trips
    elif name == "cond":
        parts = [max(parts)]
    elif name == "pallas_call":
        times = math.prod(equation.params["grid_mapping"].grid)
    inside = _sum(parts)
    return Flops(times * inside.total, unknown + inside.unknown_loops)


def _sum(parts: list[Flops]) -> Flops:
    return Flops(sum(p.total for p in parts), sum(p.unknown_loops for p in parts))


def _phase_of(equation: Any) -> str | None:
    """The phase whose scope name the body of a loop carries, as `transfers` has it."""
    if equation.primitive.name != "while":
        return None
    for inner in _open(equation.params["body_jaxpr"]).eqns:
        # Under `vmap` a name is in parentheses.
        names = re.split(r"[/()]", str(inner.source_info.name_stack))
        for phase in _PHASES:
            if phase in names:
                return phase
    return None


def _open(jaxpr: Any) -> Any:
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _inner(equation: Any) -> list[Any]:
    """The jaxprs among the parameters; a custom rule's derivatives are functions."""
    leaves = jax.tree.leaves(
        equation.params, is_leaf=lambda x: isinstance(x, (core.Jaxpr, core.ClosedJaxpr))
    )
    return [leaf for leaf in leaves if isinstance(leaf, (core.Jaxpr, core.ClosedJaxpr))]


def _dot_general(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, out = equation.invars[0].aval, equation.outvars[0].aval
    return 2 * out.size * math.prod(left.shape[axis] for axis in contracted)


def _ragged_dot(equation: Any) -> int:
    # Every row meets the matrix of its own group only.
    numbers = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    (contracted, _), _ = numbers
    left, out = equation.invars[0].aval, equation.outvars[0].aval
    return 2 * out.size * math.prod(left.shape[axis] for axis in contracted)


def _convolution(equation: Any) -> int:
    kernel, out = equation.invars[1].aval, equation.outvars[0].aval
    spec = equation.params["dimension_numbers"].rhs_spec
    window = [kernel.shape[axis] for axis in spec[2:]]
    # The kernel's own input width is that of one group already.
    positions = 2 * out.size * math.prod(window) * kernel.shape[spec[1]]
    # Zeros put between the inputs, as in the derivative of a stride, cost nothing.
    dilation = math.prod(equation.params["lhs_dilation"])
    return positions // dilation


_EXACT = {
    "dot_general": _dot_general,
    "ragged_dot_general": _ragged_dot,
    "conv_general_dilated": _convolution,
}


def _manual_devices(equation: Any) -> int:
    mesh, params = equation.params["mesh"], equation.params
    # Renamed between versions of JAX; the axes of an outer shard_map are not among
    # them.
    names = [name for name in ("newly_manual_axes", "manual_axes") if name in params]
    manual = params[names[0]] if names else mesh.axis_names
    return math.prod(mesh.shape[axis] for axis in manual)


def _trip_count(equation: Any) -> int | None:
    """How often a `while` runs that counts from a literal to a literal by ones."""
    params = equation.params
    consts, carry = params["cond_nconsts"], equation.invars
    first = consts + params["body_nconsts"]
    condition, body = _open(params["cond_jaxpr"]), _open(params["body_jaxpr"])
    if len(condition.eqns) != 1 or condition.eqns[0].primitive.name != "lt":
        return None
    low, high = condition.eqns[0].invars

    def outer(variable: Any) -> Any:
        """The value of the condition's variable before the loop, if it is known."""
        if isinstance(variable, core.Literal):
            return variable.val
        at = condition.invars.index(variable)
        source = carry[at] if at < consts else carry[first + at - consts]
        is_carried = at >= consts and variable is not low
        if is_carried and not _is_kept(body, params["body_nconsts"], at - consts):
            return None
        return source.val if isinstance(source, core.Literal) else None

    if isinstance(low, core.Literal) or condition.invars.index(low) < consts:
        return None
    place = condition.invars.index(low) - consts
    counter, after = body.invars[params["body_nconsts"] + place], body.outvars[place]
    steps = [
        eqn for eqn in body.eqns if eqn.primitive.name == "add" and after in eqn.outvars
    ]
    if not steps or steps[0].invars[0] is not counter:
        return None
    step = steps[0].invars[1]
    start, stop = outer(low), outer(high)
    if not isinstance(step, core.Literal) or step.val != 1:
        return None
    return None if start is None or stop is None else max(0, int(stop) - int(start))


def _is_kept(body: Any, consts: int, place: int) -> bool:
    return body.outvars[place] is body.invars[consts + place]
