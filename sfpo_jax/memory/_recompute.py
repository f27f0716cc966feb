"""The recompute planner: from a budget to the values that are kept."""

import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sfpo_jax.memory._devices import find_device
from sfpo_jax.memory._plan import Plan
from sfpo_jax.memory._planner import budget_bytes, open_step, plan
from sfpo_jax.memory._recompute_chain import Chain
from sfpo_jax.memory._recompute_plan import BudgetError, Point, RecomputePlan
from sfpo_jax.memory._recompute_stack import Stacks
from sfpo_jax.memory._recomputed import Recorder
from sfpo_jax.units import format_bytes

Problem = Chain | Stacks
_COMPILATIONS = 4
_WORTHWHILE = 0.005  # of a step's FLOPs: what another compilation should save


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
    of the program. The choice is the optimum of an integer program over their
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
      The plan: ``print`` it; ``plan.keep`` is what a step's `recompute` takes, and
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
      ...     step, state, x, budget="1GB", compiler="cpu", cache=False
      ... )
      >>> made.keep, made.extra_flops, made.candidates["layer/5"]  # all of it fits
      (None, 0, 2097152)
    """
    card = find_device(device)
    limit = budget_bytes(card, budget)
    problem = _record(*open_step(step, args, card, mesh_shape, compiler))

    def compile(choice: Any) -> Plan:
        keep = problem.keep(choice)

        def build(mesh: Any) -> Any:
            made, *its_args = step(mesh)
            return made.with_recompute(keep), *its_args

        return plan(
            step.with_recompute(keep) if mesh_shape is None else build,
            *args,
            device=device,
            mesh_shape=mesh_shape,
            budget=budget,
            compiler=compiler,
            cache=cache,
        )

    return _Search(problem, limit, compile).run()


def _record(step: Any, args: Any) -> Problem:
    if not hasattr(step, "with_recompute"):
        raise TypeError(
            f"`step` must have .with_recompute(names), got {step!r}: pass a step of "
            "make_train_step or make_layered_train_step."
        )
    recorder = Recorder()
    probe = step.with_recompute(recorder)
    getattr(probe, "trace", probe.lower)(*args)
    problem = Stacks(recorder.stacks) if recorder.stacks else None
    if recorder.graph is not None:
        problem = Chain(recorder.graph)
    if problem is None or not problem.candidates:
        raise ValueError(
            "`step` has no named values to choose from: name what each block returns, "
            "and what is costly inside, by jax.ad_checkpoint.checkpoint_name(x, name)."
        )
    return problem


class _Search:
    """Solves, compiles, corrects."""

    def __init__(
        self, problem: Problem, limit: int, compile: Callable[[Any], Plan]
    ) -> None:
        self._problem: Any = problem
        self._limit, self._compile = limit, compile
        self._seconds = 0.0
        # choice -> (bytes predicted, the plan)
        self._plans: dict[Any, tuple[float, Plan]] = {}

    def run(self) -> RecomputePlan:
        problem, best = self._problem, self._problem.nothing
        baseline = self._measure(best, 0.0)
        held = baseline.total_bytes - baseline.temporary_bytes
        memory = problem.calibrate(held, baseline.temporary_bytes)
        while not (baseline.fits or len(self._plans) >= _COMPILATIONS):
            margin = problem.margin if len(self._plans) == 1 else 0.0
            answer = self._solve(memory, (1 - margin) * self._limit)
            is_last = len(self._plans) == _COMPILATIONS - 1
            is_stuck = answer is not None and answer[0] in self._plans
            if (is_last or is_stuck) and not self._plans[best][1].fits:
                answer = None  # whether anything fits is worth more than a guess
            choice, predicted = answer or self._solve(memory, None)
            if choice in self._plans or not self._is_better(choice, best):
                break
            made = self._measure(choice, predicted)
            memory = problem.shift(memory, made.total_bytes - predicted, choice)
            if made.fits:
                best = choice
        if not self._plans[best][1].fits:
            self._give_up()
        predicted, made = self._plans[best]
        return RecomputePlan(
            keep=problem.keep(best),
            plan=made,
            baseline=baseline,
            predicted_bytes=round(predicted) or made.total_bytes,
            candidates=problem.candidates,
            table=tuple(problem.describe(best)),
            compilations=len(self._plans),
            solver_seconds=self._seconds,
            trace=functools.partial(self._curve, memory, best),
        )

    def _is_better(self, choice: Any, best: Any) -> bool:
        """Whether another plan is worth a compilation."""
        made = self._plans[best][1]
        if not made.fits or not made.flops:
            return True
        gain = self._problem.flops(best) - self._problem.flops(choice)
        return gain > _WORTHWHILE * made.flops

    def _measure(self, choice: Any, predicted: float) -> Plan:
        made = self._compile(choice)
        self._plans[choice] = predicted, made
        return made

    def _solve(self, memory: Any, budget: float | None) -> Any:
        began = time.perf_counter()
        answer = self._problem.solve(memory, budget)
        self._seconds = max(self._seconds, time.perf_counter() - began)
        return answer

    def _give_up(self) -> None:
        plans = [made for _, made in self._plans.values()]
        smallest = min(plans, key=lambda made: made.total_bytes)
        raise BudgetError(
            f"`budget` of {format_bytes(self._limit, digits=3)} cannot be met by "
            f"computing again: the smallest reachable is "
            f"{format_bytes(smallest.total_bytes, digits=3)}; lower the batch size, "
            "shard states or weights, or name more values.",
            smallest,
        )

    def _curve(self, memory: Any, best: Any, count: int) -> tuple[Point, ...]:
        """Predicted, by budgets from the least memory to nothing computed again."""
        problem, nothing = self._problem, self._problem.nothing
        baseline, made = self._plans[nothing][1], self._plans[best][1]
        flops, again = baseline.flops or 0, problem.flops(best)
        # Microbatches, and a second backward pass, run it more often than it is told.
        times = ((made.flops or 0) - flops) / again if again else 1.0
        low, high = self._solve(memory, None)[1], float(baseline.total_bytes)
        points = {nothing: Point(baseline.total_bytes, flops, problem.keep(nothing))}
        for part in range(count):
            answer = self._solve(memory, low + (high - low) * part / count + 1.0)
            if answer is None or answer[0] in points:
                continue
            choice, size = answer
            total = flops + round(times * problem.flops(choice))
            points[choice] = Point(round(size), total, problem.keep(choice))
        return tuple(sorted(points.values(), key=lambda point: point.bytes))
