"""Whole plans: compiled answers within the budget, and what happens without one."""

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import sfpo_jax as sfpo
from sfpo_jax.memory import BudgetError
from tests.memory import recompute_models as models
from tests.memory.programs import needs_gpu_compiler

MB = 10**6
CPU: Any = {"compiler": "cpu"}
ROWS = 2 * models.ROWS
# Bytes of a layer's values, and FLOPs where they are made again.
HIDDEN, BLOCK = 4 * ROWS * 128, 4 * ROWS * models.WIDTH
PRODUCT = 2 * ROWS * models.WIDTH * 128


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Measurements, so that each program is compiled once."""
    return tmp_path_factory.mktemp("cache") / "sfpo_jax" / "plans"


@pytest.fixture(scope="module")
def middle(folder: Path) -> sfpo.RecomputePlan:
    step, *args = models.layered_step()
    return sfpo.plan_recompute(step, *args, budget="13.5MB", cache=folder, **CPU)


def test_a_layered_step_takes_the_best_way_for_each_layer(
    middle: sfpo.RecomputePlan,
) -> None:
    assert middle.total_bytes <= 13.5 * MB < middle.baseline.total_bytes
    assert middle.compilations <= 4
    assert middle.predicted_bytes == pytest.approx(middle.total_bytes, rel=0.1)
    assert sum(layers for layers, _ in middle.keep) == models.DEPTH
    # hidden, turn, both or neither; "block" is kept as the next layer's input anyway.
    flops: dict[Any, int] = {"full": 2, ("hidden",): 1, ("turn",): 1}
    flops |= {("hidden", "turn"): 0, "none": 0}
    sizes = {"full": 0.0, ("hidden",): HIDDEN, ("turn",): BLOCK}
    sizes["hidden", "turn"] = HIDDEN + BLOCK
    # XLA keeps less than autodiff asks for.
    sizes["none"] = middle.baseline.temporary_bytes / models.DEPTH

    def used(ways: Any) -> float:
        return sum(sizes[way] for way in ways)

    def again(ways: Any) -> int:
        return sum(flops[way] for way in ways)

    chosen = [way for n, way in middle.keep for _ in range(n)]
    room = used(chosen) + 13.5 * MB - middle.total_bytes
    # What is there beside the kept values depends on the last layer.
    under = [way for way in flops if sizes[way] <= sizes[chosen[-1]]]
    others = itertools.combinations_with_replacement(under, models.DEPTH - 1)
    every = [(*ways, chosen[-1]) for ways in others]
    best = min(again(ways) for ways in every if used(ways) <= room)
    assert best > 0
    assert middle.extra_flops == again(chosen) * PRODUCT
    assert again(chosen) <= 1.03 * best


def test_the_plan_in_words_and_in_json(middle: sfpo.RecomputePlan) -> None:
    text = str(middle)
    assert f"{middle.extra_share:+.1%} FLOPs" in text and "of 13.5 MB" in text
    assert max(len(line) for line in text.splitlines()) <= 80
    kept = middle.to_dict()
    assert kept["total_bytes"] == middle.total_bytes and kept["keep"] == middle.keep


def test_the_curve_costs_less_the_more_memory_there_is(
    middle: sfpo.RecomputePlan,
) -> None:
    curve = middle.curve(4)
    assert [p.bytes for p in curve] == sorted(p.bytes for p in curve)
    flops = [point.flops for point in curve]
    assert flops == sorted(flops, reverse=True) and flops[0] > flops[-1]
    assert flops[-1] == middle.baseline.flops
    assert curve[-1].bytes == middle.baseline.total_bytes


def test_where_all_fits_all_is_kept(folder: Path) -> None:
    step, *args = models.layered_step()
    plan = sfpo.plan_recompute(step, *args, budget="1GB", cache=folder, **CPU)
    assert plan.extra_flops == 0 and plan.compilations == 1
    assert plan.plan == plan.baseline


def test_a_budget_that_nothing_meets_is_told_the_smallest(folder: Path) -> None:
    step, *args = models.layered_step()
    with pytest.raises(BudgetError, match="`budget` of 1 MB cannot be met") as caught:
        sfpo.plan_recompute(step, *args, budget="1MB", cache=folder, **CPU)
    smallest = caught.value.smallest
    assert f"smallest reachable is {smallest.total_bytes / 1e6:.3g} MB" in str(
        caught.value
    )
    full = sfpo.plan(step.with_recompute("full"), *args, cache=folder, **CPU)
    assert smallest.total_bytes == full.total_bytes


def test_auto_plans_when_the_first_batch_comes(
    middle: sfpo.RecomputePlan, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parents[1]))
    made: Any = models.layered_step(recompute="auto", budget="13.5MB")
    step, state, batch = made
    traced = step.trace(state, batch)
    plan = step.recompute_plan
    assert plan.keep == middle.keep and plan.total_bytes == middle.total_bytes
    # What runs is what was planned.
    planned = middle.apply(models.layered_step()[0]).trace(state, batch)
    assert str(traced.jaxpr) == str(planned.jaxpr)
    assert str(traced.jaxpr) != str(models.layered_step()[0].trace(state, batch).jaxpr)


@needs_gpu_compiler
@pytest.mark.slow
def test_a_plain_step_keeps_values_of_its_own_in_each_layer(folder: Path) -> None:
    plan = sfpo.plan_recompute(
        models.plain_build, mesh_shape={"data": 1}, budget="55MB", cache=folder
    )
    assert plan.plan.compiler == "gpu"
    assert plan.total_bytes <= 55 * MB < 0.6 * plan.baseline.total_bytes
    assert plan.compilations <= 4
    assert plan.predicted_bytes == pytest.approx(plan.total_bytes, rel=0.1)
    blocks = {name for name in plan.keep if name.startswith("block")}
    hidden = {name for name in plan.keep if name.startswith(("hidden", "turn"))}
    assert blocks and 0 < len(hidden) < 2 * models.DEPTH
    assert 0 < plan.extra_share < 0.25


def unnamed(params: Any, x: Any) -> Any:
    return jnp.sum((x @ params) ** 2)


def plain_step(loss_fn: Any = unnamed, **options: Any) -> Any:
    return sfpo.make_train_step(loss_fn, optax.sgd(0.1), sfpo.make_mesh(), **options)


@pytest.mark.parametrize(
    ("run", "error", "said"),
    [
        (lambda s, *a: sfpo.plan_recompute(s, *a, budget="40"), ValueError, "no unit"),
        (
            lambda s, *a: sfpo.plan_recompute(s, *a, budget="1GB", **CPU),
            ValueError,
            "`step` has no named values to choose from: name what each block returns",
        ),
        (
            lambda s, *a: sfpo.plan_recompute(
                jax.jit(unnamed), *a, budget="1GB", **CPU
            ),
            TypeError,
            r"`step` must have .with_recompute\(names\)",
        ),
        (lambda *a: plain_step(recompute="auto"), ValueError, "`budget` is missing"),
        (lambda *a: plain_step(budget="1GB"), ValueError, "`budget` goes with recom"),
        (lambda *a: plain_step(recompute="full"), ValueError, "a sequence of names"),
        (
            lambda *a: plain_step(recompute="auto", budget="1"),
            ValueError,
            "`budget` has no unit",
        ),
        (
            lambda s, *a: s.with_recompute(("block",)).trace(*a),
            ValueError,
            "'block', which no value is called",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(run: Any, error: Any, said: str) -> None:
    step = plain_step()
    state = step.init_shapes(jax.ShapeDtypeStruct((8, 8), jnp.float32))
    with pytest.raises(error, match=said) as caught:
        run(step, state, jax.ShapeDtypeStruct((16, 8), jnp.float32))
    assert "\n" not in str(caught.value)


def test_runs_that_are_not_of_the_stack_are_refused() -> None:
    with pytest.raises(ValueError, match="about 3 layers, the stack has 5"):
        models.layered_step(recompute=((2, "full"), (1, "none")))
