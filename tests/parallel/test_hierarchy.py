"""Exact inside a host, one bit between hosts: what crosses the slow axis."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import sfpo_jax as sfpo
from sfpo_jax.memory import DEVICES, planning_mesh
from tests.memory.programs import needs_gpu_compiler

SIZES = {"w": (1024, 512), "b": (512,)}


def loss_fn(params: Any, batch: Any) -> Any:
    return sum(jnp.mean(batch) * jnp.sum(p * p) for p in jax.tree.leaves(params))


def slow_bytes(mesh: Mesh, shard: bool) -> dict[str, int]:
    """Bytes of a compressed step by axis: over `node` alone, or over all at once."""
    axes = "node" if shard else ("node", "data")
    tx = sfpo.onebit_adam(0.1, warmup_steps=3, axis_name=axes)
    kind: Any = {"shard": "states", "shard_axes": ("data",)} if shard else {}
    step = sfpo.make_train_step(loss_fn, tx, mesh, **kind)
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in SIZES.items()}
    batch = jax.ShapeDtypeStruct((mesh.size,), np.float32)
    return step.wire_bytes(step.init_shapes(params), batch, "compressed")


def check(mesh: Mesh) -> None:
    fast = mesh.shape["data"]
    flat = sum(slow_bytes(mesh, shard=False).values())
    sent = slow_bytes(mesh, shard=True)
    # Flat, a device sends an equal part of two payloads to each of the others, and half
    # of all devices are on the other host.
    ranks = mesh.size
    crossing = flat / (ranks - 1) * ranks / 2
    assert sent["node"] <= (1 / fast + 0.03) * crossing
    entries = sum(int(np.prod(s)) for s in SIZES.values())
    # Inside: reduce-scatter and all-gather of float32.
    exact = 2 * (fast - 1) / fast * 4 * entries
    assert sent["data"] == pytest.approx(exact, rel=0.02)


def test_two_hosts_of_four() -> None:
    check(sfpo.make_mesh(node=2, data=4, devices=jax.devices()[:8]))


@needs_gpu_compiler
def test_two_hosts_of_eight_gpus() -> None:
    check(planning_mesh(DEVICES["a100-80gb"], {"node": 2, "data": 8}))
