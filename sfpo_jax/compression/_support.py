"""The support of a block: its largest entries, as a mask, a list, and back.

Both sparse compressors keep the same entries; they differ in what they send of them.
"""

import jax
import jax.numpy as jnp
import numpy as np

from sfpo_jax.kernels import select_largest


def slots(density: float, width: int) -> int:
    """Entries kept of a block with `width` live ones: at least one.

    The float32 product, rounded half to even: the same on the host and on a device.
    """
    return max(1, int(np.round(np.float32(density) * np.float32(width))))


def select_support(rows: jax.Array, live: jax.Array, density: float) -> jax.Array:
    """bool[r, w]: the largest non-zero live entries, `slots` of the live ones a row."""
    alive = jnp.sum(live, axis=-1, dtype=jnp.int32).astype(jnp.float32)
    wanted = jnp.maximum(jnp.round(np.float32(density) * alive), 1).astype(jnp.uint32)
    return select_largest(rows, wanted, live & (rows != 0))


def positions(mask: jax.Array, count: int) -> jax.Array:
    """int32[r, count]: indices of the set flags in order, `w` in slots left over."""
    row, width = mask.shape
    rank = jnp.cumsum(mask, axis=-1, dtype=jnp.int32) - 1
    slot = jnp.where(mask, rank, count)  # out of bounds: dropped
    line = jax.lax.broadcasted_iota(jnp.int32, mask.shape, 0)
    index = jax.lax.broadcasted_iota(jnp.int32, mask.shape, 1)
    empty = jnp.full((row, count), width, jnp.int32)
    return empty.at[line, slot].set(index, mode="drop", unique_indices=False)


def take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """[r, k]: entries of [r, w] at int32[r, k]; anything where out of range."""
    index = jnp.minimum(index, rows.shape[-1] - 1)
    return jnp.take_along_axis(rows, index, axis=-1)


def place(values: jax.Array, index: jax.Array, width: int) -> jax.Array:
    """[r, width]: zeros with values [r, k] at positions int32[r, k]; `width` drops."""
    line = jax.lax.broadcasted_iota(jnp.int32, index.shape, 0)
    zeros = jnp.zeros((index.shape[0], width), values.dtype)
    return zeros.at[line, index].set(values, mode="drop")
