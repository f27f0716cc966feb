"""Do all devices hold the same? A checksum of every array that is to be replicated.

A flipped bit, or a host with another version of a library, makes one device's copy of
the parameters drift from the others'. Nothing fails: the training just gets worse.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from sfpo_jax.parallel._offload import is_on_host, layer_at

# Odd, so that no bit of an entry is lost; from Knuth's multiplicative hashing.
_FACTOR = 2654435761


def make_check(mesh: Mesh, specs: Any) -> Callable[[Any], jax.Array]:
    """A compiled function: a tree of arrays -> which of its leaves differ.

    Args:
      mesh: the devices.
      specs: how each leaf lies over the mesh; along the axes that a spec does not name,
        its copies are compared.

    Returns:
      The function; its result is bool[leaves], in the order of `jax.tree.leaves`.
    """
    axes = tuple(mesh.axis_names)
    flat = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))

    def local(tree: Any) -> jax.Array:
        found = []
        for leaf, spec in zip(jax.tree.leaves(tree), flat, strict=True):
            copies = tuple(a for a in axes if a not in _named(spec))
            number = checksum_of(leaf)
            if math.prod(mesh.shape[a] for a in copies) == 1:
                differs = jnp.bool_(False)
            else:
                differs = lax.pmax(number, copies) != lax.pmin(number, copies)
            found.append(differs)
        return lax.pmax(jnp.stack(found).astype(jnp.int32), axes) > 0

    return jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )


def _named(spec: PartitionSpec) -> set[str]:
    """The mesh axes a spec shards over."""
    named: set[str] = set()
    for part in spec:
        if part is not None:
            named |= {part} if isinstance(part, str) else set(part)
    return named


def checksum_of(x: jax.Array) -> jax.Array:
    """`checksum` of an array that may lie in the host's memory: a layer at a time."""
    if not is_on_host(x):
        return checksum(x)
    layers = jnp.arange(x.shape[0])
    return checksum(lax.map(lambda i: checksum(layer_at(x, i)), layers))


def checksum(x: jax.Array) -> jax.Array:
    """uint32[]; differs where a single entry does, or two have changed places."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    bits = jnp.dtype(x.dtype).itemsize * 8
    words = lax.bitcast_convert_type(x, jnp.dtype(f"uint{min(bits, 32)}"))
    words = words.reshape(-1).astype(jnp.uint32)
    places = lax.iota(jnp.uint32, words.size) * jnp.uint32(2) + jnp.uint32(1)
    mixed = (words ^ (words >> 16)) * jnp.uint32(_FACTOR)
    return jnp.sum((mixed ^ (mixed >> 15)) * places, dtype=jnp.uint32)
