"""What a step computes again, where a budget decides it."""

from typing import Any

from sfpo_jax.memory import RecomputePlan, plan_recompute
from sfpo_jax.units import parse_bytes

AUTO = "auto"


def check_budget(recompute: Any, budget: str | None) -> str | None:
    """`budget`, which goes with recompute="auto" and nothing else.

    Raises:
      ValueError: it is missing, not used, or has no unit.
    """
    if recompute == AUTO and budget is None:
        raise ValueError(
            '`budget` is missing: recompute="auto" needs what a device may hold, for '
            'example "40GB".'
        )
    if budget is not None:
        if recompute != AUTO:
            raise ValueError(f'`budget` goes with recompute="auto", got {recompute!r}.')
        parse_bytes(budget, name="budget")
    return budget


def plan_step(step: Any, state: Any, batch: Any, budget: str) -> RecomputePlan:
    """A plan for the very devices that a step is made for.

    Args:
      step: with its mesh.
      state: a state, only its shapes are read.
      batch: shapes of the whole batch.
      budget: what a device may hold.

    Raises:
      BudgetError: nothing meets the budget.
      ValueError: the model names no values.
    """
    # Measurements are kept by the card that a plan is asked for, which is not asked
    # here; of CPUs there is one kind.
    is_cpu = step.mesh.devices.flat[0].platform == "cpu"
    return plan_recompute(step, state, batch, budget=budget, cache=is_cpu)
