"""Plans of whole programs, by the CPU's compiler and, where it is, by the GPU's."""

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import sfpo_jax as sfpo
from sfpo_jax.memory import CompileError, MissingCompilerError, _compile, _planner
from sfpo_jax.memory._cache import Cache
from tests.memory import programs
from tests.memory.programs import ARGS, STEP, build, needs_gpu_compiler, plan_on_cpu

PARAMS = 4 * programs.LAYERS * programs.WIDTH**2
INPUTS = 4 * programs.BATCH * programs.WIDTH


def check(plan: sfpo.Plan) -> None:
    held = plan.argument_bytes + plan.output_bytes - plan.alias_bytes
    assert plan.total_bytes == held + plan.temporary_bytes
    assert sum(plan.ledger.values()) == plan.total_bytes
    assert min(plan.ledger.values()) >= 0
    assert max(len(line) for line in str(plan).splitlines()) <= 80


def test_a_jitted_function_on_one_device() -> None:
    plan = plan_on_cpu(STEP, *ARGS, budget="1MB")
    check(plan)
    assert plan.ledger["parameters"] == PARAMS == plan.alias_bytes
    assert plan.ledger["other arguments"] == INPUTS
    # Of each layer at least what comes in is kept for the way back.
    assert plan.ledger["activations"] >= programs.LAYERS * INPUTS
    # Forward, and back two products a layer.
    assert plan.flops == 3 * programs.LAYERS * programs.LAYER_FLOPS
    assert plan.wire_bytes == {}
    assert plan.compiler == "cpu"
    assert "compiled for a CPU" in str(plan)


def test_temporaries_name_the_line_that_made_them() -> None:
    buffers = plan_on_cpu(STEP, *ARGS).buffers
    assert list(buffers) == sorted(buffers, key=lambda b: -b.size)
    kept = next(buffer for buffer in buffers if buffer.is_activation)
    assert kept.size == programs.LAYERS * INPUTS
    assert Path(kept.origin.file).name == "programs.py"
    source = Path(kept.origin.file).read_text().splitlines()
    assert "scan" in source[kept.origin.line - 1]


def test_arrays_are_taken_for_their_shapes() -> None:
    arrays = [jnp.zeros(arg.shape, arg.dtype) for arg in ARGS]
    with_arrays, with_shapes = plan_on_cpu(STEP, *arrays), plan_on_cpu(STEP, *ARGS)
    assert with_arrays == with_shapes
    assert not arrays[0].is_deleted()


def test_an_argument_the_program_does_not_use_is_not_counted() -> None:
    def f(unused: Any, opt_state: Any) -> Any:
        del unused
        return opt_state + 1

    plan = plan_on_cpu(jax.jit(f), *ARGS)
    check(plan)
    assert plan.ledger["optimizer"] == plan.argument_bytes == INPUTS


@pytest.mark.parametrize(
    "compiler", ["cpu", pytest.param("gpu", marks=needs_gpu_compiler)]
)
def test_a_train_step_by_its_builder(compiler: str) -> None:
    plan = plan_on_cpu(build, mesh_shape={"data": 4}, compiler=compiler)
    check(plan)
    weights = 4 * programs.WIDTH**2
    assert plan.compiler == compiler
    assert plan.mesh_shape == {"node": 1, "data": 4, "op": 1}
    assert plan.ledger["parameters"] == weights
    # Two moments and some counts; a worker and a quarter of a server error.
    assert 2 * weights <= plan.ledger["optimizer"] < 2.01 * weights
    assert plan.ledger["residuals"] == weights * 5 // 4
    assert plan.flops == 5 * programs.LAYER_FLOPS // 4
    # Warm-up is the larger branch: an all-reduce of the gradient.
    assert 1.5 * weights <= plan.wire_bytes["data"] < 1.6 * weights


@needs_gpu_compiler
def test_a_jitted_function_for_a_gpu_leaves_stderr_and_environment_alone(
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = dict(os.environ)
    plan = sfpo.plan(STEP, *ARGS, device="a100-40gb", cache=False)
    assert dict(os.environ) == before
    assert capfd.readouterr() == ("", "")
    check(plan)
    assert (plan.compiler, plan.device) == ("gpu", "a100-40gb")
    assert plan.fits and plan.budget_bytes == plan.memory_bytes
    assert plan.ledger["activations"] >= programs.LAYERS * INPUTS
    assert plan.flops == 3 * programs.LAYERS * programs.LAYER_FLOPS


@needs_gpu_compiler
def test_a_step_bound_to_cpu_devices_is_planned_there_and_says_so() -> None:
    step, *args = build(sfpo.make_mesh())
    plan = sfpo.plan(step, *args, cache=False)
    assert plan.compiler == "cpu"
    assert "bound to CPU devices" in str(plan).replace("\n    ", " ")


def test_without_the_extra_the_cpu_plans_and_the_plan_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_planner, "compiler_problem", lambda: "no plugin")
    plan = sfpo.plan(STEP, *ARGS, cache=False)
    check(plan)
    assert plan.compiler == "cpu"
    assert "no plugin; pip install 'jax-cuda13-plugin==" in plan.notes[0]
    with pytest.raises(MissingCompilerError, match="no plugin; pip install"):
        sfpo.plan(STEP, *ARGS, compiler="gpu")


@pytest.mark.parametrize(
    ("step", "options", "message"),
    [
        (STEP, {"device": "a100"}, "`device` is unknown, got 'a100'"),
        (STEP, {"budget": "40"}, "`budget` has no unit"),
        (STEP, {"budget": "40000000"}, "`budget` has no unit"),
        (STEP, {"budget": "40Gb"}, "did you mean 'GB'"),
        (STEP, {"compiler": "tpu"}, "`compiler` must be one of"),
        (lambda x: x, {}, r"`step` must have .lower\(\*args\)"),
        (STEP, {"mesh_shape": {"data": 2}}, "bound to its mesh already"),
        (lambda mesh: mesh, {"mesh_shape": {"data": 2}}, "not a step with .lower"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    step: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        plan_on_cpu(step, **options)
    assert "\n" not in str(caught.value)


def test_a_step_that_cannot_be_traced_again_has_no_flops() -> None:
    class OnlyLowers:
        def lower(self, *args: Any) -> Any:
            return STEP.lower(*args)

    plan = plan_on_cpu(OnlyLowers(), *ARGS)
    assert plan.flops is None
    assert "FLOPs not counted: TypeError" in str(plan)
    check(plan)


def test_what_the_function_closes_over_is_told() -> None:
    closed_over = jnp.arange(256.0 * 256.0).reshape(256, 256)
    plan = plan_on_cpu(jax.jit(lambda x: x @ closed_over), programs.shape(4, 256))
    check(plan)
    assert "262 KB of arrays are part of the program" in str(plan)


def test_jaxs_own_cache_hides_nothing(tmp_path: Path) -> None:
    names = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0,
    }
    before = {name: getattr(jax.config, name) for name in names}
    first = plan_on_cpu(STEP, *ARGS)
    try:
        for name, value in names.items():
            jax.config.update(name, value)
        STEP.lower(*ARGS).compile()
        assert plan_on_cpu(STEP, *ARGS) == first
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_a_program_that_does_not_tile_is_compiled_without_triton() -> None:
    asked: list[dict[str, Any]] = []

    class Untileable:
        def as_text(self) -> str:
            return ""

        def compile(self, compiler_options: dict[str, Any]) -> Any:
            asked.append(compiler_options)
            if len(asked) == 1:
                os.write(2, b"a page of logs")
                raise jax.errors.JaxRuntimeError("INTERNAL: cannot tile\nmore")
            return STEP.lower(*ARGS).compile(compiler_options={})

    measured = _compile.measure(Untileable(), "cpu", {}, Cache(None))
    assert measured.without_triton and measured.argument_bytes == PARAMS + INPUTS
    assert asked[1]["xla_gpu_enable_triton_gemm"] is False

    class Broken(Untileable):
        def compile(self, compiler_options: dict[str, Any]) -> Any:
            raise jax.errors.JaxRuntimeError("INTERNAL: broken\nmore")

    with pytest.raises(CompileError, match=r"compile: INTERNAL: broken$"):
        _compile.measure(Broken(), "cpu", {}, Cache(None))


@pytest.mark.slow
def test_of_phases_that_are_loops_the_larger_is_counted() -> None:
    model = sfpo.LayeredModel(
        embed=lambda outer, batch, key: batch @ outer,
        block=lambda layer, x, key: jnp.tanh(x @ layer),
        loss=lambda outer, x, batch, key: jnp.mean(x**2),
    )
    tx = sfpo.onebit_adam(0.1, warmup_steps=2, axis_name="data")
    step = sfpo.make_layered_train_step(model, tx, sfpo.make_mesh())
    params = {"outer": programs.shape(64, 64), "layers": programs.shape(4, 64, 64)}
    args = step.init_shapes(params), programs.shape(8, 64)
    sent = plan_on_cpu(step, *args).wire_bytes
    assert sent == step.wire_bytes(*args, phase="warmup")
