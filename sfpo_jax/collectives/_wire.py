"""Bytes on the wire, counted in a compiled program.

What a program sends is read from its optimised HLO, not computed from what it was meant
to send. One device sends (N - 1) / N of the full tensor for an all-to-all, all-gather
or reduce-scatter over N ranks, twice that for an all-reduce, and all of it for a
permute. A collective in a loop counts as often as the loop is known to run. Branches of
a conditional, and loops that stand for branches as they take one turn or none, are told
apart by the scope names in their operations.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sfpo_jax.collectives._hlo import Array, Instruction, Program, parse_hlo

_SCOPE = re.compile(r'op_name="([^"]*)"')
_EXPLICIT_GROUP = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA_GROUPS = re.compile(
    r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
)
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^]]*)\](?: \{([^}]*)\})?")
_ALL = re.compile(r"replica_groups=\{\}")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")
# What the start of a permute lists last on some devices, beside what it sends.
_CONTEXT = re.compile(r"(?:, (?:/\*index=\d+\*/)?u32\[\](?:\{[^}]*\})?){2}\)\s*$")

_ALL_REDUCE = ("all-reduce", "all-reduce-start")
_GATHERS = ("all-gather", "all-gather-start", "reduce-scatter", "reduce-scatter-start")
_EXCHANGES = ("all-to-all", "all-to-all-start", "ragged-all-to-all")
_PERMUTES = ("collective-permute", "collective-permute-start")
_COLLECTIVES = frozenset((*_ALL_REDUCE, *_GATHERS, *_EXCHANGES, *_PERMUTES))


class Transfer(NamedTuple):
    """One collective of a program.

    Attributes:
      opcode: its name in HLO.
      axis: the mesh axis it runs over, several joined by a comma.
      dtypes: element types of what is sent.
      sent: bytes one device sends, each time it runs.
      times: how often it runs in the program.
      scope: the path of names it was traced under.
      arrays: what it returns; the start of an asynchronous one lists more.
      name: the instruction's.
    """

    opcode: str
    axis: str
    dtypes: tuple[str, ...]
    sent: float
    times: int
    scope: str
    arrays: tuple[Array, ...] = ()
    name: str = ""


def transfers(
    hlo: str, mesh_shape: Mapping[str, int], phase: str | None, phases: Sequence[str]
) -> list[Transfer]:
    """The collectives that one run of a compiled program executes.

    Args:
      hlo: the optimised program, `compiled.as_text()`.
      mesh_shape: axis names and sizes of the mesh it was compiled for.
      phase: the scope name whose branches run where a conditional has branches of
        `phases`, or loops are of them; of other conditionals the branch that sends
        most is taken. None takes that everywhere.
      phases: all scope names that mark branches.
    """
    program = parse_hlo(hlo)
    return _walk(program, program.entry, 1, mesh_shape, phase, phases)


def wire_bytes(moved: Sequence[Transfer]) -> dict[str, int]:
    """Bytes one device sends per mesh axis, over all transfers."""
    total: Counter[str] = Counter()
    for transfer in moved:
        total[transfer.axis] += round(transfer.sent * transfer.times)
    return dict(total)


def _walk(
    program: Program,
    name: str,
    times: int,
    mesh_shape: Mapping[str, int],
    phase: str | None,
    phases: Sequence[str],
) -> list[Transfer]:
    moved: list[Transfer] = []
    phases_moved: dict[str, list[Transfer]] = {}

    def descend(name: str, count: int) -> list[Transfer]:
        return _walk(program, name, count, mesh_shape, phase, phases)

    for instruction in program.computations[name]:
        opcode, called = instruction.opcode, instruction.called
        if opcode in _COLLECTIVES:
            moved += read_transfers(instruction, times, mesh_shape)
        elif opcode == "conditional":
            branches = [descend(name, times) for name in called]
            tags = [_phase_of(program, name, phases) for name in called]
            if phase is not None and any(tags):
                branches = [
                    b for b, tag in zip(branches, tags, strict=True) if tag == phase
                ]
            moved += max(branches, key=_sent, default=[])
        elif opcode == "while":
            count = times * (instruction.turns or 1)
            for name in called:
                tag = _phase_of(program, name, phases)
                into = phases_moved.setdefault(tag, []) if tag else moved
                into += descend(name, count)
        elif opcode in ("call", "fusion", "async-start"):
            for name in called:
                moved += descend(name, times)
    if phase is None:
        return moved + max(phases_moved.values(), key=_sent, default=[])
    return moved + phases_moved.get(phase, [])


def _sent(moved: Sequence[Transfer]) -> float:
    return sum(t.sent * t.times for t in moved)


def _phase_of(program: Program, name: str, phases: Sequence[str]) -> str | None:
    """The phase whose scope name an operation of this computation carries."""
    for _, line in program.computations[name]:
        scope = _SCOPE.search(line)
        parts = scope[1].split("/") if scope else []
        for phase in phases:
            if phase in parts:
                return phase
    return None


def read_transfers(
    instruction: Instruction, times: int, mesh_shape: Mapping[str, int]
) -> list[Transfer]:
    """What one instruction sends; nothing where it is no collective.

    Args:
      instruction: any of a program.
      times: how often it runs.
      mesh_shape: axis names and sizes.
    """
    opcode = instruction.opcode
    if opcode not in _COLLECTIVES:
        return []
    axis, ranks = _axis_of(instruction.rest, mesh_shape)
    if ranks == 1:
        return []
    arrays = sized = instruction.arrays
    if opcode in _PERMUTES and _CONTEXT.search(instruction.shape):
        sized = arrays[:-2]
    total = sum(array.bytes for array in sized)
    is_start = opcode.endswith("-start")
    share = (ranks - 1) / ranks
    if opcode in _ALL_REDUCE:
        sent = 2 * share * total
    elif opcode in _EXCHANGES:
        # The start of an asynchronous one lists operands and results.
        sent = share * (total / 2 if is_start else total)
    elif opcode in _PERMUTES:
        # Of a tuple where several are joined; the start lists operands and results.
        sent = total / 2 if is_start else float(total)
    else:
        full = total if opcode == "all-gather" else total * ranks
        if is_start:
            full = total * ranks / (ranks + 1)
        sent = share * full
    found = _SCOPE.search(instruction.rest)
    scope = found[1] if found else ""
    dtypes = tuple(sorted({array.dtype for array in sized}))
    return [
        Transfer(
            opcode, axis, dtypes, sent, times, scope, arrays, name=instruction.name
        )
    ]


def _axis_of(rest: str, mesh_shape: Mapping[str, int]) -> tuple[str, int]:
    """The axes along which the first group of a collective spreads, and its size."""
    sizes = tuple(mesh_shape.values())
    if found := _EXPLICIT_GROUP.search(rest):
        group = _numbers(found[1])
    elif found := _IOTA_GROUPS.search(rest):
        ids = np.arange(math.prod(sizes)).reshape(_numbers(found[2]))
        if found[3]:
            ids = ids.transpose(_numbers(found[3]))
        group = list(ids.reshape(_numbers(found[1]))[0])
    elif found := _MESH_GROUPS.search(rest):
        group = _mesh_group(found[1], found[2])
    elif found := _PAIRS.search(rest):
        group = [int(found[1]), int(found[2])]
    elif "replica_groups" not in rest or _ALL.search(rest):
        group = list(range(math.prod(sizes)))
    else:
        raise ValueError(f"`hlo` has replica_groups of an unknown form: {rest}")
    places = np.stack(np.unravel_index(group, sizes), axis=1)
    spread = (places != places[:1]).any(axis=0)
    names = [name for name, is_in in zip(mesh_shape, spread, strict=True) if is_in]
    return ",".join(names), len(group)


def _mesh_group(mesh: str, axes: str | None) -> list[int]:
    """Device 0's group of "'a'=2,'b'=4", "'a','b':(2)2" (an axis from 2, 2 long)."""
    shape = dict(re.findall(r"'([^']+)'=(\d+)", mesh))
    strides, stride = {}, 1
    for name, size in reversed(shape.items()):
        strides[name] = stride
        stride *= int(size)
    group = np.zeros(1, int)
    for name, before, part in re.findall(
        r"'([^']+)'(?::\((\d+)\)(\d+))?", axes or mesh
    ):
        size = int(part or shape[name])
        step = strides[name] * int(shape[name]) // (int(before or 1) * size)
        group = (group[:, None] + step * np.arange(size)).reshape(-1)
    return group.tolist()


def _numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]
