"""The recompute planner: from a budget to the values that are kept."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sfpo_jax.memory._devices import find_device
from sfpo_jax.memory._plan import Plan
from sfpo_jax.memory._planner import budget_bytes, open_step, plan
from sfpo_jax.memory._recompute_graph import Graph, cost
from sfpo_jax.memory._recompute_plan import BudgetError, Point, RecomputePlan
from sfpo_jax.memory._recompute_solver import Answer, Memory, predict, solve
from sfpo_jax.memory._recomputed import Recorder
from sfpo_jax.units import format_bytes

_COMPILATIONS = 4
_WORTHWHILE = 0.005  # of a step's FLOPs: what another compilation should save
_MARGIN = 0.015  # of the budget
_POINTS = 8


def plan_recompute(
    step: Any,
    *args: Any,
    budget: str,
    device: str = "a100-80gb",
    mesh_shape: Mapping[str, int] | None = None,
    compiler: str = "auto",
    cache: bool | str | Path = True,
) -> RecomputePlan:
    """What to keep and what to compute again, so that a step fits a budget.

    Of the values that the model names, it keeps those that save the most arithmetic
    within the budget, each layer's for itself: named values are counted in the order
    of the program. The choice is the exact optimum of a linear program over their
    bytes and the FLOPs that depend on them; the program is then compiled, and the
    prediction corrected by what it took, in at most four compilations.

    Args:
      step: from `make_train_step`, or with `mesh_shape` ``build(mesh) -> (step,
        *args)``; anything with `.lower(*args)` and ``.with_recompute(names) -> step``.
      *args: as in `plan`.
      budget: what a device may hold, a size with its unit ("40GB").
      device: as in `plan`.
      mesh_shape: as in `plan`.
      compiler: as in `plan`.
      cache: as in `plan`.

    Returns:
      The plan: ``print`` it; ``plan.save`` is what a step's `recompute` takes, and
      ``plan.apply(step)`` the step with it.

    Raises:
      BudgetError: a ValueError: no choice meets the budget; the message says what the
        smallest takes.
      ValueError: no value has a name, or what `plan` raises.
      TypeError: `step` has no `.with_recompute`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import sfpo_jax as sfpo
      >>> from jax.ad_checkpoint import checkpoint_name
      >>> def loss_fn(params, x):
      ...     for w in params:
      ...         x = checkpoint_name(jnp.tanh(x @ w), "layer")
      ...     return jnp.sum(x)
      >>> step = sfpo.make_train_step(loss_fn, optax.sgd(0.1), sfpo.make_mesh())
      >>> state = step.init_shapes([jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 6)
      >>> x = jax.ShapeDtypeStruct((65536, 64), jnp.float32)
      >>> made = sfpo.plan_recompute(
      ...     step, state, x, budget="9MB", compiler="cpu", cache=False
      ... )
      >>> made.total_bytes <= 9_000_000 < made.baseline.total_bytes
      True
    """
    card = find_device(device)
    limit = budget_bytes(card, budget)
    opened, opened_args = open_step(step, args, card, mesh_shape, compiler)
    graph = _record(opened, opened_args)

    def compile(saved: frozenset[str]) -> Plan:
        def choose(step: Any) -> Any:
            return step.with_recompute(tuple(sorted(saved, key=_order)) or None)

        def build(mesh: Any) -> Any:
            made, *its_args = step(mesh)
            return choose(made), *its_args

        return plan(
            choose(step) if mesh_shape is None else build,
            *args,
            device=device,
            mesh_shape=mesh_shape,
            budget=budget,
            compiler=compiler,
            cache=cache,
        )

    return _Search(graph, limit, compile).run()


def _record(step: Any, args: Any) -> Graph:
    if not hasattr(step, "with_recompute"):
        raise TypeError(
            f"`step` must have .with_recompute(names), got {step!r}: pass a step of "
            "make_train_step or make_layered_train_step."
        )
    recorder = Recorder()
    probe = step.with_recompute(recorder)
    getattr(probe, "trace", probe.lower)(*args)
    if recorder.graph is None or not recorder.graph.values:
        raise ValueError(
            "`step` has no named values to choose from: name what each block returns, "
            "and what is costly inside, by jax.ad_checkpoint.checkpoint_name(x, name)."
        )
    return recorder.graph


class _Search:
    """Solves, compiles, corrects."""

    def __init__(
        self, graph: Graph, limit: int, compile: Callable[[frozenset[str]], Plan]
    ) -> None:
        self._graph, self._limit, self._compile = graph, limit, compile
        self._seconds = 0.0
        self._plans: dict[frozenset[str], tuple[float, Plan]] = {}

    def run(self) -> RecomputePlan:
        none = frozenset[str]()
        baseline = self._measure(none, 0.0)
        held = baseline.total_bytes - baseline.temporary_bytes
        bare = predict(self._graph, none, Memory(0.0, 1.0))
        memory = Memory(held, baseline.temporary_bytes / max(bare, 1.0))
        best, saved = none, none
        while not self._is_done(best, saved):
            # Nothing is known yet of how far the prediction is off.
            margin = _MARGIN if len(self._plans) == 1 else 0.0
            limit = (1 - margin) * self._limit
            answer = self._solve(memory, limit) or self._solve(memory, None)
            assert answer is not None
            saved = answer.saved
            if saved in self._plans or not self._is_better(saved, best):
                break
            made = self._measure(saved, answer.peak)
            memory = memory._replace(base=memory.base + made.total_bytes - answer.peak)
            if made.fits:
                best = saved
        if not self._plans[best][1].fits:
            self._give_up(memory)
        predicted, made = self._plans[best]
        values = {value.name: value.bytes for value in self._graph.values}
        return RecomputePlan(
            save=tuple(sorted(best, key=_order)),
            plan=made,
            baseline=baseline,
            predicted_bytes=round(predicted) or made.total_bytes,
            candidates=values,
            compilations=len(self._plans),
            solver_seconds=self._seconds,
            curve=self._curve(memory, baseline),
        )

    def _is_done(self, best: frozenset[str], saved: frozenset[str]) -> bool:
        if len(self._plans) >= _COMPILATIONS:
            return True
        return not best and self._plans[best][1].fits

    def _is_better(self, saved: frozenset[str], best: frozenset[str]) -> bool:
        """Whether another plan that fits is worth a compilation."""
        baseline, made = self._plans[frozenset()][1], self._plans[best][1]
        if not made.fits or not baseline.flops:
            return True
        gain = cost(self._graph, best)[0] - cost(self._graph, saved)[0]
        return gain > _WORTHWHILE * baseline.flops

    def _measure(self, saved: frozenset[str], predicted: float) -> Plan:
        made = self._compile(saved)
        self._plans[saved] = predicted, made
        return made

    def _solve(self, memory: Memory, budget: float | None) -> Answer | None:
        began = time.perf_counter()
        answer = solve(self._graph, memory, budget)
        self._seconds += time.perf_counter() - began
        return answer

    def _give_up(self, memory: Memory) -> None:
        answer = self._solve(memory, None)
        if answer is not None and answer.saved not in self._plans:
            self._measure(answer.saved, answer.peak)
        smallest = min((p for _, p in self._plans.values()), key=lambda p: p.total_bytes)
        raise BudgetError(
            f"`budget` of {format_bytes(self._limit, digits=3)} cannot be met by "
            f"computing again: the smallest reachable is "
            f"{format_bytes(smallest.total_bytes, digits=3)}; lower the batch size, "
            "shard states or weights, or name more values.",
            smallest,
        )

    def _curve(self, memory: Memory, baseline: Plan) -> tuple[Point, ...]:
        """Predicted, by budgets from the least memory to nothing computed again."""
        flops = baseline.flops or 0
        least = self._solve(memory, None)
        points = [Point(baseline.total_bytes, flops, ())]
        if least is None:
            return tuple(points)
        low, high = least.peak, baseline.total_bytes
        for part in range(_POINTS):
            answer = self._solve(memory, low + (high - low) * part / _POINTS + 1.0)
            if answer is None or not answer.saved:
                continue
            again = cost(self._graph, answer.saved)[0]
            save = tuple(sorted(answer.saved, key=_order))
            points.append(Point(round(answer.peak), flops + again, save))
        return tuple(sorted(set(points), key=lambda point: point.bytes))


def _order(name: str) -> tuple[str, int]:
    kind, _, number = name.rpartition("/")
    return kind, int(number)
