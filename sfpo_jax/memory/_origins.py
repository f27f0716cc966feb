"""Which operation, and which line of whose code, made each value of a program.

Read from the text of an HLO module: the metadata of its instructions, and the tables of
stack frames that newer compilers put in front.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

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

    @property
    def is_forward(self) -> bool:
        """Of the forward pass of what is differentiated, by its name."""
        return "jvp(" in self.op_name and "transpose(" not in self.op_name


NOWHERE = Origin("", "", 0)


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
