"""Stages of a layer's update, spread over turns of a loop."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sfpo_jax as sfpo
from sfpo_jax.parallel._pipeline import Pipeline, Stage

LAYERS = 5


def run(names: str, depth: int) -> tuple[list[str], dict[int, str], int]:
    """(what ran in each turn, what each layer went through, turns behind).

    Stages in capitals send something.
    """
    log: list[str] = []

    def stage(name: str) -> Stage:
        def work(index: Any, value: str, layer: str) -> tuple[str, str]:
            log[-1] += f"{name}{int(index)} "
            return value + name, layer + name

        return Stage(work, name.isupper())

    pipeline = Pipeline(
        [stage(name) for name in names],
        lambda began, now, index: began.get(int(index), ""),
        lambda carry, index, old, new: {**carry, int(index): new},
        depth,
    )
    carry: dict[int, str] = {}
    waiting: tuple[Any, ...] = ()
    for turn, index in enumerate(reversed(range(LAYERS))):
        log.append("")
        waiting, carry = pipeline.advance(jnp.int32(index), waiting, carry)
        waiting, carry = pipeline.enter(jnp.int32(index), "", waiting, carry)
        assert len(waiting) == min(turn + 1, pipeline.turns)
    log.append("")
    return log, pipeline.finish(waiting, carry), pipeline.turns


@pytest.mark.parametrize("names", ["RSTK", "rSTk", "RsTk", "rstk", "RSTk"])
@pytest.mark.parametrize("depth", [0, 1, 2, 4, 9])
def test_every_layer_goes_through_all_stages_in_order(names: str, depth: int) -> None:
    log, carry, turns = run(names, depth)
    assert carry == dict.fromkeys(range(LAYERS), names)
    assert turns == min(depth, sum(name.isupper() for name in names))
    # Each once for each layer, and for one layer in the order of the stages.
    ran = " ".join(log).split()
    assert len(ran) == len(set(ran)) == LAYERS * len(names)
    assert all(
        ran.index(f"{a}3") < ran.index(f"{b}3") for a, b in itertools.pairwise(names)
    )


def test_transfers_of_one_layer_get_turns_of_their_own() -> None:
    log, _, _ = run("RSTk", 3)
    # Layer 4 is reduced under layer 3, sent under 2, received under 1.
    assert [turn.split() for turn in log[:4]] == [
        [],
        ["R4"],
        ["S4", "R3"],
        ["T4", "k4", "S3", "R2"],
    ]
    assert "T0 k0" in log[-1]


def test_fewer_turns_than_transfers_share_them_out() -> None:
    log, _, _ = run("RSTK", 2)
    assert log[1].split() == ["R4", "S4"]
    assert log[2].split()[:2] == ["T4", "K4"]


@pytest.mark.slow
def test_any_depth_trains_alike() -> None:
    """Sharded inside nodes and one bit between them: all four stages send."""
    rng = np.random.default_rng(0)
    layers = {
        "up": rng.normal(size=(3, 32, 1024)) / 6,
        "down": rng.normal(size=(3, 1024, 32)) / 32,
    }
    params = {"outer": {"out": rng.normal(size=(32, 1))}, "layers": layers}
    batch = {"x": rng.normal(size=(16, 32)), "y": rng.normal(size=(16, 1))}

    def block(layer: Any, x: Any, key: Any) -> Any:
        del key
        return x + jnp.tanh(x @ layer["up"]) @ layer["down"]

    def loss(outer: Any, x: Any, batch: Any, key: Any) -> Any:
        del key
        return jnp.mean((x @ outer["out"] - batch["y"]) ** 2)

    model = sfpo.LayeredModel(lambda outer, batch, key: batch["x"], block, loss)
    reached = []
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for depth in (0, 4):
            tx = sfpo.onebit_adam(1e-3, warmup_steps=2, axis_name="node")
            step = sfpo.make_layered_train_step(
                model,
                tx,
                sfpo.make_mesh(node=2),
                shard="states",
                pipeline_depth=depth,
            )
            state = step.init(params)
            for _ in range(5):
                state, _ = step(state, batch)
            reached.append(state)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), *reached
    )


def test_a_negative_depth_is_refused() -> None:
    model = sfpo.LayeredModel(lambda *_: 0, lambda *_: 0, lambda *_: 0)
    with pytest.raises(
        ValueError, match=r"`pipeline_depth` must be at least 0, got -1"
    ):
        sfpo.make_layered_train_step(
            model, sfpo.adamw8bit(1e-3), sfpo.make_mesh(), pipeline_depth=-1
        )
