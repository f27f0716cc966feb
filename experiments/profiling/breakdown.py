"""The time of a step, each moment counted once, under one kind of work."""

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from experiments.profiling.kinds import (
    CATEGORIES,
    COLLECTIVES,
    IDLE,
    INPUT,
    ORDER,
    Program,
    kind_by_name,
)
from experiments.profiling.trace import Event, Trace

Spans = list[tuple[float, float]]


class Operation(NamedTuple):
    """All runs of one instruction."""

    module: str
    name: str
    kind: str
    seconds: float  # of a device in a step, whether or not something else ran as well
    runs: float  # of a device in a step


class Breakdown(NamedTuple):
    """Where the time of a step goes; seconds, the mean over steps and local devices."""

    step: float
    parts: dict[str, float]  # by category; they add up to the step
    in_flight: float  # a collective runs, whatever runs beside it
    operations: list[Operation]  # the longest first


def break_down(trace: Trace, steps: int, program: Program) -> Breakdown:
    """Gives each moment to one category.

    Of operations that run at once on a device, that of the first category in
    `kinds.ORDER` has the time: a collective under a product costs nothing. Moments
    without any are `INPUT` where the host waits for a batch, else `IDLE`.

    Args:
      trace: of some steps.
      steps: how many.
      program: the step.

    Raises:
      ValueError: no operation was traced.
    """
    devices: dict[int, list[tuple[Event, str]]] = defaultdict(list)
    for event in trace.events:
        found = program.find(event.module, event.name)
        kind = found.kind if found else kind_by_name(event.name)
        begin, end = max(event.begin, trace.begin), min(event.end, trace.end)
        if kind is not None and end > begin:
            inside = event._replace(begin=begin, end=end)
            devices[event.device].append((inside, kind))
    if not devices:
        raise ValueError("the trace has no operations: this back end tells none.")
    parts, in_flight = dict.fromkeys(CATEGORIES, 0.0), 0.0
    for pairs in devices.values():
        spans = _by_kind(pairs)
        taken: Spans = []
        for kind in ORDER:
            grown = _union([*taken, *spans[kind]])
            parts[kind] += _length(grown) - _length(taken)
            taken = grown
        # What a wait adds to the operations is the part of it that nothing hides.
        waits = [(max(b, trace.begin), min(e, trace.end)) for b, e in trace.waits]
        with_waits = _union([*taken, *((b, e) for b, e in waits if e > b)])
        parts[INPUT] += _length(with_waits) - _length(taken)
        parts[IDLE] += trace.end - trace.begin - _length(with_waits)
        in_flight += _length(_union(spans[COLLECTIVES]))
    scale = 1e-9 / steps / len(devices)
    events = [pair for pairs in devices.values() for pair in pairs]
    return Breakdown(
        1e-9 * (trace.end - trace.begin) / steps,
        {kind: scale * time for kind, time in parts.items()},
        scale * in_flight,
        _operations(events, scale),
    )


def _by_kind(found: Iterable[tuple[Event, str]]) -> dict[str, Spans]:
    spans: dict[str, Spans] = defaultdict(list)
    for event, kind in found:
        spans[kind].append((event.begin, event.end))
    return spans


def _operations(events: Iterable[tuple[Event, str]], scale: float) -> list[Operation]:
    times: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for event, kind in events:
        times[event.module, event.name, kind].append(event.end - event.begin)
    found = [
        Operation(*which, scale * sum(each), scale * 1e9 * len(each))
        for which, each in times.items()
    ]
    return sorted(found, key=lambda operation: -operation.seconds)


def _union(spans: Iterable[tuple[float, float]]) -> Spans:
    """The same moments, in spans that do not touch."""
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _length(spans: Iterable[tuple[float, float]]) -> float:
    return sum(end - begin for begin, end in spans)
