"""What an audit found, as a table of at most 80 columns."""

import dataclasses
import json
import textwrap
from pathlib import Path
from typing import Any, Literal

from sfpo_jax.units import format_bytes

Kind = Literal["donation", "copy", "offload", "growth", "gradients", "reduction"]

_WIDTH = 80
_INDENT = " " * 4


@dataclasses.dataclass(frozen=True)
class Finding:
    """A thing the compiled step does otherwise than was asked.

    Attributes:
      kind: "donation": an argument's memory is not reused. "copy": a loop copies a
        whole stacked array. "offload": a value for the host's memory stays on the
        device. "growth": a part of the state comes back in a wider dtype.
        "gradients": those of all parameters live at once. "reduction": gradients
        travel dense where they were to be compressed.
      bytes: of one device: held for nothing, or sent for nothing in one step.
      source: "file:line" that it comes from; "" where nothing tells.
      message: what was found, with the arrays' names.
      remedy: what to change.
    """

    kind: Kind
    bytes: int
    source: str
    message: str
    remedy: str

    def __str__(self) -> str:
        place = Path(self.source).name
        size = format_bytes(self.bytes, digits=4)
        lines = [f"{self.kind:<12}{size:>12}  {place}".rstrip()]
        lines += _wrap(self.message, _INDENT, _INDENT)
        lines += _wrap(self.remedy, f"{_INDENT}-> ", f"{_INDENT}   ")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class AuditReport:
    """What was found in one program; false where nothing was.

    Attributes:
      findings: the largest first.
      device: the card, or what the devices at hand are.
      compiler: the platform whose compiler made the program, e.g. "cuda", "cpu".
      mesh_shape: mesh axes and their sizes; empty for a program on one device.
      notes: what was not looked at, and why.
    """

    findings: tuple[Finding, ...]
    device: str
    compiler: str
    mesh_shape: dict[str, int]
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.findings

    def __bool__(self) -> bool:
        return not self.ok

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON knows."""
        return json.loads(json.dumps(dataclasses.asdict(self) | {"ok": self.ok}))

    def __str__(self) -> str:
        number = len(self.findings)
        found = f"{number or 'no'} finding{'s' * (number != 1)}"
        mesh = " x ".join(f"{n} {s}" for n, s in self.mesh_shape.items() if s > 1)
        where = f"{self.device}{f', mesh {mesh}' if mesh else ''}"
        parts = [f"{found} on {where}, compiled for {self.compiler}"]
        parts += map(str, self.findings)
        if self.notes:
            lines = [
                line for note in self.notes for line in _wrap(note, "  - ", _INDENT)
            ]
            parts.append("\n".join(["notes", *lines]))
        return "\n\n".join(parts)


def _wrap(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
    )
