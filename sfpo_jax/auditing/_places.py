"""Which line of whose code an equation of a jaxpr comes from."""

import re
from collections.abc import Iterator
from typing import Any

_INSTALLED = "site-packages"
_DEFINED = re.compile(r" at (.+:\d+)$")


def place_of(equation: Any) -> str:
    """ "file:line" of the innermost frame that is not an installed package's."""
    traceback = getattr(equation.source_info, "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        if _INSTALLED not in frame.file_name and frame.line_num > 0:
            return f"{frame.file_name}:{frame.line_num}"
    return ""


def definition_of(jaxpr: Any) -> str:
    """ "file:line" of the function that was traced."""
    info = getattr(open_jaxpr(jaxpr), "debug_info", None)
    found = _DEFINED.search(getattr(info, "func_src_info", None) or "")
    return found[1] if found else ""


def output_places(jaxpr: Any) -> list[str]:
    """ "file:line" of what makes each output; "" for one that nothing makes."""
    jaxpr = open_jaxpr(jaxpr)
    made_by = {v: e for e in jaxpr.eqns for v in e.outvars}
    known: dict[int, list[str]] = {}
    found = []
    for variable in jaxpr.outvars:
        # Literals cannot be hashed, and nothing makes them.
        equation = None if hasattr(variable, "val") else made_by.get(variable)
        if equation is None:
            found.append("")
            continue
        if id(equation) not in known:
            known[id(equation)] = _equation_places(equation)
        found.append(known[id(equation)][equation.outvars.index(variable)])
    return found


def equations(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """All equations, those inside loops and calls too, and how often each runs."""
    for equation in open_jaxpr(jaxpr).eqns:
        yield equation, times
        turns = times * equation.params.get("length", 1)
        for inner in inner_jaxprs(equation):
            yield from equations(inner, turns)


def inner_jaxprs(equation: Any) -> list[Any]:
    """The jaxprs that an equation runs."""
    values = [
        part
        for value in equation.params.values()
        for part in (value if isinstance(value, tuple | list) else (value,))
    ]
    return [value for value in values if hasattr(open_jaxpr(value), "eqns")]


def open_jaxpr(jaxpr: Any) -> Any:
    """The jaxpr without its constants."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def _equation_places(equation: Any) -> list[str]:
    """Of each output; a call's or a loop's come from inside."""
    number, own = len(equation.outvars), place_of(equation)
    for inner in inner_jaxprs(equation):
        # Bodies of loops, branches and calls return what the equation does, in order.
        if len(open_jaxpr(inner).outvars) == number:
            return [place or own for place in output_places(inner)]
    return [own] * number
