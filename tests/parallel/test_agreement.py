"""Copies that differ are found, and named; parts of one array are not compared."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import sfpo_jax as sfpo
from sfpo_jax.parallel._agreement import checksum


def loss_fn(params: Any, batch: Any):
    return jnp.mean((batch @ params["w"] + params["b"].sum()) ** 2)


@pytest.fixture(scope="module")
def trained():
    tx = optax.chain(sfpo.onebit_adam(0.1, warmup_steps=1, axis_name="data"))
    step = sfpo.make_train_step(loss_fn, tx, sfpo.make_mesh())
    state = step.init({"b": jnp.zeros(3), "w": jnp.ones(4)})
    for seed in range(3):
        batch = np.random.default_rng(seed).normal(size=(16, 4)).astype(np.float32)
        state, _ = step(state, batch)
    return step, state


def tampered(x: Any, device: int, change: Callable[[np.ndarray], np.ndarray]):
    """A replicated array of which one device holds another copy."""
    parts = [
        jax.device_put(change(np.array(shard.data)), shard.device)
        if place == device
        else shard.data
        for place, shard in enumerate(x.addressable_shards)
    ]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, parts)


def test_a_run_agrees_though_its_worker_errors_differ(trained: Any) -> None:
    step, state = trained
    errors = [x for x in jax.tree.leaves(state.opt_state) if x.shape[:1] == (8,)]
    assert any(not np.array_equal(x[0], x[1]) for x in map(np.asarray, errors))
    assert step.differing(state) == []


@pytest.mark.parametrize("device", [0, 5, 7])
def test_one_flipped_bit_on_one_device_is_found_and_named(
    trained: Any, device: int
) -> None:
    step, state = trained

    def flip(x: Any):
        x.view(np.uint32)[2] ^= 1
        return x

    params = {**state.params, "w": tampered(state.params["w"], device, flip)}
    assert step.differing(state._replace(params=params)) == [".params['w']"]


def test_two_entries_that_changed_places_are_found(trained: Any) -> None:
    step, state = trained
    w = tampered(state.params["w"], 3, lambda x: x[::-1].copy())
    params = {**state.params, "w": w}
    assert step.differing(state._replace(params=params)) == [".params['w']"]


def test_the_counter_of_steps_counts(trained: Any) -> None:
    step, state = trained
    other = tampered(state.step, 1, lambda x: x + 1)
    assert step.differing(state._replace(step=other)) == [".step"]


@pytest.mark.parametrize(
    "x",
    [
        np.arange(40, dtype=np.float64).astype(np.float32),
        np.arange(40, dtype=np.int8),
        np.arange(40) % 3 == 0,
        np.zeros(0, np.float32),
        np.array(7, np.int32),
    ],
    ids=str,
)
def test_achecksum_sees_every_entry(x: Any) -> None:
    own = int(checksum(jnp.asarray(x)))
    for place in range(x.size):
        other = x.copy().reshape(-1)
        other[place] = other[place] + 1 if x.dtype != bool else not other[place]
        assert int(checksum(jnp.asarray(other.reshape(x.shape)))) != own


def test_bfloat16_and_keys_havechecksums() -> None:
    assert checksum(jnp.ones(3, jnp.bfloat16)) != checksum(jnp.zeros(3, jnp.bfloat16))
    assert checksum(jax.random.key(1)) != checksum(jax.random.key(2))


def test_shards_of_one_array_are_not_compared() -> None:
    step = sfpo.make_train_step(
        lambda params, batch: jnp.mean((batch @ params["w"]) ** 2),
        optax.sgd(0.1, momentum=0.9),
        sfpo.make_mesh(node=2, data=4),
        shard="weights",
    )
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(512, 64)))}
    state = step.init(params)
    assert step.differing(state) == []
    w = state.params["w"]
    assert w.sharding.spec != PartitionSpec()
    # Device 0 and 4 hold the same part, of two nodes.
    other = tampered(w, 4, lambda x: x + 1)
    assert isinstance(other.sharding, NamedSharding)
    assert step.differing(state._replace(params={"w": other})) == [".params['w']"]
