"""The largest entries of each block, in bfloat16."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from sfpo_jax._validate import check_range
from sfpo_jax.compression._base import Compressor, check_block_size
from sfpo_jax.compression._cast import BFLOAT16_MAX
from sfpo_jax.compression._support import (
    place,
    positions,
    select_support,
    slots,
    take,
)


class TopKPayload(NamedTuple):
    """The k largest entries of blocks."""

    values: jax.Array  # bfloat16[r, k]
    indices: jax.Array  # uint16[r, k], local to the block; the width where unused


def top_k(density: float, block_size: int = 2048) -> Compressor:
    """The largest `density` of each block: 32 * density bits an entry.

    Args:
      density: share of entries kept in each block, in (0, 1].
      block_size: entries a block, at most 65,528 (indices are 16 bits).

    Returns:
      The compressor; ties go to the lower index, a block keeps at least one entry.

    Example:
      >>> import jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> compressor = sfpo.compression.top_k(density=0.5)
      >>> compressor.decompress(
      ...     compressor.compress(jnp.array([1.0, -3.0, 2.0, 0.0])), 4
      ... )
      Array([ 0., -3.,  2.,  0.], dtype=float32)
    """
    check_range(
        "density", density, 0.0, 1.0, "the share of entries sent", open_low=True
    )
    check_block_size(block_size, 8, limit=2**16 - 8)

    def encode(rows: jax.Array, live: jax.Array) -> TopKPayload:
        support = select_support(rows, live, density)
        index = positions(support, slots(density, rows.shape[-1]))
        values = jnp.where(index < rows.shape[-1], take(rows, index), 0)
        values = jnp.clip(values, -BFLOAT16_MAX, BFLOAT16_MAX)
        return TopKPayload(values.astype(jnp.bfloat16), index.astype(jnp.uint16))

    def decode(payload: TopKPayload, live: jax.Array) -> jax.Array:
        values = payload.values.astype(jnp.float32)
        rows = place(values, payload.indices.astype(jnp.int32), live.shape[-1])
        return jnp.where(live, rows, 0)

    return Compressor(
        name=f"top_k({density:g}, {block_size})",
        block_size=block_size,
        alignment=8,
        encode=encode,
        decode=decode,
        row_bytes=lambda width: 4 * slots(density, width),
    )
