"""Each fault planted in a small step is found, with its bytes and its line."""

from typing import Any

import jax
import pytest

import sfpo_jax as sfpo
from sfpo_jax.auditing import Finding
from tests.auditing import steps
from tests.auditing.steps import BFLOAT16, GRADS, INT8, WIDTH, line_of

ENTRIES = WIDTH**2


def audit(step: Any, *args: Any, **options: Any) -> dict[str, Finding]:
    report = sfpo.audit(step, *args, **options)
    assert max(len(line) for line in str(report).splitlines()) <= 80
    assert len({finding.kind for finding in report.findings}) == len(report.findings)
    return {finding.kind: finding for finding in report.findings}


def test_a_step_that_does_what_it_says_is_silent() -> None:
    step = jax.jit(steps.keeps, donate_argnums=0)
    report = sfpo.audit(step, BFLOAT16, GRADS)
    assert report.ok and not report and report.findings == ()
    assert str(report) == "no findings on cpu, compiled for cpu"


def test_state_that_is_not_donated() -> None:
    found = audit(jax.jit(steps.keeps), BFLOAT16, GRADS)
    assert list(found) == ["donation"]
    assert found["donation"].bytes == 2 * ENTRIES + 4
    assert found["donation"].source == line_of(steps.keeps, "return")
    assert "state['mu'] and 1 more: not donated" in found["donation"].message
    assert "donate_argnums" in found["donation"].remedy


def test_a_donated_array_whose_dtype_grew_is_not_reused() -> None:
    found = audit(jax.jit(steps.widens, donate_argnums=0), BFLOAT16, GRADS)
    assert sorted(found) == ["donation", "growth"]
    assert found["growth"].bytes == found["donation"].bytes == 2 * ENTRIES
    for finding in found.values():
        assert finding.source == line_of(steps.widens, "# widened")
    assert "as bfloat16 and comes back as float32" in found["growth"].message
    assert found["donation"].remedy == "return state['mu'] as bfloat16"


def test_one_byte_moments_that_come_back_as_floats() -> None:
    found = audit(jax.jit(steps.dequantizes, donate_argnums=0), INT8, GRADS)
    held = ENTRIES + 4 * INT8["mu"].scales.size
    assert found["growth"].bytes == 4 * ENTRIES - held
    assert found["growth"].source == line_of(steps.dequantizes, "# widened")
    assert "state['mu'].values and 1 beside: goes in as int8" in found["growth"].message
    assert found["donation"].bytes == held


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (lambda x: x, {}, r"`step` must have .lower\(\*args\)"),
        (
            steps.build_keeps,
            {"mesh_shape": {"data": 99}},
            "needs 99 devices, there are",
        ),
        (steps.build_keeps, {"mesh_shape": {"data": 0}}, "sizes of 1 or more"),
        (lambda mesh: mesh, {"mesh_shape": {"data": 1}}, "not a step with .lower"),
        (lambda x: x, {"device": "a100"}, "`device` is unknown, got 'a100'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    step: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        sfpo.audit(step, **options)
    assert "\n" not in str(caught.value)
