"""One bit an entry: the sign, and for each block the mean magnitude.

mean|x| is the scale that minimises the squared error of ``scale * sign(x)``, and the
only common choice that is contractive on every block (Karimireddy et al. 2019, "Error
Feedback Fixes SignSGD", https://arxiv.org/abs/1901.09847).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sfpo_jax.compression._base import Compressor, check_block_size
from sfpo_jax.kernels import pack_bits, packed_size, unpack_bits


class SignPayload(NamedTuple):
    """Signs of blocks of w entries."""

    signs: jax.Array  # uint8[r, w / 8], bit 1 = negative
    scales: jax.Array  # float[r]


def sign(block_size: int = 2048) -> Compressor:
    """Signs with one float32 scale a block: 1 + 32 / block_size bits an entry.

    Args:
      block_size: entries a scale, a multiple of 8.

    Returns:
      The compressor. A sign is bit 31 of the float, so -0.0 is negative; a block of
      zeros has scale 0 and comes back as exactly zero.

    Example:
      >>> import jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> compressor = sfpo.compression.sign()
      >>> x = jnp.array([1.0, -2.0, 3.0])
      >>> compressor.decompress(compressor.compress(x), 3)
      Array([ 2., -2.,  2.], dtype=float32)
      >>> compressor.payload_bytes(1_000_000)
      127140
    """
    check_block_size(block_size, 8)
    return Compressor(
        name=f"sign({block_size})",
        block_size=block_size,
        alignment=8,
        encode=_encode,
        decode=_decode,
        row_bytes=lambda width: packed_size(width) + 4,
    )


def _encode(rows: jax.Array, live: jax.Array) -> SignPayload:
    scales = mean_magnitude(rows, live)
    return SignPayload(pack_bits(jnp.signbit(rows)), scales)


def _decode(payload: SignPayload, live: jax.Array) -> jax.Array:
    negative = unpack_bits(payload.signs, live.shape[-1])
    return with_sign(payload.scales, negative, live)


def mean_magnitude(rows: jax.Array, live: jax.Array) -> jax.Array:
    """float[r]: mean |x| over the live entries of each row, 0 where there are none."""
    total = jnp.sum(jnp.where(live, jnp.abs(rows), 0), axis=-1)
    count = jnp.maximum(jnp.sum(live, axis=-1, dtype=jnp.int32), 1)
    return total / count.astype(rows.dtype)


def with_sign(scales: jax.Array, negative: jax.Array, live: jax.Array) -> jax.Array:
    """float[r, w]: +-scale where live, exactly zero elsewhere."""
    scales = scales[:, None]
    return jnp.where(live, jnp.where(negative, -scales, scales), 0)
