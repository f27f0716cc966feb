"""Plans against every way to treat six layers, each compiled for an A100.

    pytest --full tests/memory/test_recompute_exhaustive.py

takes some minutes: 84 programs, then those of the plans.
"""

import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh

import sfpo_jax as sfpo
from tests.memory.programs import needs_gpu_compiler
from tests.memory.recompute_models import MODEL, WIDTH

DEPTH, HIDDEN, ROWS = 6, 512, 8192
PRODUCT = 2 * ROWS * WIDTH * HIDDEN
# The smallest first. A layer that keeps all runs as little again as one that keeps both
# names, and takes more.
WAYS: tuple[Any, ...] = ("full", ("turn",), ("hidden",), ("hidden", "turn"))
A100: Any = {"device": "a100-80gb", "mesh_shape": {"data": 1}, "compiler": "gpu"}


def build(mesh: Mesh, recompute: Any = "none") -> Any:
    step = sfpo.make_layered_train_step(
        MODEL, optax.sgd(0.1), mesh, recompute=recompute
    )

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    layers = {"up": shape(DEPTH, WIDTH, HIDDEN), "down": shape(DEPTH, HIDDEN, WIDTH)}
    state = step.init_shapes({"outer": shape(WIDTH, WIDTH), "layers": layers})
    return step, state, shape(ROWS, WIDTH)


@pytest.mark.full
@needs_gpu_compiler
def test_no_choice_of_the_same_names_needs_less_arithmetic(tmp_path: Path) -> None:
    plans = []
    for ways in itertools.combinations_with_replacement(WAYS, DEPTH):
        runs = tuple((len(list(own)), way) for way, own in itertools.groupby(ways))
        plans.append(
            sfpo.plan(lambda mesh, runs=runs: build(mesh, runs), cache=tmp_path, **A100)
        )
    low = min(plan.total_bytes for plan in plans)
    kept = sfpo.plan(build, cache=tmp_path, **A100)
    assert kept.flops is not None and low < 0.5 * kept.total_bytes
    for part in range(1, 6):
        budget = low + round(part / 6 * (kept.total_bytes - low))
        flops = [p.flops for p in plans if p.flops and p.total_bytes <= budget]
        best = min(flops) - kept.flops
        plan = sfpo.plan_recompute(build, budget=f"{budget}B", cache=tmp_path, **A100)
        print(
            f"{budget / 1e6:.1f} MB: best {best / PRODUCT:.0f} products again, plan "
            f"{plan.extra_flops / PRODUCT:.0f} in {plan.total_bytes / 1e6:.1f} MB"
        )
        assert plan.total_bytes <= budget
        assert plan.extra_flops <= 1.03 * best, plan.keep
