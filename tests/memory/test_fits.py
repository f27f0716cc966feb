"""Budgets as assertions."""

import pytest

import sfpo_jax as sfpo
from sfpo_jax.memory import DoesNotFitError
from tests.memory.programs import ARGS, STEP


def test_what_fits_comes_back_as_its_plan() -> None:
    plan = sfpo.assert_fits(STEP, *ARGS, budget="1GB", compiler="cpu", cache=False)
    assert plan.fits and plan.budget_bytes == 10**9


def test_what_does_not_fit_raises_with_the_table_and_what_to_try() -> None:
    with pytest.raises(AssertionError, match="does NOT fit into 1 MB") as caught:
        sfpo.assert_fits(STEP, *ARGS, budget="1MB", compiler="cpu", cache=False)
    assert isinstance(caught.value, DoesNotFitError)
    assert "what to try" in str(caught.value)
    assert caught.value.plan.total_bytes > 10**6


def test_a_budget_needs_a_unit() -> None:
    with pytest.raises(ValueError, match="`budget` has no unit, got '40'"):
        sfpo.assert_fits(STEP, *ARGS, budget="40", compiler="cpu", cache=False)
