"""Parameters and states cut over devices, for models that do not stack."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sfpo_jax as sfpo
from sfpo_jax.parallel._sharding import shard_axis

RANKS = 8


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((64, 512), 0),  # the first that divides
        ((3, 64, 512), 1),
        ((3, 5, 8192), 2),  # shards keep whole blocks of 256
        ((33, 1024), -1),  # shards of the last axis would not
        ((65536,), 0),
        ((64, 64), -1),  # shards would be too small
        ((), -1),
    ],
)
def test_which_axis_is_cut(shape: tuple[int, ...], axis: int) -> None:
    assert shard_axis(shape, RANKS) == axis


def loss_fn(params: Any, batch: Any) -> Any:
    h = jnp.tanh(batch["x"] @ params["up"] + params["bias"][None])
    return jnp.mean((h @ params["down"] - batch["y"]) ** 2)


def parameters() -> Any:
    rng = np.random.default_rng(0)
    return {
        "up": rng.normal(size=(16, 2048)) / 4,
        "bias": rng.normal(size=2048),
        "down": rng.normal(size=(2048, 16)) / 45,
    }


def batch_of(step: int) -> Any:
    rng = np.random.default_rng(step)
    return {"x": rng.normal(size=(16, 16)), "y": rng.normal(size=(16, 16))}


def onebit() -> Any:
    return sfpo.onebit_adam(1e-3, warmup_steps=8, axis_name="node")


@pytest.mark.parametrize("shard", ["states", "weights"])
def test_sharded_and_whole_train_alike(shard: Any) -> None:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        reached = []
        for kind in ("none", shard):
            step = sfpo.make_train_step(
                loss_fn, optax.adamw(1e-2), sfpo.make_mesh(node=2), shard=kind
            )
            state = step.init(parameters())
            norms = []
            for i in range(4):
                state, metrics = step(state, batch_of(i))
                norms.append(metrics["grad_norm"])
            reached.append((state.params, norms))
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), *reached
        )
        mu = state.opt_state[0].mu["up"]
        # 4 devices along `data`: each has a state of a quarter of the rows.
        assert mu.shape == (4, 4, 2048)
        assert mu.sharding.shard_shape(mu.shape) == (1, 4, 2048)
        up = state.params["up"]
        rows = 4 if shard == "weights" else 16
        assert up.sharding.shard_shape(up.shape) == (rows, 2048)


def test_sharded_inside_and_compressed_between() -> None:
    """The residuals are of the shards, and all hosts end with the same weights."""
    step = sfpo.make_train_step(
        loss_fn, onebit(), sfpo.make_mesh(node=2), shard="weights"
    )
    state = step.init(jax.tree.map(np.float32, parameters()))
    error = state.opt_state.worker_error.tree["up"]
    assert error.shape == (4, 2, 4, 2048)
    assert error.sharding.shard_shape(error.shape) == (1, 1, 4, 2048)
    batch = jax.tree.map(np.float32, batch_of(0))
    losses = []
    for _ in range(12):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.9 * losses[0]
    up = state.params["up"]
    by_place: dict[Any, list[np.ndarray]] = {}
    for part in up.addressable_shards:
        by_place.setdefault(part.index[0].start, []).append(np.asarray(part.data))
    assert len(by_place) == 4
    for copies in by_place.values():
        assert all(np.array_equal(copies[0], other) for other in copies[1:])
    wire = step.wire_bytes(state, batch, phase="compressed")
    entries = sum(p.size for p in jax.tree.leaves(state.params))
    # Between hosts a quarter of the entries goes as two bits or so.
    assert wire["node"] < 4 * entries / 4 / 8


def test_a_step_that_is_not_finite_on_one_device_is_skipped_by_all() -> None:
    step = sfpo.make_train_step(
        loss_fn, sfpo.adamw8bit(1e-2), sfpo.make_mesh(), shard="states"
    )
    state = step.init(jax.tree.map(np.float32, parameters()))
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    batch = jax.tree.map(np.float32, batch_of(0))
    batch["x"][3] = np.nan
    state, metrics = step(state, batch)
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.opt_state), before)
    assert int(metrics["skipped"]) == 1


def test_an_axis_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"`shard_axes` must name batch axes.*'rows'"):
        sfpo.make_train_step(
            loss_fn, onebit(), sfpo.make_mesh(), shard="states", shard_axes=("rows",)
        )


@pytest.mark.parametrize("shard", ["states", "weights"])
def test_compressing_along_the_shards_is_refused(shard: Any) -> None:
    tx = sfpo.onebit_adam(1e-3, warmup_steps=8, axis_name="data")
    params = jax.tree.map(np.float32, parameters())
    step = sfpo.make_train_step(loss_fn, tx, sfpo.make_mesh(node=2), shard=shard)
    with pytest.raises(ValueError, match=r"`tx` reduces over \['data'\].*`shard`"):
        step.init(params)
