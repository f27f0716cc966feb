"""A plan as a table of at most 80 columns."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from sfpo_jax.memory._buffers import Buffer
from sfpo_jax.units import format_bytes

if TYPE_CHECKING:
    from sfpo_jax.memory._plan import Plan

_WIDTH = 80
_SHOWN_BUFFERS = 8
_BAR = 24


def render(plan: "Plan") -> str:
    """The plan in words: verdict, ledger, largest temporaries, what to do."""
    mesh = " x ".join(f"{n} {s}" for n, s in plan.mesh_shape.items() if s > 1)
    verdict = "fits" if plan.fits else "does NOT fit"
    spare = plan.budget_bytes - plan.total_bytes
    lines = _wrap(
        f"{_size(plan.total_bytes)} a device: {verdict} into "
        f"{_size(plan.budget_bytes)} of {plan.device}"
        f"{f', mesh {mesh}' if mesh else ''} "
        f"({_size(abs(spare))} {'to spare' if spare >= 0 else 'too much'})",
        "",
    )
    lines += ["", f"{'held by':<20}{'bytes':>12}{'share':>8}"]
    for name, size in plan.ledger.items():
        share = size / plan.total_bytes if plan.total_bytes else 0.0
        bar = "#" * round(_BAR * share)
        lines.append(f"{name:<20}{_size(size):>12}{share:>8.1%}  {bar}".rstrip())
    lines.append(f"{'total':<20}{_size(plan.total_bytes):>12}{1:>8.1%}")
    lines += ["", *_work(plan)]
    if plan.buffers:
        lines += ["", "largest temporaries at the fullest moment"]
        for buffer in plan.buffers[:_SHOWN_BUFFERS]:
            lines += _buffer(buffer)
    for title, texts in (
        ("what to try, with what it saves", plan.advice),
        ("warnings", plan.warnings),
        ("notes", plan.notes),
    ):
        if texts:
            lines += ["", title]
            for text in texts:
                lines += _wrap(text, "  - ")
    return "\n".join(lines)


def _work(plan: "Plan") -> list[str]:
    flops = "not counted" if plan.flops is None else f"{plan.flops:.4g}"
    sent = ", ".join(f"{axis} {_size(n)}" for axis, n in plan.wire_bytes.items())
    host = f"{'in host memory':<20}{_size(plan.host_bytes):>12}   for each device"
    return [
        *([host] if plan.host_bytes else []),
        f"{'FLOPs a device':<20}{flops:>12}   matrix products and convolutions",
        *_wrap(f"{'sent by a device':<20}{sent or 'nothing':>12}", ""),
        f"{'compiler':<20}{plan.compiler:>12}",
    ]


def _buffer(buffer: Buffer) -> list[str]:
    shape = buffer.shape.partition("{")[0]
    place = ""
    if buffer.origin.file:
        place = f"{Path(buffer.origin.file).name}:{buffer.origin.line}"
    first = f"{_size(buffer.size):>12}  {shape}"
    name = buffer.origin.op_name
    # The end of a long path says more than its beginning.
    room = _WIDTH - 14
    if len(name) > room:
        name = "..." + name[3 - room :]
    if len(first) + 2 + len(place) > _WIDTH:
        lines = [first[:_WIDTH], f"{place:>{_WIDTH}}"]
    else:
        lines = [f"{first}  {place}".rstrip()]
    return lines + [f"{'':14}{name}"] * bool(name)


def _wrap(text: str, head: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * len(head),
        break_on_hyphens=False,
    )


def _size(amount: int) -> str:
    return format_bytes(amount, digits=4)
