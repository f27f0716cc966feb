"""Exact selection of the k largest magnitudes.

A magnitude, its sign bit cleared, is an unsigned integer of the same order. The k-th
largest is then found exactly by deciding its bits from the highest down, one counting
pass a bit; no sort, and no quantile of rounded positions. On ties the lower index wins.
"""

from fractions import Fraction
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_UNSIGNED = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def kept_count(size: int, sparsity: float | jax.Array) -> jax.Array:
    """Entries kept of `size` at `sparsity`: size - ceil(sparsity * (size - 1)).

    That is how many of `size` distinct magnitudes are at least their
    `sparsity`-quantile (linear interpolation). The product is exact integer arithmetic
    on the float32 value of the sparsity: a float32 product is wrong already at
    size = 101, sparsity = 0.3.

    Args:
      size: number of entries, 1 to 2**32 - 1.
      sparsity: share of entries dropped, in [0, 1]; a number or a float scalar array.

    Returns:
      uint32 scalar, 1 to `size`.

    Example:
      >>> int(kept_count(101, 0.3))
      70
    """
    if not 1 <= size < 2**32:
        raise ValueError(f"`size` must lie in [1, 2**32), got {size}.")
    if not isinstance(sparsity, jax.Array):
        exact = Fraction(float(np.float32(sparsity)))
        return jnp.uint32(size - ceil(exact * (size - 1)))
    return jnp.uint32(size) - _ceil_product(sparsity.astype(jnp.float32), size - 1)


def _ceil_product(fraction: jax.Array, count: int) -> jax.Array:
    """ceil(fraction * count) for a float32 fraction in [0, 1], count < 2**32."""
    u32 = jnp.uint32
    bits = lax.bitcast_convert_type(fraction, u32) & u32(0x7FFFFFFF)
    exponent = bits >> 23
    mantissa = (bits & u32(0x7FFFFF)) | jnp.where(exponent > 0, u32(1 << 23), u32(0))
    # fraction = mantissa * 2**-shift, and 24 * 32 bits fit two words (low, high).
    shift = u32(150) - jnp.maximum(exponent, u32(1))
    a_low, a_high = mantissa & u32(0xFFFF), mantissa >> 16
    b_low, b_high = u32(count & 0xFFFF), u32(count >> 16)
    cross = a_low * b_high + ((a_low * b_low) >> 16)
    middle = cross + a_high * b_low
    carry = (middle < cross).astype(u32)
    low = (middle << 16) | ((a_low * b_low) & u32(0xFFFF))
    high = a_high * b_high + (middle >> 16) + (carry << 16)
    # The product is under 2**56: from 2**-63 on nothing but the remainder is left.
    shift = jnp.minimum(shift, u32(63))
    is_far = shift >= 32
    near, far = jnp.minimum(shift, u32(31)), jnp.maximum(shift, u32(32)) - u32(32)
    whole = jnp.where(is_far, high >> far, (high << (u32(32) - near)) | (low >> near))
    rest_far = (high & ((u32(1) << far) - u32(1))) | low
    rest_near = low & ((u32(1) << near) - u32(1))
    rest = jnp.where(is_far, rest_far, rest_near)
    return whole + (rest > 0).astype(u32)


def select_largest(
    rows: jax.Array, count: jax.Array, live: jax.Array | None = None
) -> jax.Array:
    """Marks the `count` largest magnitudes of each row, ties to the lower index.

    Args:
      rows: float[r, n] of 16, 32 or 64 bits; NaN counts as larger than infinity.
      count: uint32[r], how many to mark in each row; at most the live entries of it.
      live: bool[r, n] or None for all: entries that may be marked.

    Returns:
      bool[r, n] with exactly min(count, live entries) marks a row.

    Example:
      >>> import jax.numpy as jnp
      >>> select_largest(
      ...     jnp.array([[1.0, -3.0, 2.0, -2.0]]), jnp.array([2], jnp.uint32)
      ... )
      Array([[False,  True,  True, False]], dtype=bool)
    """
    bits = 8 * rows.dtype.itemsize
    unsigned = _UNSIGNED[rows.dtype.itemsize]
    sign_cleared = np.array(2 ** (bits - 1) - 1, unsigned)
    keys = lax.bitcast_convert_type(rows, unsigned) & sign_cleared
    if live is not None:
        # One above the magnitude, so that a live zero differs from a dead entry.
        keys = jnp.where(live, keys + np.array(1, unsigned), np.array(0, unsigned))
        available = jnp.sum(live, axis=-1, dtype=jnp.uint32)
        count = jnp.minimum(count, available)
    threshold = _kth_largest(keys, count)[:, None]
    above = keys > threshold
    equal = keys == threshold
    missing = count - jnp.sum(above, axis=-1, dtype=jnp.uint32)
    equals = jnp.sum(equal, axis=-1, dtype=jnp.uint32)
    is_exact = jnp.all(missing == equals)
    chosen = lax.cond(is_exact, lambda: equal, lambda: _first(equal, missing))
    # A row that wants nothing has the largest key as threshold and `missing` zero.
    return (above | chosen) & (count > 0)[:, None]


def _kth_largest(keys: jax.Array, count: jax.Array) -> jax.Array:
    """The largest key t of each row with at least `count` keys >= t."""
    bits = 8 * keys.dtype.itemsize
    one = np.array(1, keys.dtype)

    def decide(i: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (one << (bits - 1 - i).astype(keys.dtype))
        reached = jnp.sum(keys >= candidate[:, None], axis=-1, dtype=jnp.uint32)
        return jnp.where(reached >= count, candidate, found)

    return lax.fori_loop(0, bits, decide, _zeros_of(keys, count).astype(keys.dtype))


def _first(flags: jax.Array, count: jax.Array) -> jax.Array:
    """The first `count` set flags of each row, found by bisecting the index."""
    size = flags.shape[-1]
    index = lax.broadcasted_iota(jnp.uint32, flags.shape, 1)

    def decide(i: jax.Array, end: jax.Array) -> jax.Array:
        bit = jnp.uint32(1) << (size.bit_length() - 1 - i).astype(jnp.uint32)
        candidate = end | bit
        before = flags & (index < candidate[:, None])
        reached = jnp.sum(before, axis=-1, dtype=jnp.uint32)
        return jnp.where(reached <= count, candidate, end)

    end = lax.fori_loop(0, size.bit_length(), decide, _zeros_of(flags, count))
    return flags & (index < end[:, None])


def _zeros_of(rows: jax.Array, count: jax.Array) -> jax.Array:
    """uint32[r] of zeros that varies over the mesh axes either argument varies over.

    Inside `shard_map` a loop's carry must have its final type from the start.
    """
    return (rows[:, 0] != rows[:, 0]).astype(jnp.uint32) & (count ^ count)
