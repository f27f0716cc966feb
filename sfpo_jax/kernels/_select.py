"""Exact selection of the k largest magnitudes: how many, and which."""

from collections.abc import Sequence
from fractions import Fraction
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sfpo_jax.kernels._threshold import is_kept, magnitude_thresholds, of_each


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
    flags = () if live is None else (live,)
    marks = is_kept(rows, magnitude_thresholds([rows], [count], live=flags))
    return marks if live is None else marks & live


def select_largest_of_each(
    arrays: Sequence[jax.Array], counts: Sequence[jax.Array]
) -> list[jax.Array]:
    """`select_largest` of several arrays of any shapes, each with a count of its own.

    One call for all of them, which is compiled and run with the overhead of one.

    Args:
      arrays: float arrays of one dtype.
      counts: uint32 scalars, how many to mark in each array.

    Returns:
      bool arrays of the same shapes.
    """
    if not arrays:
        return []
    rows = [x.reshape(1, -1) for x in arrays]
    found = magnitude_thresholds(rows, [count[None] for count in counts])
    parts = of_each(found, rows)
    marks = [is_kept(row, part) for row, part in zip(rows, parts, strict=True)]
    return [mask.reshape(x.shape) for mask, x in zip(marks, arrays, strict=True)]
