"""How full the memory is at each instruction of a program, and of what."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from sfpo_jax.memory._origins import NOWHERE, Origin
from sfpo_jax.transforms import PHASE_SCOPES

FORWARD, BACKWARD, REST = "forward", "backward", "rest"
WARMUP, COMPRESSED = "warm-up update", "compressed update"
_KEPT_VALUES = 16
_SHORTEST_PHASE = 0.015  # of the program


class Value(NamedTuple):
    """A temporary: its place, and the instructions between which it lives."""

    size: int  # bytes
    shape: str
    offset: int
    born: int  # position of the instruction that makes it
    dies: int  # of the last that reads it
    origin: Origin
    is_joined: bool = False  # made elsewhere, and handed on by a loop

    @property
    def is_table(self) -> bool:
        """Holds addresses of other values, which are told by themselves."""
        return self.shape.startswith("(")

    @property
    def is_activation(self) -> bool:
        """Kept by the forward pass for the backward one, by the name of its maker."""
        return self.origin.is_forward and not self.is_table


class Moment(NamedTuple):
    """Bytes that temporaries take, from a position on until the next moment."""

    position: int
    activations: int
    others: int


class Timeline(NamedTuple):
    """The temporaries of a program over the sequence of its instructions."""

    length: int  # instructions; the body of a loop is there once
    peak: int  # position of the fullest moment, the first of several
    running: Origin  # what runs there
    moments: tuple[Moment, ...]
    phases: tuple[tuple[int, str], ...]  # position -> what runs from there on
    values: tuple[Value, ...]  # the largest, in the order of their birth


def make_timeline(values: Sequence[Value], schedule: Sequence[Origin]) -> Timeline:
    """Counts what lives when.

    Args:
      values: the temporaries.
      schedule: where the instruction at each position comes from.
    """
    moments = _moments(values, len(schedule))
    fullest = max(moments, key=lambda m: m.activations + m.others)
    # Copies between the instructions of a fusion have no names of their own.
    before = reversed(schedule[: fullest.position + 1])
    running = next((o for o in before if o.op_name), NOWHERE)
    largest = sorted(_joined(values), key=lambda v: (-v.size, v.born))[:_KEPT_VALUES]
    largest.sort(key=lambda v: (v.born, -v.size))
    return Timeline(
        len(schedule),
        fullest.position,
        running,
        tuple(moments),
        _phases(schedule),
        tuple(largest),
    )


def _moments(values: Sequence[Value], length: int) -> list[Moment]:
    """Every change of what is taken; two values in one place count once."""
    edges = np.unique([[v.offset, v.offset + v.size] for v in values])
    widths = np.diff(edges)
    # Values in each stretch of memory between two edges, activations and all.
    held = np.zeros((2, len(widths)), np.int64)
    changes: dict[int, list[tuple[int, Value]]] = defaultdict(list)
    for value in values:
        changes[value.born].append((1, value))
        changes[value.dies + 1].append((-1, value))
    moments = [Moment(0, 0, 0)]
    taken = np.zeros(2, np.int64)
    for position in sorted(changes):
        for step, value in changes[position]:
            first, last = np.searchsorted(
                edges, (value.offset, value.offset + value.size)
            )
            rows = slice(0, 2) if value.is_activation else slice(1, 2)
            part = held[rows, first:last]
            was = part > 0
            part += step
            taken[rows] += ((part > 0).astype(np.int64) - was) @ widths[first:last]
        if position >= length:
            break
        activations, total = (int(size) for size in taken)
        if moments[-1].position == position:
            moments.pop()
        moment = Moment(position, activations, total - activations)
        if not moments or moment[1:] != moments[-1][1:]:
            moments.append(moment)
    return moments


def _joined(values: Iterable[Value]) -> list[Value]:
    """Values that a loop takes and hands on in one place are one."""
    places: dict[tuple[int, int, str], list[Value]] = defaultdict(list)
    for value in values:
        if not value.is_table:
            places[value.offset, value.size, value.shape].append(value)
    found = []
    for chain in places.values():
        chain.sort(key=lambda v: (v.born, v.dies))
        held = chain[0]
        for value in chain[1:]:
            touches = value.born <= held.dies + 1
            if not touches or not (value.is_joined or held.is_joined):
                found.append(held)
                held = value
                continue
            # The last to write there says more than what cleared the place.
            maker = held.origin if value.is_joined else value.origin
            held = value._replace(
                born=held.born, dies=max(held.dies, value.dies), origin=maker
            )
        found.append(held)
    return found


def _phases(schedule: Sequence[Origin]) -> tuple[tuple[int, str], ...]:
    """What runs, in stretches long enough to be seen."""
    starts: list[tuple[int, str]] = [(0, REST)]
    for position, origin in enumerate(schedule):
        if origin.op_name and (phase := phase_of(origin)) != starts[-1][1]:
            starts.append((position, phase))
    ends = [position for position, _ in starts[1:]] + [len(schedule)]
    found: list[tuple[int, str]] = []
    for (start, phase), end in zip(starts, ends, strict=True):
        is_short = end - start < _SHORTEST_PHASE * len(schedule)
        if not found or not (is_short or found[-1][1] == phase):
            found.append((start, phase))
    return tuple(found)


def phase_of(origin: Origin) -> str:
    """The part of a train step that an operation belongs to, by its name."""
    name = origin.op_name
    for phase, scope in PHASE_SCOPES.items():
        if scope in name:
            return WARMUP if phase == "warmup" else COMPRESSED
    if "transpose(" in name:
        return BACKWARD
    return FORWARD if origin.is_forward else REST
