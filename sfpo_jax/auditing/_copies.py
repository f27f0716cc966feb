"""Whole stacks of layers that a loop over the layers copies."""

import re
from collections.abc import Iterable, Iterator

from sfpo_jax.auditing._program import NOTEWORTHY, Audited
from sfpo_jax.auditing._report import Finding
from sfpo_jax.collectives import Array, Instruction, Program
from sfpo_jax.units import format_bytes

_OPERANDS = re.compile(r"%?([\w.\-]+)(?=[,)])")
_COPIES = ("copy", "copy-start")
# What a fusion that only copies is made of.
_MOVES = frozenset(("parameter", "copy", "bitcast", "tuple"))


def find_copies(audited: Audited) -> list[Finding]:
    """One finding for each loop that copies whole stacks, inside it or around it.

    Asked of a GPU's compiler only: the CPU's copies what its loops carry, in any case.
    """
    if audited.inspected.platform == "cpu":
        return []
    program = audited.program
    least = NOTEWORTHY * audited.argument_bytes
    large = [leaf for leaf in audited.state if leaf.bytes >= least]
    findings = []
    for name, loop in audited.loops:
        turns = loop.turns or 0
        stacks = {
            audited.own(leaf)[:2] for leaf in large if audited.is_stack(leaf, [turns])
        }
        inside = [x for body in loop.called for x in _reached(program, body)]
        within = _copied(program, inside, stacks)
        around = _copied(program, _beside(program, name, loop), stacks)
        for copied, how in ((within, f"in each of {turns} turns"), (around, "once")):
            if copied:
                findings.append(_finding(audited, loop, copied, how))
    return findings


def copies_note(audited: Audited) -> str:
    """What was not looked at; "" where all was."""
    if audited.inspected.platform != "cpu" or not audited.loops:
        return ""
    return (
        "copies were not looked for, as a CPU's compiler copies what loops carry in "
        "any case: compile for a GPU, by `device` and the extra `plan`"
    )


def _finding(
    audited: Audited, loop: Instruction, copied: list[Array], how: str
) -> Finding:
    origin = audited.origins.get(loop.name)
    shapes = sorted({f"{x.dtype}[{','.join(map(str, x.dims))}]" for x in copied})
    size = sum(x.bytes for x in copied)
    where = "within" if how.startswith("in") else "before or behind"
    return Finding(
        "copy",
        size,
        f"{origin.file}:{origin.line}" if origin and origin.file else "",
        f"{' and '.join(shapes)}: {format_bytes(size, digits=3)} of whole stacks "
        f"copied {how}, {where} the loop over their layers",
        "donate the stack, carry it and write it with `.at[i].set` behind the last "
        "read of the turn; no lax.cond may return it",
    )


def _copied(
    program: Program,
    lines: Iterable[Instruction],
    stacks: set[tuple[str, tuple[int, ...]]],
) -> list[Array]:
    """Stacks that some of these instructions copy."""
    return [
        line.arrays[0]
        for line in lines
        if _is_copy(program, line)
        and line.arrays
        and (line.arrays[0].dtype, line.arrays[0].dims) in stacks
    ]


def _is_copy(program: Program, line: Instruction) -> bool:
    if line.opcode == "fusion":
        inner = {x.opcode for n in line.called for x in program.computations.get(n, ())}
        return "copy" in inner and inner <= _MOVES
    return line.opcode in _COPIES


def _reached(program: Program, name: str) -> Iterator[Instruction]:
    """The instructions of a computation and of those it runs, fusions apart."""
    for line in program.computations.get(name, ()):
        yield line
        if line.opcode != "fusion":
            for called in line.called:
                yield from _reached(program, called)


def _beside(program: Program, name: str, loop: Instruction) -> Iterator[Instruction]:
    """What makes the values a loop starts with, and what reads those it ends with."""
    lines = {line.name: line for line in program.computations[name]}
    carried = {
        value
        for source in _operands(loop)
        for value in (_operands(lines[source]) if source in lines else ())
    }
    ends = {
        line.name
        for line in lines.values()
        if line.opcode == "get-tuple-element" and loop.name in _operands(line)
    }
    for line in lines.values():
        if line.name in carried or ends & set(_operands(line)):
            yield line


def _operands(line: Instruction) -> list[str]:
    behind = line.rest.partition(f" {line.opcode}(")[2]
    return _OPERANDS.findall(behind.partition(")")[0] + ")")
