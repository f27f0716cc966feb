"""Which values to keep: the least arithmetic within the memory there is, exactly.

A mixed-integer linear program. Only what is kept is integer; what runs again follows
from it (Jain et al. 2020, "Checkmate", arXiv:1910.02653, solve the same
problem for a graph without names, with a schedule to find; here autodiff and XLA have
the schedule, and the program has the size of the names).

The fullest moment is looked for among those at which the backward pass is in one of
the stretches. Alive are then the kept values up to there, what the stretch's segment
needs and has computed again, and the gradients made so far.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sfpo_jax.memory._linear import Linear, Terms
from sfpo_jax.memory._recompute_graph import Cause, Graph, Value, last_segment

# Stretches that are computed again together, at most; the last segment aside.
_WINDOW = 4
_GAP = 1e-3  # of all that could run again, to the best there can be
_PEAK_GAP = 1e-2  # of the least memory, likewise


class Memory(NamedTuple):
    """How bytes of a graph become bytes of a device.

    Attributes:
      base: what is there whatever is kept.
      scale: of what autodiff keeps, the share that XLA does; it fuses the rest.
    """

    base: float
    scale: float


def predict(graph: Graph, saved: frozenset[str], memory: Memory) -> float:
    """Bytes of a device at the fullest moment."""
    stretches = len(graph.residual)
    first = last_segment(graph, saved)
    held = _held(graph, memory)
    kept = [0.0] * stretches  # by values other than cuts
    again = list(held)
    ends = {}
    for value in graph.values:
        if value.name in saved:
            if value.is_cut:
                ends[value.stretch] = value.bytes
            elif value.stretch < first:
                kept[value.stretch] += value.bytes
            if value.is_needed and value.stretch < first:
                again[value.stretch] -= value.bytes
    peak, grads = 0.0, 0.0
    start = first
    for now in reversed(range(stretches)):
        grads += graph.grads[now]
        if now < first:
            start = max((e + 1 for e in ends if e < now), default=0)
        if now >= first and now < stretches - 1:
            continue  # the last stretch has all of the last segment
        alive = sum(kept[: now + 1]) + sum(b for e, b in ends.items() if e < now)
        alive += grads + graph.passing[now]
        peak = max(peak, alive + sum(max(0.0, r) for r in again[start : now + 1]))
    return memory.base + peak


def _held(graph: Graph, memory: Memory) -> list[float]:
    """Bytes that XLA keeps of each stretch, no less than those of its names."""
    least = [0.0] * len(graph.residual)
    for value in graph.values:
        least[value.stretch] += value.bytes * value.is_needed
    pairs = zip(graph.residual, least, strict=True)
    return [max(memory.scale * size, low) for size, low in pairs]


def solve(graph: Graph, memory: Memory, budget: float | None) -> frozenset[str] | None:
    """The values to keep.

    Args:
      graph: of the function.
      memory: how its bytes become a device's.
      budget: bytes of a device, for the least arithmetic; None for the least memory,
        and then the least arithmetic.

    Returns:
      Their names, with no kept cut for keeping all that autodiff would; None where
      nothing meets the budget.
    """
    program = _Program(graph, memory)
    if budget is None:
        program.minimise_peak()
    else:
        program.bound_peak(budget)
    found = program.linear.solve(_GAP if budget is not None else _PEAK_GAP)
    if found is None:
        return None
    return frozenset(
        name
        for name, terms in program.save.items()
        if sum(factor * found[place] for factor, place in terms) > 0.5
    )


def _alike(graph: Graph) -> dict[str, str]:
    """Values that are kept together or not at all, by the first of them.

    One equation makes them for nothing else, such as queries, keys and values.
    """
    known = {value.name: value for value in graph.values}
    found: dict[str, str] = {}
    for part in graph.work:
        own = sorted(part.cause or (), key=lambda name: list(known).index(name))
        kinds = {(known[n].stretch, known[n].bytes, known[n].is_cut) for n in own}
        names = {name.rpartition("/")[0] for name in own}
        if len(own) > 1 and len(names) == len(kinds) == 1 and part.flops:
            found |= dict.fromkeys(own, own[0])
    return found


class _Program:
    """The linear program of a loss.

    A plan cuts the stretches into segments, which are the steps of a path from the
    first stretch to the last; of a path the relaxed program knows much, and of "this
    cut is kept" little. Variables, for a loss of n stretches:

        step[a, b]   0 or 1: a..b is a segment, b < n - 1
        stop[a]      0 or 1: a..n - 1 is the last segment
        save[v]      0 or 1, of values other than cuts
        miss[v]      v runs again: 1 where it is needed, not kept, and not in the last
                     segment
        again[j, k]  bytes of j that are there again while the backward pass is in k
    """

    def __init__(self, graph: Graph, memory: Memory) -> None:
        self.graph, self.memory = graph, memory
        self.linear = Linear()
        self.held = _held(graph, memory)
        # Numbers near one are what solvers are made for.
        self.unit = max(sum(self.held) + sum(graph.grads), 1.0)
        work = max(sum(w.operations for w in graph.work), 1)
        # Fixed at one: the solver's gap is relative to the objective.
        self.linear.row([(1.0, self.linear.variable(cost=1.0))], 1.0)
        self.size = len(graph.residual)
        self.step: dict[tuple[int, int], int] = {}
        self.stop = [self.linear.variable(is_integer=True) for _ in range(self.size)]
        self._path()
        alike = _alike(graph)
        self.save: dict[str, Terms] = {}
        for value in graph.values:
            first = alike.get(value.name, value.name)
            known = self.save.get(first)
            self.save[value.name] = self._saved(value) if known is None else known
        self.miss = {v.name: self.linear.variable() for v in graph.values}
        for value in graph.values:
            own = self.miss[value.name]
            self._runs(value.cause, value.stretch, own, self.save[value.name])
        for part in graph.work:
            own = self.linear.variable(cost=part.operations / work)
            self._runs(part.cause, part.stretch, own, [])
        self.moments = [self._moment(now) for now in range(self.size)]

    def _path(self) -> None:
        """Segments follow each other from the first stretch to the last."""
        last = self.size - 1
        for a in range(last):
            for b in range(a, min(a + _WINDOW, last)):
                self.step[a, b] = self.linear.variable(is_integer=True)
        for a in range(self.size):
            out = [(1.0, self.stop[a])]
            out += [(1.0, place) for (x, _), place in self.step.items() if x == a]
            into = [(-1.0, place) for (_, y), place in self.step.items() if y == a - 1]
            begins = float(a == 0)
            self.linear.row([*out, *into], begins, begins)

    def _saved(self, value: Value) -> Terms:
        if not value.is_cut:
            return [(1.0, self.linear.variable(is_integer=True))]
        return self._steps(lambda a, b: b == value.stretch)

    def _steps(self, holds: Callable[[int, int], bool]) -> Terms:
        return [(1.0, place) for ends, place in self.step.items() if holds(*ends)]

    def _last(self, stretch: int) -> Terms:
        """1 where a stretch is in the last segment."""
        return [(1.0, place) for place in self.stop[: stretch + 1]]

    def _runs(self, cause: Cause, stretch: int, own: int, kept: Terms) -> None:
        """own >= what its causes say, but not in the last segment, nor where kept."""
        less = [*self._last(stretch), *kept]
        if cause is None:
            self.linear.row([(1.0, own), *less], 1.0)
            return
        for other in cause:
            self.linear.row([(1.0, own), (-1.0, self.miss[other]), *less], 0.0)

    def _again(self, j: int, is_same: Terms) -> int:
        """Bytes of stretch j that are there again: its own, but those of kept names."""
        held = self.held[j] / self.unit
        own = self.linear.variable(most=held)
        kept = [
            (v.bytes / self.unit * factor, place)
            for v in self.graph.values
            if v.stretch == j and v.is_needed
            for factor, place in self.save[v.name]
        ]
        self.linear.row([(1.0, own), *kept, *((-held * f, p) for f, p in is_same)], 0.0)
        return own

    def _moment(self, now: int) -> tuple[Terms, float]:
        """What is there while the backward pass is in a stretch: terms, and more."""
        terms: list[tuple[float, int]] = []
        for v in self.graph.values:
            if v.stretch < now or (v.stretch == now and not v.is_cut):
                size = v.bytes / self.unit
                terms += [(size * factor, place) for factor, place in self.save[v.name]]
        if now == self.size - 1:
            terms += [(1.0, self._again(j, self._last(j))) for j in range(self.size)]
        else:
            for j in range(max(now - _WINDOW + 1, 0), now + 1):
                same = self._steps(lambda a, b, j=j: a <= j and b >= now)
                terms.append((1.0, self._again(j, same)))
        rest = sum(self.graph.grads[now:]) + self.graph.passing[now]
        return terms, rest / self.unit

    def bound_peak(self, budget: float) -> None:
        """The least arithmetic with no moment above the budget."""
        free = (budget - self.memory.base) / self.unit
        for terms, rest in self.moments:
            self.linear.row([(-factor, place) for factor, place in terms], rest - free)

    def minimise_peak(self) -> None:
        """The least memory; of that, nearly the least arithmetic."""
        self.linear.costs = [1e-3 * cost for cost in self.linear.costs]
        peak = self.linear.variable(cost=1.0, most=np.inf)
        for terms, rest in self.moments:
            row: list[tuple[float, int]] = [(1.0, peak)]
            self.linear.row(row + [(-factor, place) for factor, place in terms], rest)
