"""Budgets as assertions: a test that fails before a run does."""

from collections.abc import Mapping
from typing import Any

from sfpo_jax.memory._plan import Plan
from sfpo_jax.memory._planner import plan


class DoesNotFitError(AssertionError):
    """A program larger than its budget.

    Attributes:
      plan: what was planned; the message is its table.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(str(plan))
        self.plan = plan


def assert_fits(
    step: Any,
    *args: Any,
    device: str = "a100-80gb",
    budget: str | None = None,
    mesh_shape: Mapping[str, int] | None = None,
    **options: Any,
) -> Plan:
    """Plans a program and raises unless it fits, for tests and before a run.

    Args:
      step: as in `plan`, a builder with `mesh_shape`.
      *args: as in `plan`.
      device: as in `plan`.
      budget: what a device may hold, e.g. "40GB"; None is all its memory.
      mesh_shape: as in `plan`.
      **options: `compiler` and `cache`, as in `plan`.

    Returns:
      The plan.

    Raises:
      DoesNotFitError: an AssertionError whose message is the plan, with what to try.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> step = jax.jit(lambda params: 2 * params)
      >>> shape = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
      >>> options = {"compiler": "cpu", "cache": False}
      >>> sfpo.assert_fits(step, shape, budget="9MB", **options).total_bytes
      8388608
    """
    made = plan(
        step, *args, device=device, mesh_shape=mesh_shape, budget=budget, **options
    )
    if not made.fits:
        raise DoesNotFitError(made)
    return made
