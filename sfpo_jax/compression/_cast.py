"""Compressors that only change the precision of each entry."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sfpo_jax.compression._base import Compressor

# Neither has scales: the block is only the unit that collectives cut at.
_BLOCK_SIZE = 1024
BFLOAT16_MAX = float(jnp.finfo(jnp.bfloat16).max)


class CastPayload(NamedTuple):
    """Entries in another precision."""

    values: jax.Array  # [r, w]


def bfloat16() -> Compressor:
    """Each entry rounded to bfloat16: 16 bits an entry.

    Magnitudes that would round to infinity saturate at the largest finite bfloat16.

    Example:
      >>> import jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> compressor = sfpo.compression.bfloat16()
      >>> compressor.decompress(compressor.compress(jnp.array([1.001])), 1)
      Array([1.], dtype=float32)
    """

    def encode(rows: jax.Array, live: jax.Array) -> CastPayload:
        del live
        rows = jnp.clip(rows, -BFLOAT16_MAX, BFLOAT16_MAX)
        return CastPayload(rows.astype(jnp.bfloat16))

    def decode(payload: CastPayload, live: jax.Array) -> jax.Array:
        return jnp.where(live, payload.values.astype(jnp.float32), 0)

    return Compressor("bfloat16", _BLOCK_SIZE, 1, encode, decode, lambda w: 2 * w)


def identity() -> Compressor:
    """Entries as they are: 32 bits an entry, no error.

    Example:
      >>> import jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> compressor = sfpo.compression.identity()
      >>> compressor.decompress(compressor.compress(jnp.array([0.1])), 1)
      Array([0.1], dtype=float32)
    """

    def encode(rows: jax.Array, live: jax.Array) -> CastPayload:
        del live
        return CastPayload(rows)

    def decode(payload: CastPayload, live: jax.Array) -> jax.Array:
        return jnp.where(live, payload.values, 0)

    return Compressor("identity", _BLOCK_SIZE, 1, encode, decode, lambda w: 4 * w)
