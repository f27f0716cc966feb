"""Exact selection of the k largest magnitudes.

A magnitude, its sign bit cleared, is an unsigned integer of the same order. The k-th
largest is then found exactly by deciding its bits from the highest down, one counting
pass a bit; no sort, and no quantile of rounded positions. On ties the lower index wins.
"""

from collections.abc import Sequence
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
      count: uint32[r], how many to mark in each row.
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
    keys = _magnitude_bits(rows)
    if live is not None:
        # One above the magnitude, so that a live zero differs from a dead entry.
        keys = jnp.where(live, keys + np.array(1, keys.dtype), np.array(0, keys.dtype))
        count = jnp.minimum(count, jnp.sum(live, axis=-1, dtype=jnp.uint32))
    return _select([keys], [count])[0]


def select_largest_of_each(
    arrays: Sequence[jax.Array], counts: Sequence[jax.Array]
) -> list[jax.Array]:
    """`select_largest` of several arrays of any shapes, each with a count of its own.

    They share one loop, where one for each would take as long to compile as each.

    Args:
      arrays: float arrays of one dtype.
      counts: uint32 scalars, how many to mark in each array.

    Returns:
      bool arrays of the same shapes.
    """
    if not arrays:
        return []
    keys = [_magnitude_bits(x.reshape(1, -1)) for x in arrays]
    masks = _select(keys, [count[None] for count in counts])
    return [mask.reshape(x.shape) for mask, x in zip(masks, arrays, strict=True)]


def _magnitude_bits(x: jax.Array) -> jax.Array:
    """The bits of |x|, unsigned, in the order of the magnitudes."""
    unsigned = _UNSIGNED[x.dtype.itemsize]
    cleared = np.array(2 ** (8 * x.dtype.itemsize - 1) - 1, unsigned)
    return lax.bitcast_convert_type(x, unsigned) & cleared


def _select(keys: list[jax.Array], counts: list[jax.Array]) -> list[jax.Array]:
    """Marks the `counts` largest keys uint[r, n] of each row of each array.

    Rows of all arrays are numbered through, so that what there is one of for each row
    is one vector: an operation on it compiles once, not once for each array.
    """
    wanted = jnp.concatenate(counts)
    threshold = _kth_largest(keys, wanted)
    above = [k > t for k, t in zip(keys, _columns(threshold, keys), strict=True)]
    equal = [k == t for k, t in zip(keys, _columns(threshold, keys), strict=True)]
    missing = wanted - _counts(above)
    chosen = lax.cond(
        jnp.all(_counts(equal) == missing),
        lambda: equal,
        lambda: _first(equal, missing),
    )
    # A row that wants nothing has a threshold above every key.
    return [a | e for a, e in zip(above, chosen, strict=True)]


def _counts(flags: list[jax.Array]) -> jax.Array:
    """uint32[rows of all arrays]: set flags of each row."""
    counts = [jnp.sum(f, axis=-1, dtype=jnp.uint32) for f in flags]
    return jnp.concatenate(counts)


def _columns(vector: jax.Array, arrays: list[jax.Array]) -> list[jax.Array]:
    """A vector over the rows of all arrays as one column [r, 1] for each array."""
    ends = np.cumsum([x.shape[0] for x in arrays])[:-1]
    return [part[:, None] for part in jnp.split(vector, ends)]


def _kth_largest(keys: list[jax.Array], count: jax.Array) -> jax.Array:
    """The largest t of each row with at least `count` keys >= t."""
    bits = 8 * keys[0].dtype.itemsize
    one = np.array(1, keys[0].dtype)

    def decide(i: jax.Array, found: jax.Array) -> jax.Array:
        candidate = found | (one << (bits - 1 - i).astype(one.dtype))
        columns = _columns(candidate, keys)
        reached = _counts([k >= c for k, c in zip(keys, columns, strict=True)])
        return jnp.where(reached >= count, candidate, found)

    return lax.fori_loop(0, bits, decide, _zeros_of(keys, count).astype(one.dtype))


def _first(flags: list[jax.Array], count: jax.Array) -> list[jax.Array]:
    """The first `count` set flags of each row, found by bisecting the index."""
    index = [lax.broadcasted_iota(jnp.uint32, f.shape, 1) for f in flags]
    bits = max(f.shape[-1] for f in flags).bit_length()

    def before(end: jax.Array) -> list[jax.Array]:
        columns = _columns(end, flags)
        return [f & (i < e) for f, i, e in zip(flags, index, columns, strict=True)]

    def decide(i: jax.Array, end: jax.Array) -> jax.Array:
        candidate = end | (jnp.uint32(1) << (bits - 1 - i).astype(jnp.uint32))
        return jnp.where(_counts(before(candidate)) <= count, candidate, end)

    return before(lax.fori_loop(0, bits, decide, _zeros_of(flags, count)))


def _zeros_of(arrays: list[jax.Array], count: jax.Array) -> jax.Array:
    """uint32[rows] of zeros that varies over the mesh axes an argument varies over.

    Inside `shard_map` a loop's carry must have its final type from the start.
    """
    totals = jnp.concatenate([jnp.sum(x, axis=-1, dtype=jnp.uint32) for x in arrays])
    return (totals ^ totals) & (count ^ count)
