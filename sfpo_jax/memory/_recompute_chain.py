"""The named values of a loss, as the search for a plan sees them."""

import itertools
from collections.abc import Iterable

from sfpo_jax.memory._recompute_graph import Graph, cost, last_segment
from sfpo_jax.memory._recompute_solver import Memory, predict, solve

Saved = frozenset[str]


class Chain:
    """A loss whose values are kept or not, each for itself.

    A choice is a set of numbered names; empty, nothing runs again.

    Args:
      graph: of the loss.
    """

    margin = 0.025  # of a budget, as long as nothing is known of the prediction

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.nothing: Saved = frozenset()

    @property
    def candidates(self) -> dict[str, int]:
        """Bytes of each value."""
        return {value.name: value.bytes for value in self._graph.values}

    def calibrate(self, held: float, temporary: float) -> Memory:
        """How bytes that autodiff keeps become bytes of a device.

        Args:
          held: arguments and outputs.
          temporary: the rest, of a step in which nothing runs again.
        """
        graph = self._graph
        kept = temporary - graph.grads[-1] - graph.passing[-1]
        return Memory(held, max(kept, 0.0) / max(sum(graph.residual), 1))

    def shift(self, memory: Memory, by: float, saved: Saved) -> Memory:
        """`memory`, so much more of it taken, as was found with this choice."""
        del saved  # any other is taken to be off by as much
        return memory._replace(base=memory.base + by)

    def predict(self, saved: Saved, memory: Memory) -> float:
        """Bytes of a device at the fullest moment."""
        return predict(self._graph, saved, memory)

    def flops(self, saved: Saved) -> int:
        """FLOPs that run again, in one pass over one microbatch."""
        return cost(self._graph, saved)[0]

    def solve(self, memory: Memory, budget: float | None) -> tuple[Saved, float] | None:
        """(what to keep, bytes); None where nothing meets the budget.

        Args:
          memory: from `calibrate`.
          budget: bytes, for the least arithmetic; None for the least memory.
        """
        found = solve(self._graph, memory, budget)
        if found is None:
            return None
        saved = _without_idle(self._graph, found)
        return saved, self.predict(saved, memory)

    def keep(self, saved: Saved) -> tuple[str, ...] | None:
        """What a step's `recompute` takes."""
        return tuple(sorted(saved, key=number_of)) or None

    def describe(self, saved: Saved) -> list[str]:
        """Rows of a table: which values are kept."""
        rows = [f"{'value':<16}{'kept':>10}   which"]
        for kind, own in itertools.groupby(
            sorted(self.candidates, key=number_of), _kind
        ):
            names = list(own)
            kept = [number_of(name)[1] for name in names if name in saved]
            share = f"{len(kept)} of {len(names)}"
            if not saved:
                share = "all"
            rows.append(f"{kind:<16}{share:>10}   {ranges(kept)}".rstrip())
        return rows


def _without_idle(graph: Graph, saved: Saved) -> Saved:
    """`saved` without values that nothing reads again."""
    first = last_segment(graph, saved)
    saved = frozenset(
        v.name for v in graph.values if v.name in saved and v.stretch < first
    )
    operations = cost(graph, saved)[1]
    for value in graph.values:
        fewer = saved - {value.name}
        if (
            value.name in saved
            and not value.is_cut
            and cost(graph, fewer)[1] == operations
        ):
            saved = fewer
    return saved


def number_of(name: str) -> tuple[str, int]:
    """A numbered name, for sorting."""
    kind, _, number = name.rpartition("/")
    return kind, int(number)


def _kind(name: str) -> str:
    return number_of(name)[0]


def ranges(numbers: Iterable[int]) -> str:
    """Numbers in a short form.

    Example:
      >>> ranges([0, 1, 2, 5, 7, 8])
      '0-2, 5, 7-8'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ", ".join("-".join(map(str, run)) for run in runs)
