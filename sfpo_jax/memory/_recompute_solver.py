"""Which values to keep: the least arithmetic within the memory there is, exactly.

A mixed-integer linear program, solved by HiGHS (Huangfu and Hall 2018) through
`scipy.optimize.milp`; SciPy comes with JAX. Only what is kept is integer. What runs
again follows from it (Jain et al. 2020, "Checkmate", arXiv:1910.02653, solve the same
problem for a graph without names, with a schedule to find; here autodiff and XLA have
the schedule, and the program has the size of the names).

The fullest moment is looked for among those at which the backward pass is in one of
the stretches. Alive are then the kept values up to there, what the stretch's segment
needs and has computed again, and the gradients made so far.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from sfpo_jax.memory._recompute_graph import Cause, Graph, last_segment

# Stretches that are computed again together, at most; the last segment aside.
_WINDOW = 4
_GAP = 2e-3  # of all that could run again, to the best there can be
_NODES = 20000  # a number, not seconds: hosts that plan alike must choose alike


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
        peak = max(peak, grads + alive + sum(max(0.0, r) for r in again[start : now + 1]))
    return memory.base + peak


def _held(graph: Graph, memory: Memory) -> list[float]:
    """Bytes that XLA keeps of each stretch, no less than those of its names."""
    least = [0.0] * len(graph.residual)
    for value in graph.values:
        least[value.stretch] += value.bytes * value.is_needed
    pairs = zip(graph.residual, least, strict=True)
    return [max(memory.scale * size, low) for size, low in pairs]


def solve(
    graph: Graph, memory: Memory, budget: float | None
) -> frozenset[str] | None:
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
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    program = _Program(graph, memory)
    if budget is None:
        program.minimise_peak()
    else:
        program.bound_peak(budget)
    rows, columns, entries = zip(*program.entries, strict=True)
    shape = len(program.least), len(program.objective)
    matrix = coo_array((entries, (rows, columns)), shape=shape)
    result = milp(
        np.array(program.objective),
        constraints=LinearConstraint(matrix, np.array(program.least), np.inf),
        integrality=np.array(program.integer),
        bounds=Bounds(0.0, np.array(program.most)),
        options={"mip_rel_gap": _GAP, "node_limit": _NODES},
    )
    if result.x is None:
        return None
    return frozenset(
        name for name, place in program.saves.items() if result.x[place] > 0.5
    )


Terms = Sequence[tuple[float, int]]


class _Program:
    """Rows sum(factor * x[place]) >= least, for x >= 0.

    With cuts c and other values v, in stretches j and k:

        save[v]      0 or 1
        miss[v]      v runs again: 1 where it is needed, not kept, and not in the last
                     segment
        last[j]      j is in the last segment
        same[j, k]   j and k are in one segment, j <= k, and it is not the last
        again[j, k]  bytes of j that are there again while the backward pass is in k
    """

    def __init__(self, graph: Graph, memory: Memory) -> None:
        self.graph = graph
        self.objective: list[float] = []
        self.most: list[float] = []
        self.integer: list[int] = []
        self.entries: list[tuple[int, int, float]] = []
        self.least: list[float] = []
        self.memory = memory
        self.held = _held(graph, memory)
        # Numbers near one are what solvers are made for.
        self.unit = max(sum(self.held) + sum(graph.grads), 1.0)
        work = max(sum(w.operations for w in graph.work), 1)
        # Fixed at one: the solver's gap is relative to the objective.
        self._row([(1.0, self._variable(cost=1.0))], 1.0)
        self.stretches = len(graph.residual)
        self.saves = {v.name: self._variable(integer=1) for v in graph.values}
        self.last = [self._variable() for _ in range(self.stretches)]
        self.misses = {v.name: self._variable() for v in graph.values}
        self.ends = {v.stretch: self.saves[v.name] for v in graph.values if v.is_cut}
        self._segments()
        for value in graph.values:
            self._runs(value.cause, value.stretch, self.misses[value.name], value.name)
        for part in graph.work:
            share = part.operations / work
            own = self._variable(cost=share)
            self._runs(part.cause, part.stretch, own)
        self.moments = [self._moment(now) for now in range(self.stretches)]

    def _variable(self, *, cost: float = 0.0, most: float = 1.0, integer: int = 0) -> int:
        self.objective.append(cost)
        self.most.append(most)
        self.integer.append(integer)
        return len(self.objective) - 1

    def _row(self, terms: Terms, least: float) -> None:
        self.entries += [(len(self.least), place, factor) for factor, place in terms]
        self.least.append(least)

    def _segments(self) -> None:
        self._row([(1.0, self.last[-1])], 1.0)
        for j in range(self.stretches - 1):
            here, after, end = self.last[j], self.last[j + 1], self.ends[j]
            self._row([(1.0, after), (-1.0, here)], 0.0)
            self._row([(-1.0, here), (-1.0, end)], -1.0)
            self._row([(1.0, here), (-1.0, after), (1.0, end)], 0.0)

    def _runs(self, cause: Cause, stretch: int, own: int, name: str = "") -> None:
        """own >= what its causes say, but not in the last segment, nor where kept."""
        less = [(1.0, self.last[stretch])]
        less += [(1.0, self.saves[name])] if name else []
        if cause is None:
            self._row([(1.0, own), *less], 1.0)
            return
        for other in cause:
            self._row([(1.0, own), (-1.0, self.misses[other]), *less], 0.0)

    def _again(self, j: int, is_same: Terms, least: float) -> int:
        """Bytes of stretch j that are there again: its own, but those of kept names."""
        held = self.held[j] / self.unit
        own = self._variable(most=held)
        kept = [
            (v.bytes / self.unit, self.saves[v.name])
            for v in self.graph.values
            if v.stretch == j and v.is_needed
        ]
        # own >= held * same - kept, where same = sum(is_same) + (1 - least).
        terms = [(-held * factor, place) for factor, place in is_same]
        self._row([(1.0, own), *kept, *terms], held * least)
        return own

    def _moment(self, now: int) -> tuple[Terms, float]:
        """What is there while the backward pass is in a stretch: terms, and the rest."""
        terms: list[tuple[float, int]] = []
        for value in self.graph.values:
            if value.stretch < now or (value.stretch == now and not value.is_cut):
                terms.append((value.bytes / self.unit, self.saves[value.name]))
        if now == self.stretches - 1:
            for j in range(self.stretches):
                terms.append((1.0, self._again(j, [(1.0, self.last[j])], 0.0)))
        else:
            # same[now] = 1 - last[now]; then down as long as no cut is kept.
            same = self._variable()
            self._row([(1.0, same), (1.0, self.last[now])], 1.0)
            for j in range(now, max(now - _WINDOW, -1), -1):
                if j < now:
                    before, same = same, self._variable()
                    row = [(1.0, same), (-1.0, before), (1.0, self.ends[j])]
                    self._row(row, 0.0)
                terms.append((1.0, self._again(j, [(1.0, same)], 0.0)))
            first = now - _WINDOW
            if first >= 0:
                self._row([(1.0, self.ends[first]), (-1.0, same)], 0.0)
        grads = sum(self.graph.grads[now:])
        return terms, grads / self.unit

    def bound_peak(self, budget: float) -> None:
        """The least arithmetic with no moment above the budget."""
        free = (budget - self.memory.base) / self.unit
        for terms, rest in self.moments:
            self._row([(-factor, place) for factor, place in terms], rest - free)

    def minimise_peak(self) -> None:
        """The least memory; of that, nearly the least arithmetic."""
        self.objective = [1e-3 * cost for cost in self.objective]
        peak = self._variable(cost=1.0, most=np.inf)
        for terms, rest in self.moments:
            row: list[tuple[float, int]] = [(1.0, peak)]
            self._row(row + [(-factor, place) for factor, place in terms], rest)
