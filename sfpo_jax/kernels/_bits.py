"""Booleans to bytes and back, eight to a byte, lowest bit first."""

import jax
import jax.numpy as jnp
import numpy as np

_PLACE = np.arange(8, dtype=np.uint8)


def packed_size(bits: int) -> int:
    """Bytes that hold `bits` booleans."""
    return -(-bits // 8)


def pack_bits(flags: jax.Array) -> jax.Array:
    """Packs bool[..., n] into uint8[..., ceil(n / 8)]; the last byte is zero-filled.

    Example:
      >>> import jax.numpy as jnp
      >>> pack_bits(
      ...     jnp.array([True, False, False, True, False, False, False, False, True])
      ... )
      Array([9, 1], dtype=uint8)
    """
    *lead, count = flags.shape
    size = packed_size(count)
    flags = jnp.pad(flags, [(0, 0)] * len(lead) + [(0, 8 * size - count)])
    bits = flags.reshape(*lead, size, 8).astype(jnp.uint8)
    return jnp.sum(bits << _PLACE.reshape([1] * len(lead) + [1, 8]), -1, jnp.uint8)


def unpack_bits(packed: jax.Array, count: int) -> jax.Array:
    """Unpacks uint8[..., m] into bool[..., count], count <= 8 * m."""
    *lead, size = packed.shape
    bits = packed[..., None] >> _PLACE.reshape([1] * len(lead) + [1, 8])
    return (bits.reshape(*lead, 8 * size)[..., :count] & np.uint8(1)) > 0
