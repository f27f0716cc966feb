"""A compiled step as the checks see it: its program, its state, its loops."""

import dataclasses
import functools
import re
from collections.abc import Sequence

import jax.numpy as jnp

from sfpo_jax.auditing._leaves import (
    Leaf,
    Pair,
    pair_state,
    read_inputs,
    read_outputs,
)
from sfpo_jax.auditing._places import definition_of
from sfpo_jax.collectives import Array, Instruction, Program, parse_hlo
from sfpo_jax.memory import Inspected, Origin, origins

_PARAMS = re.compile(r"(?:^|\.|\[')params\b")
# Layers that a pipeline takes before its loop, and so is the loop shorter.
_BEFORE = 8

# What is smaller than this share of the arguments is not told.
NOTEWORTHY = 0.01


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
        return read_inputs(self.inspected, self.program)

    @functools.cached_property
    def pairs(self) -> list[Pair]:
        """What of the state goes in and comes back."""
        outputs = read_outputs(self.inspected, self.program)
        return pair_state(self.inputs, outputs)

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
