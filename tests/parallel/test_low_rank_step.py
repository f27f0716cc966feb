"""Both training steps with factors of low rank, against NumPy and by what they send."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sfpo_jax as sfpo
from tests.oracle_low_rank import LowRankMean
from tests.ranks import assert_alike, compiled_programs

INPUTS, OUTPUTS, ROWS, RATE = 24, 30, 16, 0.05


def batch_of(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        "x": rng.normal(size=(ROWS, INPUTS)),
        "y": rng.normal(size=(ROWS, OUTPUTS)),
    }


def start() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(100)
    return {"b": rng.normal(size=OUTPUTS), "w": rng.normal(size=(INPUTS, OUTPUTS))}


def loss_fn(params: Any, batch: Any) -> Any:
    error = batch["x"] @ params["w"] + params["b"][None] - batch["y"]
    return jnp.mean(jnp.sum(error**2, axis=1))


def by_hand(params: Any, batch: Any, rank: int, ranks: int) -> list[np.ndarray]:
    """One rank's gradient with respect to b and w."""
    size = ROWS // ranks
    x, y = (batch[k][rank * size : (rank + 1) * size] for k in "xy")
    error = x @ params[1] + params[0] - y
    return [2 * error.sum(axis=0) / size, 2 * x.T @ error / size]


def run(tx: Any, steps: int, **options: Any) -> tuple[Any, Any]:
    step = sfpo.make_train_step(loss_fn, tx, sfpo.make_mesh(node=2), **options)
    state = step.init(start())
    for i in range(steps):
        state, _ = step(state, batch_of(i))
    assert compiled_programs(step._jitted) == 1
    return step, state


@pytest.mark.parametrize(
    ("axis", "workers"),
    [(("node", "data"), 8), ("node", 2)],
    ids=["two axes", "exact inside a node"],
)
def test_it_follows_the_equations(axis: Any, workers: int) -> None:
    with jax.enable_x64(True):
        tx = optax.chain(sfpo.low_rank_mean(2, axis), optax.sgd(RATE))
        first: Any = jax.jit(sfpo.low_rank_mean(2, None).init)(start())
        oracle = LowRankMean([None, 1], [None, np.asarray(first.basis["w"])], workers)
        step, state = run(tx, 4)
        expected = list(start().values())
        for i in range(4):
            grads = [by_hand(expected, batch_of(i), r, workers) for r in range(workers)]
            means = oracle(grads)
            expected = [p - RATE * m for p, m in zip(expected, means, strict=True)]
        assert_alike((state.params, state.opt_state[0].basis))
        for found, e in zip(state.params.values(), expected, strict=True):
            np.testing.assert_allclose(found, e, rtol=0, atol=1e-9)
        errors = state.opt_state[0].worker_error.tree["w"]
        assert errors.shape == (workers, INPUTS, OUTPUTS)
        sent = step.wire_bytes(state, batch_of(0))
    share = 2 * (workers - 1) / workers
    numbers = 2 * (INPUTS + OUTPUTS) + OUTPUTS
    slow = ",".join(axis) if isinstance(axis, tuple) else axis
    # Besides, a few scalars that all ranks agree on.
    assert sent[slow] == pytest.approx(8 * share * numbers, abs=100)


def test_each_device_of_a_node_has_factors_of_its_own_shard() -> None:
    # 2,048 rows of 4,096 a device of the node.
    wide = {"w": np.zeros((4096, 64), np.float32)}

    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(16, 4096)), rng.normal(size=(4096, 64))
    batch = {"x": x.astype(np.float32), "y": (x @ w).astype(np.float32)}
    tx = optax.chain(sfpo.low_rank_mean(2, "node"), optax.sgd(0.02))
    mesh = sfpo.make_mesh(node=2, data=2, devices=jax.devices()[:4])
    step = sfpo.make_train_step(loss, tx, mesh, shard="states")
    state = step.init(wide)
    assert state.opt_state[0].basis["w"].shape == (2, 64, 2)
    assert state.opt_state[0].worker_error.tree["w"].shape == (2, 2, 2048, 64)
    losses = []
    for _ in range(8):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.9 * losses[0] and losses == sorted(losses, reverse=True)
    assert_alike(state.params)
    sent = step.wire_bytes(state, batch)["node"]
    assert sent == pytest.approx(4 * 2 * (2048 + 64), abs=100)
