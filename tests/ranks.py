"""Trains on N ranks, each with gradients of its own, and compares bytes."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from sfpo_jax.transforms import state_specs


def data_mesh(ranks: int) -> Mesh:
    """The first `ranks` devices along the axis `data`."""
    return jax.make_mesh(
        (ranks,),
        ("data",),
        axis_types=(AxisType.Auto,),
        devices=jax.devices()[:ranks],
    )


class Ranks:
    """Parameters and optimizer state of N ranks; None is one worker without an axis.

    The update is compiled once. Parameters are moved only by transformations that
    `reduce`: the updates of others differ between the ranks.
    """

    def __init__(
        self,
        tx: optax.GradientTransformation,
        params: Any,
        ranks: int | None,
        *,
        check_vma: bool = False,
        reduces: bool = True,
        extra_args: Mapping[str, Any] | None = None,
    ) -> None:
        self.traces = 0
        extra = extra_args or {}
        transformation = optax.with_extra_args_support(tx)

        def local(grads: Any, state: Any, params: Any) -> Any:
            self.traces += 1
            grads = jax.tree.map(lambda g: g.reshape(g.shape[1:]), grads)
            updates, state = transformation.update(grads, state, params, **extra)
            if reduces:
                params = jax.tree.map(_move, params, updates)
            return jax.tree.map(lambda u: u[None], updates), state, params

        if ranks is None:
            self.params, self.state = params, jax.jit(tx.init)(params)
            self.update = jax.jit(local)
            return
        mesh = data_mesh(ranks)
        own, shared = PartitionSpec("data"), PartitionSpec()
        with jax.set_mesh(mesh):
            specs = state_specs(jax.eval_shape(tx.init, params), "data")
            placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
            self.state = jax.jit(tx.init, out_shardings=placed)(params)
        self.params = jax.device_put(params, NamedSharding(mesh, shared))
        self.update = jax.jit(
            jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(own, specs, shared),
                out_specs=(own, specs, shared),
                check_vma=check_vma,
            )
        )

    def step(self, grads: Any) -> Any:
        """One step on gradients [N, ...]; the updates of all ranks, [N, ...]."""
        updates, self.state, self.params = self.update(grads, self.state, self.params)
        return updates


def _move(param: jax.Array, update: jax.Array) -> jax.Array:
    # What is no number with a gradient passes: its update is each rank's own.
    is_float = jnp.issubdtype(param.dtype, jnp.floating)
    return (param + update).astype(param.dtype) if is_float else param


def compiled_programs(jitted: Any) -> int:
    """How many programs a jitted function holds: one for each kind of arguments."""
    return jitted._cache_size()


def copies(tree: Any) -> list[tuple[bytes, ...]]:
    """The bytes of every array, as each device holds them."""
    return [
        tuple(np.asarray(shard.data).tobytes() for shard in x.addressable_shards)
        for x in jax.tree.leaves(tree)
    ]


def assert_alike(tree: Any) -> None:
    """All devices hold the same bytes of every (replicated) array."""
    for i, shards in enumerate(copies(tree)):
        assert len(set(shards)) == 1, f"array {i} differs between devices"


def assert_rows_alike(tree: Any) -> None:
    """Every array [N, ...] has N times the same bytes."""
    for i, x in enumerate(map(np.asarray, jax.tree.leaves(tree))):
        rows = {row.tobytes() for row in x}
        assert len(rows) <= 1, f"array {i} differs between ranks"
