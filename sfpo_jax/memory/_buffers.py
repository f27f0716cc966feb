"""What XLA decided about a program's memory, read from the text it leaves behind.

The compiler assigns every value an offset in an allocation; temporaries of one program
share one allocation, whose size is what they need at the fullest moment. The text says
from which instruction to which a value lives; which moment is the fullest is counted
from that. The moment that the text itself calls its peak is another one where loops
are: it was found to miss values that wait, in the place of a loop's parameter, until
the loop is done.
"""

import bisect
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from sfpo_jax.memory._origins import NOWHERE, Origin, origins
from sfpo_jax.memory._timeline import Timeline, Value, make_timeline

_ALLOCATION = re.compile(r"allocation \d+: size (\d+), (?:page \d+, )?(.*)")
_PARAMETER = re.compile(r"parameter (\d+), ")
_VALUE = re.compile(
    r" value: <\d+ (.+?)( \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.+)"
)
_RANGE = re.compile(r"    (\S+):(\d+)-(\d+)")
_POSITION = re.compile(r"    (\d+):(\S+)")
_IDLE = re.compile(
    r"(?:.*\.)?(?:get-tuple-element|tuple|param|constant|copy|bitcast)\b"
)


class Buffer(NamedTuple):
    """A temporary that lives at the program's fullest moment."""

    size: int  # bytes
    shape: str  # as in HLO: f32[8,512]{1,0}
    offset: int  # in the allocation of temporaries
    origin: Origin

    @property
    def is_activation(self) -> bool:
        """Kept by the forward pass for the backward one, by the name of its maker."""
        return self.origin.is_forward


class Assignment(NamedTuple):
    """The memory of a compiled program."""

    parameters: dict[int, int]  # bytes by number; absent where not told
    buffers: tuple[Buffer, ...]  # temporaries at the fullest moment, largest first
    constant_bytes: int  # arrays that are part of the program
    timeline: Timeline | None  # None where it is not told when values live


class _Place(NamedTuple):
    """A value's place, before it is known when it lives."""

    name: str  # of the instruction, with its index in braces
    size: int
    offset: int
    shape: str
    is_joined: bool  # what a loop hands on, made by others


def read_dump(folder: Path) -> Assignment | None:
    """Reads what a compilation with `xla_dump_to` left in `folder`.

    Returns:
      None where the files are not there, or not in the form known here.
    """
    programs = folder.glob("*after_optimizations.txt")
    # The largest is the program itself, not a helper compiled beside it.
    program = max(programs, key=lambda path: path.stat().st_size, default=None)
    if program is None:
        return None
    name = program.name.removesuffix(".txt")
    assignment = folder / f"{name}-buffer-assignment.txt"
    live = folder / f"{name}-live-range.txt"
    if not assignment.exists():
        return None
    live_ranges = _read(live) if live.exists() else ""
    return parse_assignment(_read(assignment), live_ranges, _read(program))


def parse_assignment(assignment: str, live_ranges: str, program: str) -> Assignment:
    """Joins the three texts.

    Args:
      assignment: `...-buffer-assignment.txt`.
      live_ranges: `...-live-range.txt`; without its ranges no temporaries are told.
      program: `...after_optimizations.txt`, the optimised HLO.
    """
    parameters: dict[int, int] = {}
    places: list[_Place] = []
    constants = 0
    base, end = None, 0  # where this allocation of temporaries begins and ends
    for line in assignment.splitlines():
        if found := _ALLOCATION.match(line):
            size, kind = int(found[1]), found[2]
            base = end if kind.startswith("preallocated-temp") else None
            end += size if base is not None else 0
            constants += size * kind.startswith("constant")
            if number := _PARAMETER.match(kind):
                parameters[int(number[1])] = size
        elif base is not None and (found := _VALUE.match(line)):
            name, joined, size, offset, shape = found.groups()
            # The live ranges write an empty index where the assignment may not.
            name = name if name.endswith("}") else name + "{}"
            start = base + int(offset)
            places.append(_Place(name, int(size), start, shape, joined is not None))
    made_by = origins(program)
    schedule = _schedule(live_ranges)
    values = _values(places, _ranges(live_ranges), made_by)
    if not schedule or not values:
        return Assignment(parameters, (), constants, None)
    timeline = make_timeline(values, [_work(name, made_by) for name in schedule])
    buffers = _at_peak(values, timeline.peak)
    return Assignment(parameters, buffers, constants, timeline)


def _schedule(live_ranges: str) -> list[str]:
    """The instructions, in the order in which they run."""
    text = live_ranges.partition("BufferLiveRange:")[0]
    return [name for _, name in _POSITION.findall(text)]


def _work(name: str, made_by: Mapping[str, Origin]) -> Origin:
    """Where an instruction comes from; nowhere for those that compute nothing."""
    return NOWHERE if _IDLE.match(name) else made_by.get(name, NOWHERE)


def _ranges(live_ranges: str) -> dict[str, tuple[int, int]]:
    """Value -> the first and the last instruction it lives at."""
    text = live_ranges.partition("BufferLiveRange:")[2].partition("Live ranges at")[0]
    return {name: (int(born), int(dies)) for name, born, dies in _RANGE.findall(text)}


def _values(
    places: Sequence[_Place],
    ranges: Mapping[str, tuple[int, int]],
    made_by: Mapping[str, Origin],
) -> list[Value]:
    """The temporaries with their lives and their makers."""
    found = [
        Value(
            size=place.size,
            shape=place.shape,
            offset=place.offset,
            born=ranges[place.name][0],
            dies=ranges[place.name][1],
            origin=made_by.get(place.name.partition("{")[0], NOWHERE),
            is_joined=place.is_joined,
        )
        for place in places
        if place.name in ranges and place.size > 0
    ]
    written: dict[tuple[int, int, str], list[Value]] = {}
    for value in sorted(found, key=lambda value: value.born):
        if not value.is_joined:
            key = value.offset, value.size, value.shape
            written.setdefault(key, []).append(value)
    return [
        value._replace(origin=_maker(value, written))
        if value.is_joined or not value.origin.op_name
        else value
        for value in found
    ]


def _maker(
    value: Value, written: Mapping[tuple[int, int, str], Sequence[Value]]
) -> Origin:
    """What put a value where it lies, which a loop's own name does not tell.

    That is what was last written into the place or, where only a copy without a name
    was, what is written there next.
    """
    makers = written.get((value.offset, value.size, value.shape), ())
    last = bisect.bisect_right(makers, value.born, key=lambda maker: maker.born) - 1
    later = (maker.origin for maker in makers[max(0, last) :])
    return next((origin for origin in later if origin.op_name), value.origin)


def _at_peak(values: Iterable[Value], peak: int) -> tuple[Buffer, ...]:
    """The live values, one for each place; several names may share one."""
    chosen: dict[tuple[int, int], Buffer] = {}
    for value in values:
        # A tuple is a table of addresses; what it points to is told by itself.
        if value.is_table or not value.born <= peak <= value.dies:
            continue
        buffer = Buffer(value.size, value.shape, value.offset, value.origin)
        held = chosen.setdefault((value.offset, value.size), buffer)
        if buffer.is_activation and not held.is_activation:
            chosen[value.offset, value.size] = buffer
    return tuple(sorted(chosen.values(), key=lambda b: (-b.size, b.offset)))


def covered(buffers: Iterable[Buffer]) -> int:
    """Bytes of the places the buffers take, those of two counted once."""
    total, end = 0, 0
    for start, stop in sorted((b.offset, b.offset + b.size) for b in buffers):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _read(path: Path) -> str:
    return path.read_text(errors="replace")
