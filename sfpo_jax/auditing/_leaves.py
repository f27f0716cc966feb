"""What a step takes and returns, array by array, and which comes back as which."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from sfpo_jax.auditing._places import output_places
from sfpo_jax.collectives import Array, Program
from sfpo_jax.memory import Inspected

# Arguments of these names are the state of a step, of however few arrays.
_STATES = frozenset(("params", "opt_state", "state", "train_state", "carry"))
# Arrays of a node that stand for one: values and their scales.
_LARGEST_NODE = 3


class Leaf(NamedTuple):
    """An array that a step takes or returns."""

    name: str  # state.opt_state.mu['w']
    path: tuple[str, ...]  # keys behind that of `top`
    top: str  # the argument, or the key of a part of what is returned; "" for all
    shape: tuple[int, ...]
    dtype: Any
    bytes: int  # on one device; 0 where the program drops it
    donated: bool
    number: int  # of the program's parameter or output; -1 where it drops it
    place: str  # "file:line" of what makes an output


class Pair(NamedTuple):
    """A part of the state that goes in and comes back."""

    before: tuple[Leaf, ...]  # several where one array comes back for a node of them
    after: Leaf


def read_inputs(inspected: Inspected, program: Program) -> list[Leaf]:
    """The leaves of all positional arguments."""
    args, _ = inspected.args_info
    names = [x or f"argument {i}" for i, x in enumerate(inspected.arg_names)]
    number_of = {leaf: i for i, leaf in enumerate(inspected.used)}
    leaves = []
    for place, (path, info) in enumerate(jax.tree_util.tree_leaves_with_path(args)):
        number = number_of.get(place, -1)
        first, *keys = _keys(path)
        top = names[int(first.strip("[]"))]
        leaves.append(
            Leaf(
                name=top + "".join(keys),
                path=tuple(keys),
                top=top,
                shape=tuple(info.shape),
                dtype=info.dtype,
                bytes=_bytes(program.parameters, number, info),
                donated=info.donated,
                number=number,
                place="",
            )
        )
    return leaves


def read_outputs(inspected: Inspected, program: Program) -> list[Leaf]:
    """The leaves of what is returned."""
    found = jax.tree_util.tree_leaves_with_path(inspected.out_info)
    places = [] if inspected.jaxpr is None else output_places(inspected.jaxpr)
    if len(places) != len(found):
        places = [""] * len(found)
    # A program that returns what it was given may leave that out.
    is_whole = len(program.outputs) == len(found)
    leaves = []
    for place, (path, info) in enumerate(found):
        number = place if is_whole else -1
        keys = _keys(path)
        leaves.append(
            Leaf(
                name="output" + "".join(keys),
                path=keys[1:],
                top=keys[0] if keys else "",
                shape=tuple(info.shape),
                dtype=info.dtype,
                bytes=_bytes(program.outputs, number, info),
                donated=False,
                number=number,
                place=places[place],
            )
        )
    return leaves


def pair_state(inputs: Sequence[Leaf], outputs: Sequence[Leaf]) -> list[Pair]:
    """What of the state goes in and comes back, argument by argument.

    An argument is state where at least half its leaves come back in one part of what is
    returned, or in all of it.
    """
    parts = _by_top(outputs)
    if "" not in parts:
        whole = [x._replace(path=(x.top, *x.path)) for x in outputs]
        parts = {"": whole} | parts
    pairs: list[Pair] = []
    for leaves in _by_top(inputs).values():
        if not _is_state(leaves):
            continue
        matches = {top: _match(leaves, part) for top, part in parts.items()}
        top = max(matches, key=lambda top: _matched(matches[top]), default="")
        if matches and 2 * _matched(matches[top]) >= len(leaves):
            pairs += matches[top]
            parts = {k: v for k, v in parts.items() if k not in (top, "")}
    return pairs


def _keys(path: Sequence[Any]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,)) for key in path)


def _by_top(leaves: Sequence[Leaf]) -> dict[str, list[Leaf]]:
    parts: dict[str, list[Leaf]] = {}
    for leaf in leaves:
        parts.setdefault(leaf.top, []).append(leaf)
    return parts


def _is_state(leaves: Sequence[Leaf]) -> bool:
    """Whether an argument is one that a step hands on, not a batch."""
    name = leaves[0].name.partition("[")[0].partition(".")[0]
    return len(leaves) > 1 or leaves[0].donated or name in _STATES


def _match(leaves: Sequence[Leaf], outputs: Sequence[Leaf]) -> list[Pair]:
    """Leaves of equal path and shape; or one array for what was a node of several."""
    nodes: dict[tuple[str, ...], list[Leaf]] = {}
    for leaf in leaves:
        for end in range(len(leaf.path) + 1):
            nodes.setdefault(leaf.path[:end], []).append(leaf)
    pairs = []
    for out in outputs:
        node = nodes.get(out.path, ())
        if not node or not (len(node) == 1 or _stands_for_one(node, len(out.path))):
            continue
        if max(node, key=lambda leaf: leaf.bytes).shape == out.shape:
            pairs.append(Pair(tuple(node), out))
    return pairs


def _stands_for_one(node: Sequence[Leaf], depth: int) -> bool:
    """Whether these are an array's fields, as values and scales are, not a tree."""
    is_field = all(len(x.path) == depth + 1 and x.path[depth][0] == "." for x in node)
    return is_field and len(node) <= _LARGEST_NODE


def _matched(pairs: Sequence[Pair]) -> int:
    return sum(len(pair.before) for pair in pairs)


def _bytes(arrays: Sequence[Array], number: int, info: Any) -> int:
    """On one device, where the program tells; else of the whole array."""
    if 0 <= number < len(arrays):
        return arrays[number].bytes
    if number < 0 and arrays:
        return 0
    return math.prod(info.shape) * getattr(info.dtype, "itemsize", 0)
