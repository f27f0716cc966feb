"""Batches on the devices, of one process or several, and what all devices hold."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


def place_batch(batch: Any, sharding: NamedSharding) -> Any:
    """Puts every array of a batch where it belongs; see `Step.shard_batch`."""

    def place(leaf: Any) -> jax.Array:
        if not _is_share(leaf):
            return jax.device_put(leaf, sharding)
        # As wanted as a `device_put`, but not to a transfer guard.
        with jax.transfer_guard_host_to_device("allow"):
            return jax.make_array_from_process_local_data(
                sharding, np.asarray(leaf), whole_shape(leaf)
            )

    return jax.tree.map(place, batch)


def whole_shape(leaf: Any) -> tuple[int, ...]:
    """The shape of an array of a batch over all processes."""
    shape = jnp.shape(leaf)
    if not shape or not _is_share(leaf):
        return shape
    return (shape[0] * jax.process_count(), *shape[1:])


def _is_share(leaf: Any) -> bool:
    """Whether an array of a batch is this process's rows of it alone."""
    if jax.process_count() == 1 or isinstance(leaf, jax.ShapeDtypeStruct):
        return False
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding of an array."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def replicated(tree: Any, mesh: Mesh) -> Any:
    """The arrays on every device of a mesh; of shapes, how they would lie there."""
    sharding = NamedSharding(mesh, PartitionSpec())

    def place(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        return jax.device_put(x, sharding)

    return jax.tree.map(place, tree)
