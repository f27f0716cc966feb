"""What to keep of layers that stack: for so many of them these names, for others those.

The layers of a stack are alike, so what counts is how many are treated in which way.
Each way, a set of names, has its bytes and its FLOPs; how many layers get which is an
integer program of a few variables (Bellman's knapsack with several items a kind),
solved by HiGHS. Two or three ways are enough for an optimum, and each is one loop.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from sfpo_jax.memory._linear import Linear
from sfpo_jax.memory._named import Named
from sfpo_jax.memory._recompute_graph import Graph, cost, make_graph
from sfpo_jax.units import format_bytes

# "full", "none" or names.
Way = str | tuple[str, ...]
# By stack: (layers, way), from the first layer on.
Runs = tuple[tuple[str, tuple[tuple[int, Way], ...]], ...]

_WORDS = {"full": ("nothing",), "none": ("all that autodiff asks for",)}
_GAP = 1e-6
_NAMES = 10  # so many are tried in all combinations


class Option(NamedTuple):
    """One way to treat a layer.

    Attributes:
      way: what it keeps.
      bytes: that it keeps beside its inputs.
      flops: that run again.
      operations: these, and one for every entry that is made again.
    """

    way: Way
    bytes: int
    flops: int
    operations: int


class Stack(NamedTuple):
    """Layers that are alike.

    Attributes:
      depth: how many.
      options: those that no other beats in bytes and operations, the smallest first.
      bytes: of each name, in one layer.
      at_once: bytes that autodiff asks for in one layer for one microbatch: what is
        there while a layer is made again.
    """

    depth: int
    options: tuple[Option, ...]
    bytes: dict[str, int]
    at_once: int

    def measured(self, share: float) -> "Stack":
        """The same, where so much of what autodiff asks for is really kept."""
        options = [
            option._replace(bytes=round(share * option.bytes))
            if option.way == "none"
            else option
            for option in self.options
        ]
        return self._replace(
            options=_best(options), at_once=round(share * self.at_once)
        )


def make_stack(
    named: Named,
    is_input: Sequence[bool],
    is_output: Sequence[bool],
    depth: int,
    microbatches: int,
) -> Stack:
    """The ways to treat a block.

    Args:
      named: the block, on one microbatch.
      is_input: which of its inputs it is differentiated by.
      is_output: which of its outputs are differentiated.
      depth: layers.
      microbatches: for each of which a layer keeps its values.

    Raises:
      ValueError: more names than can be tried.
    """
    graph = make_graph(named._replace(cuts=()), is_input, is_output)
    kinds: dict[str, int] = {}
    for value in graph.values:
        kind = value.name.rpartition("/")[0]
        kinds[kind] = kinds.get(kind, 0) + value.bytes * microbatches
    if len(kinds) > _NAMES:
        raise ValueError(
            f"`block` must name at most {_NAMES} kinds of values for a plan, got "
            f"{len(kinds)}: {', '.join(kinds)}."
        )
    options = [Option("none", graph.residual[0] * microbatches, 0, 0)]
    for count in range(len(kinds) + 1):
        for chosen in itertools.combinations(kinds, count):
            options.append(_option(graph, chosen, kinds, microbatches))
    return Stack(depth, _best(options), kinds, graph.residual[0])


def _option(
    graph: Graph, chosen: tuple[str, ...], kinds: Mapping[str, int], microbatches: int
) -> Option:
    saved = frozenset(
        v.name for v in graph.values if v.name.rpartition("/")[0] in chosen
    )
    flops, operations = cost(graph, saved, first=len(graph.residual))
    return Option(
        chosen or "full",
        sum(kinds[kind] for kind in chosen),
        flops * microbatches,
        operations * microbatches,
    )


def _best(options: list[Option]) -> tuple[Option, ...]:
    """Those that cost less than all that are smaller."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (o.bytes, o.operations)):
        if not kept or option.operations < kept[-1].operations:
            kept.append(option)
    return tuple(kept)


class Base(NamedTuple):
    """Bytes beside what layers keep, by how the last layers are treated.

    The backward pass begins there, with all of the others kept: how much it makes again
    then depends on what they keep, and on whether it is one layer, which needs no loop,
    by rules that XLA alone knows.

    Attributes:
      known: from what was compiled, by way and whether it is one layer.
      other: for ways not known, all of which make something again: from the last of
        such that was compiled.
    """

    known: Mapping[tuple[Way, bool], float]
    other: float

    def where(self, top: tuple[Way, bool]) -> float:
        """For one way to treat the last layers."""
        way, is_one = top
        return self.known.get(top, self.known.get((way, not is_one), self.other))


class Stacks:
    """The stacks of a model, as the search sees them; see `Chain`."""

    margin = 0.01

    def __init__(self, stacks: Mapping[str, Stack]) -> None:
        self.stacks = dict(stacks)
        self.nothing: Runs = tuple(
            (name, ((stack.depth, "none"),)) for name, stack in self.stacks.items()
        )

    @property
    def candidates(self) -> dict[str, int]:
        """Bytes of each value in one layer."""
        return {
            f"{stack}/{kind}": size
            for stack, made in self.stacks.items()
            for kind, size in made.bytes.items()
        }

    def calibrate(self, held: float, temporary: float) -> Base:
        """What is there beside what layers keep, and what they keep if they keep all.

        XLA never keeps more than autodiff asks for; what it merges is spread evenly.
        """
        asked = self._sum(self.nothing, "bytes")
        share = min(1.0, temporary / max(asked, 1))
        self.stacks = {n: stack.measured(share) for n, stack in self.stacks.items()}
        rest = held + temporary - share * asked
        at_once = max(stack.at_once for stack in self.stacks.values())
        return Base({self._top(self.nothing): rest}, rest + at_once)

    def shift(self, base: Base, by: float, runs: Runs) -> Base:
        """`base`, so much more of it taken where the last layer is treated as here."""
        top = self._top(runs)
        found = base.where(top) + by
        return Base(
            {**base.known, top: found}, base.other if top[0] == "none" else found
        )

    def predict(self, runs: Runs, base: Base) -> float:
        """Bytes of a device."""
        return base.where(self._top(runs)) + self._sum(runs, "bytes")

    def _top(self, runs: Runs) -> tuple[Way, bool]:
        layers, way = runs[-1][1][-1]
        return way, layers == 1

    def flops(self, runs: Runs) -> int:
        """FLOPs that run again."""
        return self._sum(runs, "flops")

    def _sum(self, runs: Runs, field: str) -> int:
        total = 0
        for name, own in runs:
            by_way = {o.way: getattr(o, field) for o in self.stacks[name].options}
            total += sum(layers * by_way[way] for layers, way in own)
        return total

    def solve(self, base: Base, budget: float | None) -> tuple[Runs, float] | None:
        """(how layers are treated, bytes); arguments as those of `Chain.solve`."""
        if budget is None:
            runs = tuple(
                (name, ((stack.depth, stack.options[0].way),))
                for name, stack in self.stacks.items()
            )
            return runs, self.predict(runs, base)
        found = []
        last = list(self.stacks.values())[-1]
        for top, is_one in itertools.product(last.options, (False, True)):
            free = budget - base.where((top.way, is_one))
            counts = self._counts(free, top, is_one)
            if counts is not None:
                runs = tuple((name, _runs(counts[name])) for name in self.stacks)
                cost = self._sum(runs, "operations"), self._sum(runs, "bytes")
                found.append((*cost, runs))
        if not found:
            return None
        runs = min(found, key=lambda one: one[:2])[-1]
        return runs, self.predict(runs, base)

    def _counts(
        self, free: float, top: Option, is_one: bool
    ) -> dict[str, list[tuple[int, Option]]] | None:
        """Layers of each option, none of the last stack keeping more than its last."""
        options = [(n, o) for n, s in self.stacks.items() for o in s.options]
        last = list(self.stacks)[-1]
        unit = max(max(o.bytes for _, o in options), 1)
        most = max(max(o.operations for _, o in options), 1)
        linear = Linear()
        for name, option in options:
            is_larger = name == last and option.bytes > top.bytes
            place = linear.variable(
                cost=option.operations / most,
                most=0 if is_larger else self.stacks[name].depth,
                is_integer=True,
            )
            if name == last and option is top:
                count = (1, 1) if is_one else (2, self.stacks[last].depth)
                linear.row([(1.0, place)], *count)
        for name, stack in self.stacks.items():
            own = [(1.0, place) for place, (n, _) in enumerate(options) if n == name]
            linear.row(own, stack.depth, stack.depth)
        sizes = [(-o.bytes / unit, place) for place, (_, o) in enumerate(options)]
        linear.row(sizes, -free / unit)
        found = linear.solve(_GAP)
        if found is None:
            return None
        counts: dict[str, list[tuple[int, Option]]] = {n: [] for n in self.stacks}
        for (name, option), count in zip(options, found, strict=True):
            if round(count):
                counts[name].append((round(count), option))
        return counts

    def keep(self, runs: Runs) -> Any:
        """What a step's `recompute` takes."""
        # A model of one stack has no name for it.
        return runs[0][1] if len(runs) == 1 else dict(runs)

    def describe(self, runs: Runs) -> list[str]:
        """Rows of a table: what each layer keeps."""
        rows = [f"{'':<20}{'bytes of each':>14}   kept beside their inputs"]
        for name, own in runs:
            sizes = {option.way: option.bytes for option in self.stacks[name].options}
            start = 0
            for layers, way in own:
                kept = way if isinstance(way, tuple) else _WORDS[way]
                where = f"{name or 'layers'} {start}-{start + layers - 1}"
                size = format_bytes(sizes[way], digits=3)
                rows.append(f"{where:<20}{size:>14}   {', '.join(kept)}")
                start += layers
        return rows


def _runs(counts: list[tuple[int, Option]]) -> tuple[tuple[int, Way], ...]:
    """The layers that keep least come first: what the others keep is freed first."""
    ordered = sorted(counts, key=lambda pair: pair[1].bytes)
    return tuple((count, option.way) for count, option in ordered)
