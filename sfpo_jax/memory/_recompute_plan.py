"""The answer of the recompute planner, and its table."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from sfpo_jax.memory._plan import Plan
from sfpo_jax.units import format_bytes


class BudgetError(ValueError):
    """A budget that no choice of values meets.

    Attributes:
      smallest: the plan that takes least, of those compiled.
    """

    def __init__(self, message: str, smallest: Plan) -> None:
        super().__init__(message)
        self.smallest = smallest


class Point(NamedTuple):
    """A point of the curve of memory against arithmetic.

    Attributes:
      bytes: of a device, predicted.
      flops: of a device in a step, predicted.
      keep: what a step's `recompute` takes.
    """

    bytes: int
    flops: int
    keep: Any


@dataclasses.dataclass(frozen=True)
class RecomputePlan:
    """Which named values the backward pass keeps, to fit a budget.

    Attributes:
      keep: what a step's `recompute` takes: numbered names in the order of the program;
        for a layered step, by stack, so many layers and what these keep; None where
        nothing has to run again.
      plan: the step with this choice, compiled.
      baseline: the step in which nothing runs again, compiled.
      predicted_bytes: what was expected of `plan` before it was compiled.
      candidates: bytes of each value there was to choose from, by name.
      table: the choice in words, line by line.
      compilations: how many programs were measured, those from the cache included.
      solver_seconds: of the longest call of the solver.
      trace: (points) -> the curve; `curve` calls it.
    """

    keep: Any
    plan: Plan
    baseline: Plan
    predicted_bytes: int
    candidates: dict[str, int]
    table: tuple[str, ...]
    compilations: int
    solver_seconds: float
    trace: Callable[[int], tuple[Point, ...]] = dataclasses.field(
        repr=False, compare=False
    )

    @property
    def budget_bytes(self) -> int:
        """What it had to fit into."""
        return self.plan.budget_bytes

    @property
    def total_bytes(self) -> int:
        """What a device holds, as compiled."""
        return self.plan.total_bytes

    @property
    def extra_flops(self) -> int:
        """FLOPs of a device in a step beyond those of `baseline`."""
        return (self.plan.flops or 0) - (self.baseline.flops or 0)

    @property
    def extra_share(self) -> float:
        """The same, by the FLOPs of `baseline`."""
        return self.extra_flops / max(self.baseline.flops or 0, 1)

    def curve(self, points: int = 8) -> tuple[Point, ...]:
        """The least arithmetic for other budgets, from the least memory on, predicted.

        Args:
          points: budgets, evenly spaced up to that of `baseline`; a call of the solver
            each, nothing is compiled.
        """
        return self.trace(points)

    def apply(self, step: Any) -> Any:
        """`step` with this choice."""
        return step.with_recompute(self.keep)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the buffers, in types that JSON knows."""
        return {
            "budget_bytes": self.budget_bytes,
            "total_bytes": self.total_bytes,
            "predicted_bytes": self.predicted_bytes,
            "baseline_bytes": self.baseline.total_bytes,
            "flops": self.plan.flops,
            "baseline_flops": self.baseline.flops,
            "extra_share": self.extra_share,
            "keep": self.keep,
            "compilations": self.compilations,
            "solver_seconds": self.solver_seconds,
        }

    def __str__(self) -> str:
        held, budget = _size(self.total_bytes), _size(self.budget_bytes)
        base = self.baseline
        less = 1 - self.total_bytes / base.total_bytes
        lines = [
            f"{held} a device, of {budget}: {less:.0%} less memory for "
            f"{self.extra_share:+.1%} FLOPs",
            "",
            f"{'':<24}{'bytes':>12}{'FLOPs':>12}",
            f"{'nothing computed again':<24}{_size(base.total_bytes):>12}"
            f"{base.flops or 0:>12.4g}",
            f"{'this plan':<24}{held:>12}{self.plan.flops or 0:>12.4g}",
            f"{'predicted':<24}{_size(self.predicted_bytes):>12}",
            "",
            *self.table,
            "",
            f"{self.compilations} compilations (compiler {self.plan.compiler}), "
            f"{self.solver_seconds:.1f} s of solver",
        ]
        return "\n".join(lines)


def _size(size: int) -> str:
    return format_bytes(size, digits=3)
