"""What a training step carries along: keys, model state, counters, donated buffers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sfpo_jax as sfpo
from tests.ranks import assert_alike, compiled_programs, copies

RANKS = 8


def quadratic(params: Any, batch: Any) -> Any:
    """Gradient: the params' distance to the mean of the batch."""
    gap = params["w"][None] - batch["x"]
    return 0.5 * jnp.mean(jnp.sum(gap**2, axis=1))


def batch_of(step: int, rows: int = 16, size: int = 40) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {"x": rng.normal(size=(rows, size)).astype(np.float32)}


@pytest.fixture(scope="module")
def onebit() -> Any:
    tx = sfpo.onebit_adam(0.01, warmup_steps=3, axis_name="data")
    return sfpo.make_train_step(quadratic, tx, sfpo.make_mesh())


def test_it_compiles_once_and_reuses_the_buffers(onebit: Any) -> None:
    given = {"w": jnp.ones(40)}
    state = onebit.init(given)
    for step in range(10):
        old = state
        state, _ = onebit(state, batch_of(step))
        assert all(x.is_deleted() for x in jax.tree.leaves(old))
    assert compiled_programs(onebit._jitted) == 1
    assert int(state.opt_state.freeze.step) == 3
    assert int(state.step) == 10 and int(state.skipped) == 0
    assert_alike(state.params)
    # What the caller gave is still theirs.
    np.testing.assert_array_equal(given["w"], np.ones(40))


def test_residuals_are_sharded_and_the_rest_is_replicated(onebit: Any) -> None:
    state = onebit.init({"w": jnp.ones(40)})
    error = state.opt_state.worker_error.tree["w"]
    assert error.shape == (RANKS, 40)
    assert error.addressable_shards[0].data.shape == (1, 40)
    for x in jax.tree.leaves((state.params, state.opt_state.mu, state.step)):
        assert x.sharding.is_fully_replicated


def test_skipped_steps_are_counted(onebit: Any) -> None:
    state = onebit.init({"w": jnp.ones(40)})
    skipped = []
    for step in range(7):
        batch = batch_of(step)
        before = copies((state.params, state.opt_state))
        if step in (1, 5):  # in either phase
            batch["x"][3, 0] = np.inf
        state, metrics = onebit(state, batch)
        if step in (1, 5):
            assert copies((state.params, state.opt_state)) == before
            assert not np.isfinite(metrics["grad_norm"])
        skipped.append(int(metrics["skipped"]))
    assert skipped == [0, 1, 1, 1, 1, 2, 2]
    assert int(state.step) == 7 and int(state.opt_state.count) == 5


def test_skip_nonfinite_protects_any_optimizer() -> None:
    step = sfpo.make_train_step(
        quadratic, optax.adam(0.1), sfpo.make_mesh(), skip_nonfinite=True
    )
    # Optax itself needs the promotion that the tests forbid elsewhere.
    with jax.numpy_dtype_promotion("standard"):
        state = step.init({"w": jnp.ones(40)})
        state, _ = step(state, batch_of(0))
    before = copies((state.params, state.opt_state))
    bad = batch_of(1)
    bad["x"][-1, -1] = np.nan
    with jax.numpy_dtype_promotion("standard"):
        state, metrics = step(state, bad)
    assert copies((state.params, state.opt_state)) == before
    assert int(metrics["skipped"]) == int(state.skipped) == 1
    with jax.numpy_dtype_promotion("standard"):
        state, metrics = step(state, batch_of(1))
    assert copies((state.params, state.opt_state)) != before
    assert int(metrics["skipped"]) == 1 and int(state.step) == 3


def draws(params: Any, batch: Any, key: Any) -> Any:
    """Aux: a random number of every rank and microbatch, told apart by the batch."""
    draw = jax.random.uniform(key)
    mine = jnp.arange(2 * RANKS) == batch["place"][0]
    values = jnp.where(mine, 2 * RANKS * draw, 0.0)
    loss = jnp.sum(params) * draw
    return loss, {f"{i:02}": values[i] for i in range(2 * RANKS)}


def test_every_rank_step_and_microbatch_has_a_key_of_its_own() -> None:
    step = sfpo.make_train_step(
        draws, optax.sgd(0.0), sfpo.make_mesh(), has_key=True, microbatches=2
    )
    batch = {"place": np.arange(2 * RANKS, dtype=np.int32)}

    def run(seed: int) -> np.ndarray:
        """[steps, ranks and microbatches]"""
        state: Any = step.init(jnp.ones(3), jax.random.key(seed))
        rows = []
        for _ in range(3):
            state, metrics = step(state, batch)
            rows.append([float(metrics[f"{i:02}"]) for i in range(2 * RANKS)])
        assert jnp.array_equal(state.key, jax.random.key(seed))
        return np.array(rows)

    first = run(0)
    assert len(np.unique(first)) == first.size
    assert ((first > 0) & (first < 1)).all()
    np.testing.assert_array_equal(run(0), first)
    assert not np.isin(run(1), first).any()


def with_statistics(params: Any, batch: Any, model_state: Any) -> Any:
    new = {
        "mean": 0.5 * model_state["mean"] + 0.5 * jnp.mean(batch["x"], axis=0),
        "calls": model_state["calls"] + 1,
    }
    return quadratic(params, batch), {"model_state": new, "seen": new["mean"][0]}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_model_state_is_averaged_over_the_ranks(microbatches: int) -> None:
    step = sfpo.make_train_step(
        with_statistics,
        optax.sgd(0.1),
        sfpo.make_mesh(),
        has_model_state=True,
        microbatches=microbatches,
        skip_nonfinite=True,
    )
    start = {"mean": jnp.zeros(40), "calls": jnp.int32(0)}
    state = step.init({"w": jnp.ones(40)}, model_state=start)
    expected, calls = np.zeros(40), 0
    for i in range(3):
        batch = batch_of(i)
        if i == 1:
            batch["x"][0, 0] = np.nan  # skipped: nothing of it may stay
        state, metrics = step(state, batch)
        assert ("model_state" not in metrics) and ("seen" in metrics)
        if i != 1:
            # Every rank's rows, in turn by microbatch: [ranks, microbatches, rows].
            parts = batch["x"].reshape(RANKS, microbatches, -1, 40).mean(axis=(0, 2))
            for part in parts:
                expected = 0.5 * expected + 0.5 * part
            calls += microbatches
        np.testing.assert_allclose(
            state.model_state["mean"], expected, rtol=1e-5, atol=1e-6
        )
        assert int(state.model_state["calls"]) == calls
    assert_alike(state.model_state)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_integer_parameters_stay(microbatches: int) -> None:
    def loss(params: Any, batch: Any) -> Any:
        return quadratic(params, batch) * params["n"][0].astype(jnp.float32)

    params = {"w": jnp.ones(40), "n": jnp.array([2, 3])}
    tx = sfpo.onebit_adam(0.1, warmup_steps=1, weight_decay=0.1, axis_name="data")
    step = sfpo.make_train_step(loss, tx, sfpo.make_mesh(), microbatches=microbatches)
    state = step.init(params)
    for i in range(2):
        state, _ = step(state, batch_of(i))
    np.testing.assert_array_equal(state.params["n"], [2, 3])
    assert state.params["n"].dtype == params["n"].dtype


def refused(call: Any, *words: str) -> None:
    with pytest.raises(ValueError) as error:
        call()
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message


def test_bad_arguments(onebit: Any) -> None:
    params = {"w": jnp.ones(40)}
    state = onebit.init(params)
    refused(lambda: onebit(state, batch_of(0, 12)), "`batch`['x']", "(12, 40)", "8")
    refused(lambda: onebit(state, {"x": np.float32(1)}), "`batch`['x']", "()", "8")
    refused(lambda: onebit.init(params, jax.random.key(0)), "`key`", "has_key=True")
    refused(
        lambda: onebit.init(params, model_state={}), "`model_state`", "has_model_state"
    )
    refused(lambda: onebit.wire_bytes(state, batch_of(0), "cold"), "`phase`", "'cold'")
    mesh = sfpo.make_mesh()
    keyed = sfpo.make_train_step(draws, optax.sgd(0.1), mesh, has_key=True)
    refused(lambda: keyed.init(params), "`key` is missing")
    refused(
        lambda: sfpo.make_train_step(quadratic, optax.sgd(0.1), mesh, microbatches=0),
        "`microbatches`",
        "0",
        "at least 1",
    )
    stateful = sfpo.make_train_step(
        quadratic, optax.sgd(0.1), mesh, has_model_state=True
    )
    forgetful = sfpo.make_train_step(
        lambda params, batch, model_state: quadratic(params, batch),
        optax.sgd(0.1),
        mesh,
        has_model_state=True,
    )
    refused(lambda: stateful.init(params), "`model_state` is missing")
    refused(
        lambda: forgetful(forgetful.init(params, model_state={}), batch_of(0)),
        "`loss_fn`",
        'aux["model_state"]',
    )


def test_shapes_alone_tell_the_state_and_lower_the_step(onebit: Any) -> None:
    shapes = onebit.init_shapes({"w": jax.ShapeDtypeStruct((40,), jnp.float32)})
    state = onebit.init({"w": jnp.ones(40)})
    for told, made in zip(jax.tree.leaves(shapes), jax.tree.leaves(state), strict=True):
        assert (told.shape, told.dtype) == (made.shape, made.dtype)
        assert told.sharding.is_equivalent_to(made.sharding, made.ndim)
    batch = {"x": jax.ShapeDtypeStruct((16, 40), jnp.float32)}
    assert onebit.lower(shapes, batch).as_text() == (
        onebit._jitted.lower(state, onebit.shard_batch(batch_of(0)), None).as_text()
    )
    with pytest.raises(ValueError, match="a multiple of 8"):
        onebit.lower(shapes, {"x": jax.ShapeDtypeStruct((12, 40), jnp.float32)})
