"""A compiled program's text taken apart into computations and instructions."""

import math
import re
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_OPCODE = re.compile(r"(?:^|[\s})])([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"\b([a-z][a-z0-9]*)\[([\d,]*)\](?:\{([^}]*)\})?")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|(?:true|false)_computation)=%?([\w.\-]+)"
    r"|branch_computations=\{([^}]*)\}"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_INTERFACE = re.compile(
    r"entry_computation_layout=\{\((.*?)\)->(.*?)\}(?:, [a-z_]+=|$)"
)
_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{[\d, ]*\}, (?:may|must)-alias\)")
_HOST = "S(5)"  # the memory space of the host


class Array(NamedTuple):
    """The shape of one array, on one device."""

    dtype: str  # as HLO writes it: f32, bf16, s8
    dims: tuple[int, ...]
    is_host: bool  # kept in the host's memory

    @property
    def bytes(self) -> int:
        """What it takes."""
        return array_bytes(self.dtype, self.dims)


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    rest: str  # behind "=": shape, opcode, operands, attributes

    @property
    def opcode(self) -> str:
        """Its name in HLO; "" where the line has none."""
        found = _OPCODE.search(self.rest)
        return found[1] if found else ""

    @property
    def shape(self) -> str:
        """Of what it returns, as HLO writes it."""
        found = _OPCODE.search(self.rest)
        return self.rest[: found.start(1)].rstrip() if found else self.rest

    @property
    def arrays(self) -> tuple[Array, ...]:
        """What it returns, a tuple's elements one after the other."""
        return read_arrays(self.shape)

    @property
    def called(self) -> tuple[str, ...]:
        """The computations it runs."""
        return tuple(
            name
            for one, several in _CALLED.findall(self.rest)
            for name in filter(None, (one, *several.replace("%", "").split(", ")))
        )

    @property
    def turns(self) -> int | None:
        """Of a loop, where the compiler knows them."""
        found = _TRIPS.search(self.rest)
        return int(found[1]) if found else None


class Program(NamedTuple):
    """A parsed program.

    Attributes:
      computations: instructions, in the order of the schedule, by computation.
      entry: the name of the computation that runs first.
      parameters: the arrays it takes, in order; () where the text does not tell.
      outputs: the arrays it returns.
      aliases: output -> the parameter in whose place it is written.
    """

    computations: dict[str, list[Instruction]]
    entry: str
    parameters: tuple[Array, ...]
    outputs: tuple[Array, ...]
    aliases: dict[int, int]


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
    header = hlo.partition("\n")[0]
    interface = _INTERFACE.search(header)
    takes, returns = interface.groups() if interface else ("", "")
    # A program that returns one array, not a tuple, has no number for it.
    aliases = {int(out or 0): int(number) for out, number in _ALIAS.findall(header)}
    return Program(
        computations, entry, read_arrays(takes), read_arrays(returns), aliases
    )


def read_arrays(shape: str) -> tuple[Array, ...]:
    """The arrays of a shape as HLO writes it.

    Example:
      >>> [array.bytes for array in read_arrays("(f32[2,3]{1,0}, pred[])")]
      [24, 1]
    """
    return tuple(
        Array(dtype, tuple(int(d) for d in dims.split(",") if d), _HOST in layout)
        for dtype, dims, layout in _ARRAY.findall(shape)
    )


def array_bytes(dtype: str, dims: tuple[int, ...]) -> int:
    """Bytes of an array of a dtype as HLO writes it."""
    digits = re.search(r"\d+", dtype)  # f8e4m3fn: the first are the width
    bits = int(digits[0]) if digits else 8 * (dtype == "pred")
    return -(-math.prod(dims) * bits // 8)
