"""Each fault planted in a small step is found, with its bytes and its line."""

from typing import Any

import jax
import pytest

import sfpo_jax as sfpo
from sfpo_jax.auditing import Finding
from tests.auditing import steps
from tests.auditing.steps import (
    BATCH,
    BFLOAT16,
    DEPTH,
    ENTRIES,
    GRADS,
    INT8,
    STACK,
    WIDTH,
    X,
    line_of,
)
from tests.memory.programs import needs_gpu_compiler

A100 = {"device": "a100-80gb"}


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


def test_what_is_no_state_need_not_come_back_as_it_was() -> None:
    params = {"w": GRADS, "b": BFLOAT16["mu"]}
    report = sfpo.audit(jax.jit(lambda params, x: x @ params["w"]), params, GRADS)
    assert report.ok, str(report)


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


@needs_gpu_compiler
def test_a_loop_that_copies_the_whole_stack() -> None:
    step = jax.jit(steps.releases, donate_argnums=0)
    assert audit(step, STACK, X, **A100) == {}
    found = audit(jax.jit(steps.skips, donate_argnums=0), STACK, X, **A100)
    assert list(found) == ["copy"]
    assert found["copy"].bytes % (4 * DEPTH * ENTRIES) == 0
    assert found["copy"].source == line_of(steps.skips, "# the loop")
    assert f"copied in each of {DEPTH} turns" in found["copy"].message
    # Without donation the loop cannot write where the parameters lie.
    found = audit(jax.jit(steps.releases), STACK, X, **A100)
    assert sorted(found) == ["copy", "donation"]
    assert found["copy"].bytes == 4 * DEPTH * ENTRIES
    assert found["copy"].source == line_of(steps.releases, "# the loop")
    assert "copied once" in found["copy"].message


def test_the_cpu_compiler_is_not_asked_for_copies_and_the_report_says_so() -> None:
    report = sfpo.audit(jax.jit(steps.skips, donate_argnums=0), STACK, X)
    assert report.ok
    assert "copies were not looked for" in report.notes[0]


def test_a_gradient_kept_whole() -> None:
    step = jax.jit(steps.descends, donate_argnums=0)
    assert audit(step, STACK, X) == {}
    found = audit(step, STACK, X, releases_gradients=True)
    assert list(found) == ["gradients"]
    assert found["gradients"].bytes == 4 * DEPTH * ENTRIES
    assert found["gradients"].source == line_of(steps.mean_loss, "# loop")


@needs_gpu_compiler
def test_values_that_never_leave_the_device() -> None:
    found = audit(jax.jit(steps.there_and_back), X, **A100)
    assert list(found) == ["offload"]
    assert found["offload"].bytes == 4 * BATCH * WIDTH
    assert found["offload"].source == line_of(steps.there_and_back, "# away")
    assert audit(steps.offloads("input"), STACK, X, **A100) == {}


def test_a_policy_that_names_no_value() -> None:
    found = audit(steps.offloads("inputs"), STACK, X)
    assert list(found) == ["offload"]
    assert "'inputs' is to be offloaded, and no value" in found["offload"].message
    assert found["offload"].remedy == "jax.ad_checkpoint.checkpoint_name(x, 'inputs')"
    report = sfpo.audit(steps.offloads("input"), STACK, X)
    assert report.ok and "put into the host's memory were not" in report.notes[1]


def test_state_that_does_not_go_back_to_the_host() -> None:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    host = device.with_memory_kind("pinned_host")
    state = {"mu": jax.ShapeDtypeStruct(GRADS.shape, GRADS.dtype, sharding=host)}
    found = audit(jax.jit(steps.scales, donate_argnums=0), state)
    assert found["offload"].bytes == 4 * ENTRIES
    assert found["offload"].source == line_of(steps.scales, "# scaled")
    kept = jax.jit(steps.scales, donate_argnums=0, out_shardings={"mu": host})
    assert audit(kept, state) == {}


@pytest.mark.parametrize(
    "options", [{}, pytest.param(A100, marks=needs_gpu_compiler)], ids=["cpu", "a100"]
)
def test_a_gradient_averaged_before_it_is_compressed(options: dict[str, Any]) -> None:
    build = steps.build_dense_before_signs
    found = audit(build, mesh_shape={"data": 2}, **options)
    assert list(found) == ["reduction"]
    # Over two ranks an all-reduce sends what it reduces.
    assert found["reduction"].bytes == 4 * DEPTH * ENTRIES
    assert found["reduction"].source == line_of(build, "# dense")
    assert "all-reduce of gradients in f32 over 'data'" in found["reduction"].message


def test_signs_in_a_jit_that_shards_by_itself_come_after_a_dense_reduction() -> None:
    found = audit(steps.build_signs_without_axis, mesh_shape={"data": 2})
    assert list(found) == ["reduction"]
    assert found["reduction"].bytes == 4 * DEPTH * ENTRIES


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
        (
            steps.build_keeps,
            {"mesh_shape": {"data": 1}, "compressed_axes": ["date"]},
            r"has \['date'\], no axis of the mesh: it has node, data, op",
        ),
        (lambda x: x, {"device": "a100"}, "`device` is unknown, got 'a100'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    step: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        sfpo.audit(step, **options)
    assert "\n" not in str(caught.value)
