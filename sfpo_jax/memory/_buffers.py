"""What XLA decided about a program's memory, read from the text it leaves behind.

The compiler assigns every value an offset in an allocation; temporaries of one program
share one allocation, whose size is what they need at the fullest moment. The text names
the values that live at that moment, and the program's text says which operation, and
which line of whose code, made each.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

_ALLOCATION = re.compile(r"allocation \d+: size (\d+), (?:page \d+, )?(.*)")
_PARAMETER = re.compile(r"parameter (\d+), ")
_VALUE = re.compile(
    r" value: <\d+ (.+?)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.+)"
)
_LIVE = re.compile(r"    (\S+): \d+ bytes")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = .*?metadata=\{(.*)")
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_INSTALLED = "site-packages"
_TABLE_ROW = re.compile(r'(\d+) (?:"(.*)"|\{(.*)\})')


class Origin(NamedTuple):
    """Where an operation comes from; empty where the compiler forgot."""

    op_name: str  # the path of names it was traced under
    file: str
    line: int


class Buffer(NamedTuple):
    """A temporary that lives at the program's fullest moment."""

    size: int  # bytes
    shape: str  # as in HLO: f32[8,512]{1,0}
    offset: int  # in the allocation of temporaries
    origin: Origin

    @property
    def is_activation(self) -> bool:
        """Kept by the forward pass for the backward one, by the name of its maker."""
        name = self.origin.op_name
        return "jvp(" in name and "transpose(" not in name


class Assignment(NamedTuple):
    """The memory of a compiled program."""

    parameters: dict[int, int]  # bytes by number; absent where not told
    buffers: tuple[Buffer, ...]  # temporaries at the fullest moment, largest first
    constant_bytes: int  # arrays that are part of the program


class _Value(NamedTuple):
    name: str  # of the instruction, with its index in braces where it has several
    size: int
    offset: int
    shape: str


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
      live_ranges: `...-live-range.txt`; without its peak no temporaries are told.
      program: `...after_optimizations.txt`, the optimised HLO.
    """
    parameters: dict[int, int] = {}
    temporaries: list[_Value] = []
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
            name, size, offset, shape = found.groups()
            temporaries.append(_Value(name, int(size), base + int(offset), shape))
    peak = set(_LIVE.findall(live_ranges.partition("(peak):")[2]))
    buffers = _at_peak(temporaries, peak, origins(program))
    return Assignment(parameters, buffers, constants)


def _at_peak(
    values: list[_Value], peak: set[str], made_by: Mapping[str, Origin]
) -> tuple[Buffer, ...]:
    """The live values, one for each place; several names may share one."""
    places: dict[tuple[int, int], list[_Value]] = {}
    for value in values:
        places.setdefault((value.offset, value.size), []).append(value)
    chosen: dict[tuple[int, int], Buffer] = {}
    for value in values:
        # The live ranges write an empty index where the assignment may not.
        name = value.name if value.name.endswith("}") else value.name + "{}"
        place = (value.offset, value.size)
        # A tuple is a table of addresses; what it points to is told by itself.
        is_table = value.shape.startswith("(")
        if name not in peak or is_table or value.size == 0 or place in chosen:
            continue
        # A loop's parameter has no maker: what was put into its place has.
        same = [v for v in places[place] if v.shape == value.shape]
        found = (made_by.get(v.name.partition("{")[0]) for v in (value, *same))
        origin = next((o for o in found if o and o.op_name), Origin("", "", 0))
        chosen[place] = Buffer(value.size, value.shape, value.offset, origin)
    return tuple(sorted(chosen.values(), key=lambda b: (-b.size, b.offset)))


def covered(buffers: Iterable[Buffer]) -> int:
    """Bytes of the places the buffers take, those of two counted once."""
    total, end = 0, 0
    for start, stop in sorted((b.offset, b.offset + b.size) for b in buffers):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def origins(program: str) -> dict[str, Origin]:
    """Instruction -> where it comes from, in the text of an HLO module."""
    tables = _tables(program)
    found: dict[str, Origin] = {}
    for line in program.splitlines():
        match = _INSTRUCTION.match(line)
        if match is None or " parameter(" in line:
            continue
        op_name, source = _OP_NAME.search(match[2]), _SOURCE.search(match[2])
        file, number = (source[1], int(source[2])) if source else ("", 0)
        frame = _FRAME.search(match[2])
        if not source and frame:
            file, number = _resolve(tables, frame[1])
        found[match[1]] = Origin(op_name[1] if op_name else "", file, number)
    return found


def _tables(program: str) -> dict[str, dict[str, str]]:
    """The tables of names, places and frames that stand before the program."""
    tables: dict[str, dict[str, str]] = {}
    rows: dict[str, str] = {}
    for line in program.splitlines():
        if line.startswith(("%", "ENTRY")):
            break
        if row := _TABLE_ROW.fullmatch(line.strip()):
            rows[row[1]] = row[2] or row[3] or ""
        elif line and not line.startswith("HloModule"):
            rows = tables.setdefault(line.strip(), {})
    return tables


def _resolve(tables: Mapping[str, Mapping[str, str]], frame: str) -> tuple[str, int]:
    """The file and line of the innermost frame that is not an installed package's."""
    frames = tables.get("StackFrames", {})
    # Parents are printed one too high: the first frame, which has none, says 1.
    shift = 1 if _field(frames.get("1", ""), "parent_frame_id") == "1" else 0
    innermost: tuple[str, int] = ("", 0)
    for _ in range(len(frames)):
        if frame not in frames:
            break
        place = _field(frames[frame], "file_location_id")
        location = tables.get("FileLocations", {}).get(place, "")
        file = tables.get("FileNames", {}).get(_field(location, "file_name_id"), "")
        found = file, int(_field(location, "line") or 0)
        if _INSTALLED not in file:
            return found
        innermost = innermost if innermost[0] else found
        frame = str(int(_field(frames[frame], "parent_frame_id") or 0) - shift)
    return innermost


def _field(row: str, name: str) -> str:
    found = re.search(rf"\b{name}=(\d+)", row)
    return found[1] if found else ""


def _read(path: Path) -> str:
    return path.read_text(errors="replace")
