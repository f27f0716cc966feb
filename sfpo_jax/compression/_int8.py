"""Eight bits an entry, scaled by the largest magnitude of its block."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sfpo_jax.compression._base import Compressor, check_block_size


class Int8Payload(NamedTuple):
    """Entries as signed bytes of blocks."""

    values: jax.Array  # int8[r, w], -127 to 127
    scales: jax.Array  # float[r], the magnitude of one unit


def int8(block_size: int = 256) -> Compressor:
    """Linear 8-bit quantisation by the largest magnitude of each block.

    value = round_half_even(x * (1 / scale)) with scale = max|x| * float32(1 / 127). A
    block whose scale would not be a normal float32 is sent as zero: its reciprocal
    overflows, and back ends differ in flushing it. 8 + 32 / block_size bits an entry.

    Args:
      block_size: entries a scale.

    Example:
      >>> import jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> compressor = sfpo.compression.int8()
      >>> compressor.decompress(compressor.compress(jnp.array([127.0, -3.4])), 2)
      Array([127.,  -3.], dtype=float32)
    """
    check_block_size(block_size, 1)

    def encode(rows: jax.Array, live: jax.Array) -> Int8Payload:
        largest = jnp.max(jnp.where(live, jnp.abs(rows), 0), axis=-1)
        scales = largest * np.asarray(1 / 127, rows.dtype)
        smallest = jnp.finfo(rows.dtype).smallest_normal
        # The reciprocal of 4 * smallest normal is still normal.
        is_normal = scales >= 4 * smallest
        scales = jnp.where(is_normal, scales, 0)
        inverse = jnp.where(is_normal, 1 / jnp.where(is_normal, scales, 1), 0)
        units = jnp.round(rows * inverse[:, None])
        values = jnp.clip(jnp.where(live, units, 0), -127, 127).astype(jnp.int8)
        return Int8Payload(values, scales)

    def decode(payload: Int8Payload, live: jax.Array) -> jax.Array:
        values = payload.values.astype(payload.scales.dtype)
        return jnp.where(live, values * payload.scales[:, None], 0)

    return Compressor(
        f"int8({block_size})", block_size, 1, encode, decode, lambda width: width + 4
    )
