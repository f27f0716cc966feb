"""One page about the traced steps: where their time goes, and what they reach."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments.profiling.breakdown import Breakdown, Operation
from experiments.profiling.kinds import CATEGORIES, COLLECTIVES, Program

# FLOP/s of bfloat16 products, dense, by what the driver calls the card; NVIDIA's data
# sheets of the A100, H100, H200 and B200. The first that matches.
_PEAKS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
}
_UNITS = (("T", 1e12), ("G", 1e9), ("M", 1e6))
_SHOWN = 6


class Flops(NamedTuple):
    """Matrix products and convolutions of a device in a step."""

    total: int
    is_estimate: bool  # three times the forward pass


class Profile(NamedTuple):
    """The traced steps of one phase, and what is known of them besides."""

    contender: str
    phase: str
    first: int  # step
    steps: int
    folder: Path
    found: Breakdown
    seconds: float  # of a step that is not traced, where there was one
    program: Program  # the step
    flops: Flops | None  # None where they cannot be counted
    samples: int  # of a step, over all devices

    @property
    def title(self) -> str:
        """The contender, with its phase where it has several."""
        return self.contender + (f", {self.phase}" if self.phase != "steps" else "")


def peak_flops(device_kind: str) -> float | None:
    """What a device could do at most, FLOP/s in bfloat16; None where not known.

    Example:
      >>> peak_flops("NVIDIA H200") == 989e12, peak_flops("cpu")
      (True, None)
    """
    found = (peak for name, peak in _PEAKS.items() if name in device_kind)
    return next(found, None)


def summarise(
    profiles: Sequence[Profile],
    *,
    title: str,
    device_kind: str,
    devices: int,
    tokens: int | None,
) -> str:
    """The page in Markdown.

    Args:
      profiles: one or more.
      title: the name of the run.
      device_kind: what the devices call themselves.
      devices: of the mesh.
      tokens: of a sample; None where samples are counted.
    """
    peak = peak_flops(device_kind)
    unit = "samples/s" if tokens is None else "tokens/s"
    rows = [["", *(profile.title for profile in profiles)]]
    rows.append(["steps", *(_range(profile) for profile in profiles)])
    rows.append(["a step, not traced", *(_ms(p.seconds) for p in profiles)])
    per_sample = tokens or 1
    rates = [per_sample * p.samples / p.seconds for p in profiles]
    rows.append([unit, *(f"{rate:,.0f}" for rate in rates)])
    rows.append(["arithmetic of a device", *(_rate(profile) for profile in profiles)])
    if peak is not None:
        rows.append(["MFU", *(_mfu(profile, peak) for profile in profiles)])
    rows.append(["**a traced step**", *(f"**{_ms(p.found.step)}**" for p in profiles)])
    rows.append(["communication", *(_communication(p.found) for p in profiles)])
    for category in CATEGORIES:
        rows.append([category, *(_part(p.found, category) for p in profiles)])
    parts = [
        f"# Where the time goes: {title}",
        f"{devices} x {device_kind}",
        _table(rows),
        _notes(peak),
        *(_longest(profile) for profile in profiles),
        "The traces open in Perfetto (https://ui.perfetto.dev) or XProf: "
        + ", ".join(f"`{_place(profile.folder)}`" for profile in profiles)
        + ".",
    ]
    return "\n\n".join(parts) + "\n"


def _notes(peak: float | None) -> str:
    notes = (
        "The categories add up to a traced step. Where operations run at once on a "
        "device, the time is that of the first of the list: under *collectives* is "
        "what nothing hides, waiting for slower devices included. Communication: that, "
        "and the share of the step in which a collective runs at all. Tracing slows "
        "short steps down: rates are those of the median step of the same phase that "
        "was not traced. Arithmetic: matrix products and convolutions of the program, "
        "what is computed again included; an estimate, where the program has loops "
        "whose length is not written in it, is three times the forward pass. Mean over "
        "the steps and this process' devices."
    )
    if peak is None:
        return f"{notes} The peak of this device is not known, so there is no MFU."
    return f"{notes} MFU: of {peak / 1e12:,.0f} TFLOP/s, bfloat16, dense."


def _longest(profile: Profile) -> str:
    found = profile.found
    is_sent = [o for o in found.operations if o.kind == COLLECTIVES]
    rows = [["operation", "kind", "ms a step", "runs", "from"]]
    shown = found.operations[:_SHOWN]
    shown += [o for o in is_sent if o not in shown][: max(1, _SHOWN // 2)]
    rows += [_operation(operation, profile) for operation in shown]
    return f"## Longest operations: {profile.title}\n\n{_table(rows)}"


def _operation(operation: Operation, profile: Profile) -> list[str]:
    work = profile.program.find(operation.module, operation.name)
    name, place = f"`{operation.name}`", ""
    if work is None:
        place = f"another program, `{operation.module}`"
    else:
        if not operation.name.startswith(work.opcode):
            name += f" ({work.opcode})"
        if work.origin is not None and work.origin.op_name:
            last = work.origin.op_name.rpartition("/")[2]
            file = Path(work.origin.file).name
            place = f"{last} {file}:{work.origin.line}" if file else last
    return [
        name,
        operation.kind,
        f"{1e3 * operation.seconds:.3f}",
        f"{operation.runs:.3g}",
        place,
    ]


def _place(folder: Path) -> str:
    """A folder of traces as it lies in that of the run."""
    return "/".join(folder.parts[-3:])


def _range(profile: Profile) -> str:
    return f"{profile.first}-{profile.first + profile.steps - 1}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f} ms"


def _part(found: Breakdown, category: str) -> str:
    seconds = found.parts[category]
    return f"{_ms(seconds)}, {seconds / found.step:.1%}"


def _communication(found: Breakdown) -> str:
    exposed = found.parts[COLLECTIVES] / found.step
    return f"{exposed:.1%}, runs {found.in_flight / found.step:.1%}"


def _rate(profile: Profile) -> str:
    if profile.flops is None:
        return "not counted"
    rate = profile.flops.total / profile.seconds
    unit, size = next((u for u in _UNITS if rate >= u[1]), _UNITS[-1])
    mark = " (estimate)" if profile.flops.is_estimate else ""
    return f"{rate / size:.4g} {unit}FLOP/s{mark}"


def _mfu(profile: Profile, peak: float) -> str:
    if profile.flops is None:
        return "not counted"
    return f"{profile.flops.total / profile.seconds / peak:.1%}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [list(rows[0]), [":--", *["--:"] * (len(rows[0]) - 1)], *rows[1:]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
