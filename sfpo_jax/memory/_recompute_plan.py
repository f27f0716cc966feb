"""The answer of the recompute planner, and its table."""

import dataclasses
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
      bytes: of a device, predicted; measured where it was compiled.
      flops: of a device in a step.
      save: the names.
    """

    bytes: int
    flops: int
    save: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class RecomputePlan:
    """Which named values the backward pass keeps, to fit a budget.

    Attributes:
      save: names, numbered in the order of the program, in the form that the steps'
        `recompute` takes; empty: autodiff keeps what it wants, nothing runs again.
      plan: the step with these, compiled.
      baseline: the step in which nothing runs again, compiled.
      predicted_bytes: what was expected of `plan` before it was compiled.
      candidates: bytes of each value there was to choose from, by name.
      compilations: how many programs were measured, those from the cache included.
      solver_seconds: spent in the solver.
      curve: from the least memory to the least arithmetic, predicted.
    """

    save: tuple[str, ...]
    plan: Plan
    baseline: Plan
    predicted_bytes: int
    candidates: dict[str, int]
    compilations: int
    solver_seconds: float
    curve: tuple[Point, ...]

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

    def apply(self, step: Any) -> Any:
        """`step` with this choice."""
        return step.with_recompute(self.save or None)

    def by_kind(self) -> dict[str, tuple[list[int], int, int]]:
        """Name without number -> (numbers kept, how many there are, bytes kept)."""
        found: dict[str, tuple[list[int], int, int]] = {}
        for name, size in self.candidates.items():
            kind, _, number = name.rpartition("/")
            kept, count, total = found.get(kind, ([], 0, 0))
            is_kept = name in self.save
            kept = [*kept, int(number)] if is_kept else kept
            found[kind] = (kept, count + 1, total + size * is_kept)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON knows."""
        return {
            "budget_bytes": self.budget_bytes,
            "total_bytes": self.total_bytes,
            "predicted_bytes": self.predicted_bytes,
            "baseline_bytes": self.baseline.total_bytes,
            "flops": self.plan.flops,
            "baseline_flops": self.baseline.flops,
            "extra_share": self.extra_share,
            "save": list(self.save),
            "compilations": self.compilations,
            "solver_seconds": self.solver_seconds,
            "curve": [point._asdict() for point in self.curve],
        }

    def __str__(self) -> str:
        held, budget = _size(self.total_bytes), _size(self.budget_bytes)
        base = self.baseline
        lines = [
            f"{held} a device, of {budget}: {self.extra_share:+.1%} FLOPs for "
            f"{1 - self.total_bytes / base.total_bytes:.0%} less memory",
            "",
            f"{'':<24}{'bytes':>12}{'FLOPs':>12}",
            f"{'nothing computed again':<24}{_size(base.total_bytes):>12}"
            f"{base.flops or 0:>12.4g}",
            f"{'this plan':<24}{held:>12}{self.plan.flops or 0:>12.4g}",
            f"{'predicted':<24}{_size(self.predicted_bytes):>12}",
            "",
            f"{'value':<16}{'kept':>10}{'bytes':>12}   which",
        ]
        for kind, (kept, count, size) in self.by_kind().items():
            share = f"{len(kept)} of {count}"
            lines.append(
                f"{kind:<16}{share:>10}{_size(size):>12}   {ranges(kept)}".rstrip()
            )
        lines += ["", f"{'curve: bytes':<24}{'FLOPs':>12}   values kept"]
        for point in self.curve:
            lines.append(
                f"{_size(point.bytes):<24}{point.flops:>12.4g}   {len(point.save)}"
            )
        lines += [
            "",
            f"{self.compilations} compilations, {self.solver_seconds:.1f} s of solver, "
            f"compiler {self.plan.compiler}",
        ]
        return "\n".join(lines)


def ranges(numbers: list[int]) -> str:
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


def _size(size: int) -> str:
    return format_bytes(size, digits=3)
