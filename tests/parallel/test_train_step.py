"""The training step against the same training written down without it.

The model is linear least squares, whose gradient is one line of NumPy, in float64.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sfpo_jax as sfpo
from tests.oracle import OnebitAdam
from tests.ranks import assert_alike, compiled_programs

ROWS, INPUTS, OUTPUTS = 48, 6, 5
RATE = 0.05


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
    return jnp.mean(jnp.sum(error**2, axis=1)), {"largest": jnp.max(jnp.abs(error))}


def by_hand(params: Any, batch: Any) -> tuple[float, list[np.ndarray]]:
    """Loss, and its gradient with respect to b and w."""
    x, error = batch["x"], batch["x"] @ params[1] + params[0] - batch["y"]
    rows = len(x)
    return float(np.sum(error**2) / rows), [
        2 * error.sum(axis=0) / rows,
        2 * x.T @ error / rows,
    ]


def parts_of(batch: Any, count: int) -> list[dict[str, np.ndarray]]:
    """The batch split over `count` ranks."""
    size = ROWS // count
    return [
        {k: x[i * size : (i + 1) * size] for k, x in batch.items()}
        for i in range(count)
    ]


@pytest.mark.parametrize(
    ("sizes", "microbatches"),
    [({}, 1), ({}, 3), ({"node": 2, "data": 2, "op": 2}, 2)],
    ids=["8 ranks", "microbatches", "node, data, op"],
)
def test_sgd_is_training_on_the_whole_batch(
    sizes: dict[str, Any], microbatches: int
) -> None:
    ranks = 8 // sizes.get("op", 1)
    with jax.enable_x64(True):
        mesh = sfpo.make_mesh(**sizes)
        step = sfpo.make_train_step(
            loss_fn, optax.sgd(RATE), mesh, microbatches=microbatches
        )
        state = step.init(start())
        expected = list(start().values())
        for i in range(4):
            batch = batch_of(i)
            state, metrics = step(state, batch)
            loss, grads = by_hand(expected, batch)
            own = [by_hand(expected, part)[1] for part in parts_of(batch, ranks)]
            squares = [np.sum(g**2) for grads in own for g in grads]
            norm = np.sqrt(sum(squares) / ranks)
            np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-12)
            np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-12)
            errors = [
                np.abs(p["x"] @ expected[1] + expected[0] - p["y"]).max()
                for p in parts_of(batch, ranks * microbatches)
            ]
            np.testing.assert_allclose(metrics["largest"], np.mean(errors), rtol=1e-12)
            expected = [p - RATE * g for p, g in zip(expected, grads, strict=True)]
        assert_alike(state.params)
        for found, e in zip(state.params.values(), expected, strict=True):
            np.testing.assert_allclose(found, e, rtol=1e-12)


@pytest.mark.parametrize(
    ("node", "axis", "workers"),
    [(1, "data", 8), (2, "node", 2), (2, ("node", "data"), 8)],
    ids=["data", "exact inside a node", "both"],
)
def test_onebit_adam_follows_the_equations(node: int, axis: Any, workers: int) -> None:
    oracle = OnebitAdam(list(start().values()), workers, lambda step: RATE, 3)
    with jax.enable_x64(True):
        tx = sfpo.onebit_adam(RATE, warmup_steps=3, axis_name=axis, nu_floor=0.0)
        step = sfpo.make_train_step(loss_fn, tx, sfpo.make_mesh(node=node))
        state = step.init(start())
        for i in range(9):
            batch = batch_of(i)
            state, _ = step(state, batch)
            # The ranks of a node are neighbours, their gradients averaged exactly.
            parts = parts_of(batch, workers)
            oracle.step([by_hand(oracle.params, part)[1] for part in parts])
        assert compiled_programs(step._jitted) == 1
        assert_alike(state.params)
        adam = state.opt_state
        for found, expected in [
            (state.params, oracle.params),
            (adam.mu, oracle.m),
            (adam.nu, oracle.v),
        ]:
            for a, b in zip(found.values(), expected, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)
        for i, errors in enumerate(oracle.mean.worker):
            for a, b in zip(adam.worker_error.tree.values(), errors, strict=True):
                assert a.shape == (workers, *b.shape)
                np.testing.assert_allclose(a[i], b, atol=1e-12)


def test_sparse_gradients_of_each_rank_reach_the_chain() -> None:
    # Sparsified to the one largest entry of a rank, the mean of 8 ranks has at most 8.
    def loss(params: Any, batch: Any) -> Any:
        return jnp.mean(batch @ params)

    tx = optax.chain(
        sfpo.sparsify(1.0, min_size=0, axis_name="data"),
        sfpo.compressed_mean(sfpo.compression.identity(), "data"),
        optax.sgd(8.0),
    )
    step = sfpo.make_train_step(loss, tx, sfpo.make_mesh())
    batch = np.ones((8, 100), np.float32)
    batch[np.arange(8), 10 * np.arange(8)] = 2.0
    state, _ = step(step.init(jnp.zeros(100)), batch)
    expected = np.zeros(100)
    expected[10 * np.arange(8)] = -2.0
    np.testing.assert_array_equal(state.params, expected)


def test_half_precision_does_not_overflow_in_the_mean() -> None:
    # 9,000 is a float16 and so is the mean of eight of them; their sum is not.
    def loss(params: Any, batch: Any) -> Any:
        return jnp.sum(params * jnp.mean(batch).astype(params.dtype))

    step = sfpo.make_train_step(loss, optax.sgd(2.0**-10), sfpo.make_mesh())
    state = step.init(jnp.zeros(4, jnp.float16))
    state, metrics = step(state, np.full(8, 9000.0, np.float32))
    np.testing.assert_array_equal(state.params, np.full(4, -9000 / 1024, np.float16))
    assert float(metrics["grad_norm"]) == 18000.0


@pytest.mark.parametrize("microbatches", [1, 2])
def test_counts_and_narrow_numbers_are_averaged_like_others(microbatches: int) -> None:
    def loss(params: Any, batch: Any) -> Any:
        aux = {
            "large": jnp.sum(batch > 3),
            "any": jnp.any(batch == 15),
            "half": jnp.mean(batch).astype(jnp.bfloat16),
        }
        return jnp.sum(params["w"].astype(jnp.bfloat16)), aux

    step = sfpo.make_train_step(
        loss, optax.sgd(0.0), sfpo.make_mesh(), microbatches=microbatches
    )
    state = step.init({"w": jnp.ones(2)})
    batch = np.arange(16.0, dtype=np.float32)
    _, metrics = step(state, batch)
    parts = batch.reshape(8 * microbatches, -1)
    assert float(metrics["large"]) == np.mean([np.sum(part > 3) for part in parts])
    assert float(metrics["any"]) == 1 / len(parts)
    assert float(metrics["half"]) == 7.5
    dtypes = {name: x.dtype for name, x in metrics.items() if name != "skipped"}
    assert set(dtypes.values()) == {np.dtype("float32")}


def test_a_name_that_the_step_reports_is_refused() -> None:
    step = sfpo.make_train_step(
        lambda params, batch: (jnp.sum(params["w"]), {"skipped": jnp.float32(1)}),
        optax.sgd(0.1),
        sfpo.make_mesh(),
    )
    state = step.init({"w": jnp.ones(2)})
    with pytest.raises(ValueError, match="'skipped', which the step reports"):
        step(state, np.zeros(8, np.float32))


def test_complex_parameters_are_refused_by_name() -> None:
    step = sfpo.make_train_step(loss_fn, optax.sgd(0.1), sfpo.make_mesh())
    with pytest.raises(TypeError, match=r"\['phase'\] is complex64"):
        step.init({"phase": jnp.ones(2, jnp.complex64)})


def test_axes_to_reduce_over_are_checked() -> None:
    mesh, made = sfpo.make_mesh(), []
    for reduces in ("data", ("data",)):
        step = sfpo.make_train_step(loss_fn, optax.sgd(0.1), mesh, reduces=reduces)
        made.append(step.reduces)
    assert made == [("data",), ("data",)]
    with pytest.raises(ValueError, match="`reduces` must name batch axes"):
        sfpo.make_train_step(loss_fn, optax.sgd(0.1), mesh, reduces="date")


@pytest.mark.parametrize("frozen", [None, {"bias": jnp.ones(2)}])
def test_a_compiled_step_takes_what_the_step_does(frozen: Any) -> None:
    def loss_fn(params: Any, batch: jax.Array, *, frozen: Any = None) -> jax.Array:
        shift = 0.0 if frozen is None else frozen["bias"].sum()
        return jnp.mean(batch * params["w"]) + shift

    mesh = sfpo.make_mesh(devices=jax.devices()[:2])
    step = sfpo.make_train_step(loss_fn, optax.sgd(1.0), mesh, frozen=frozen)
    state, batch = step.init({"w": jnp.ones(())}), step.shard_batch(jnp.ones(2))
    compiled = step.lower(state, batch).compile()
    given = () if frozen is None else (step.frozen,)
    state, metrics = compiled(state, batch, *given)
    assert float(metrics["loss"]) == (1.0 if frozen is None else 3.0)
    assert float(state.params["w"]) == 0.0
