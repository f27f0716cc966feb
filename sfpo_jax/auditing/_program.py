"""A compiled step as the checks see it: its leaves, and which come back as which."""

import dataclasses
import functools
import inspect
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sfpo_jax.auditing._places import definition_of, output_places
from sfpo_jax.collectives import Array, Instruction, Program, parse_hlo
from sfpo_jax.memory import Inspected, Origin, origins

# Arguments of these names are the state of a step, of however few arrays.
_PARAMS = re.compile(r"(?:^|\.|\[')params\b")
_STATES = frozenset(("params", "opt_state", "state", "train_state", "carry"))

# Layers that a pipeline takes before its loop, and so is the loop shorter.
_BEFORE = 8

# What is smaller than this share of the arguments is not told.
NOTEWORTHY = 0.01


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


@dataclasses.dataclass(frozen=True)
class Audited:
    """A compiled step, with what its checks ask of it.

    Attributes:
      inspected: the step, compiled.
      compressed_axes: mesh axes over which nothing dense is to travel.
      releases_gradients: no more than a layer's gradient is to live at once.
    """

    inspected: Inspected
    compressed_axes: tuple[str, ...]
    releases_gradients: bool

    @functools.cached_property
    def program(self) -> Program:
        """The optimised program."""
        return parse_hlo(self.inspected.text)

    @functools.cached_property
    def loops(self) -> list[tuple[str, Instruction]]:
        """Loops that are known to run more than once, and where they stand."""
        return [
            (name, line)
            for name, lines in self.program.computations.items()
            for line in lines
            if line.opcode == "while" and (line.turns or 0) > 1
        ]

    @functools.cached_property
    def origins(self) -> dict[str, Origin]:
        """Instruction -> where it comes from."""
        return origins(self.inspected.text)

    @functools.cached_property
    def inputs(self) -> list[Leaf]:
        """The leaves of all arguments."""
        args, _ = self.inspected.args_info
        names = _argument_names(self.inspected.step, len(args))
        number_of = {leaf: i for i, leaf in enumerate(self.inspected.used)}
        found = jax.tree_util.tree_leaves_with_path(args)
        leaves = []
        for place, (path, info) in enumerate(found):
            number = number_of.get(place, -1)
            keys = _keys(path)
            top = names[int(keys[0].strip("[]"))]
            leaf = Leaf(
                top + "".join(keys[1:]),
                keys[1:],
                top,
                tuple(info.shape),
                info.dtype,
                _bytes(self.program.parameters, number, info),
                info.donated,
                number,
                "",
            )
            leaves.append(leaf)
        return leaves

    @functools.cached_property
    def outputs(self) -> list[Leaf]:
        """The leaves of what it returns."""
        found = jax.tree_util.tree_leaves_with_path(self.inspected.out_info)
        jaxpr = self.inspected.jaxpr
        places = output_places(jaxpr) if jaxpr is not None else []
        if len(places) != len(found):
            places = [""] * len(found)
        # A program that returns what it was given may leave that out.
        is_whole = len(self.program.outputs) == len(found)
        leaves = []
        for place, (path, info) in enumerate(found):
            number = place if is_whole else -1
            keys = _keys(path)
            leaf = Leaf(
                "output" + "".join(keys),
                keys[1:],
                keys[0] if keys else "",
                tuple(info.shape),
                info.dtype,
                _bytes(self.program.outputs, number, info),
                False,
                number,
                places[place],
            )
            leaves.append(leaf)
        return leaves

    @functools.cached_property
    def pairs(self) -> list[Pair]:
        """What of the state goes in and comes back, argument by argument."""
        parts = _by_top(self.outputs)
        if "" not in parts:
            # All that is returned may be the state.
            whole = [x._replace(path=(x.top, *x.path)) for x in self.outputs]
            parts = {"": whole} | parts
        pairs: list[Pair] = []
        for leaves in _by_top(self.inputs).values():
            if not _is_state(leaves):
                continue
            matches = {top: _match(leaves, part) for top, part in parts.items()}
            top = max(matches, key=lambda top: _matched(matches[top]), default="")
            if matches and 2 * _matched(matches[top]) >= len(leaves):
                pairs += matches[top]
                parts = {k: v for k, v in parts.items() if k not in (top, "")}
        return pairs

    @property
    def parameters(self) -> list[Leaf]:
        """The leaves of what is trained: all state where nothing is called `params`."""
        held = self.state
        named = [leaf for leaf in held if _PARAMS.search(leaf.name)]
        return [x for x in named or held if jnp.issubdtype(x.dtype, jnp.floating)]

    @functools.cached_property
    def state(self) -> list[Leaf]:
        """What of the arguments comes back, or is called `params`; all where none is.

        Only what the program takes and tells the shape of.
        """
        told = range(len(self.program.parameters))
        used = [leaf for leaf in self.inputs if leaf.number in told]
        pairs = {leaf for pair in self.pairs for leaf in pair.before}
        return [x for x in used if x in pairs or _PARAMS.search(x.name)] or used

    def own(self, leaf: Leaf) -> Array:
        """This device's part of an argument that the program takes."""
        return self.program.parameters[leaf.number]

    def is_stack(self, leaf: Leaf, loops: Sequence[int]) -> bool:
        """Whether an argument holds a layer for each turn of a loop.

        Args:
          leaf: of the state.
          loops: turns of the loops.
        """
        own, whole = self.own(leaf).dims, leaf.shape
        depths = {dims[0] for dims in (own, whole) if len(dims) > 1}
        return any(0 <= depth - turns <= _BEFORE for depth in depths for turns in loops)

    @property
    def argument_bytes(self) -> int:
        """What the arguments take on one device."""
        return sum(leaf.bytes for leaf in self.inputs)

    @property
    def definition(self) -> str:
        """ "file:line" of the step."""
        jaxpr = self.inspected.jaxpr
        return definition_of(jaxpr) if jaxpr is not None else ""


def name_some(names: Sequence[str]) -> str:
    """One name, and how many more there are.

    Example:
      >>> name_some(["mu['a']", "mu['b']", "nu"])
      "mu['a'] and 2 more"
    """
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{names[0]}{more}"


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
    return [
        Pair(tuple(nodes[out.path]), out)
        for out in outputs
        if any(before.shape == out.shape for before in nodes.get(out.path, ()))
    ]


def _matched(pairs: Sequence[Pair]) -> int:
    return sum(len(pair.before) for pair in pairs)


def _argument_names(step: Any, number: int) -> list[str]:
    try:
        names = list(inspect.signature(step).parameters)[:number]
    except (TypeError, ValueError):
        names = []
    return names + [f"argument {i}" for i in range(len(names), number)]


def _bytes(arrays: Sequence[Array], number: int, info: Any) -> int:
    """On one device, where the program tells; else of the whole array."""
    if 0 <= number < len(arrays):
        return arrays[number].bytes
    if number < 0 and arrays:
        return 0
    return math.prod(info.shape) * getattr(info.dtype, "itemsize", 0)
