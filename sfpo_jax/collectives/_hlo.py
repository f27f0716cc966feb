"""A compiled program's text taken apart into computations and instructions."""

import re
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    rest: str  # behind "=": shape, opcode, operands, attributes


class Program(NamedTuple):
    """A parsed program.

    Attributes:
      computations: instructions, in the order of the schedule, by computation.
      entry: the name of the computation that runs first.
    """

    computations: dict[str, list[Instruction]]
    entry: str


def parse_hlo(hlo: str) -> Program:
    """The computations of `compiled.as_text()`.

    Raises:
      ValueError: the text has no ENTRY computation.
    """
    computations: dict[str, list[Instruction]] = {}
    lines: list[Instruction] = []
    entry = None
    for line in hlo.splitlines():
        if found := _COMPUTATION.match(line):
            lines = computations.setdefault(found[1], [])
            if line.startswith("ENTRY"):
                entry = found[1]
        elif found := _INSTRUCTION.match(line):
            lines.append(Instruction(found[1], found[2]))
    if entry is None:
        raise ValueError("`hlo` has no ENTRY computation: pass compiled.as_text().")
    return Program(computations, entry)
