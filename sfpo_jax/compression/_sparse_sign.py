r"""Signs of the largest entries only: one bit where it counts, nothing elsewhere.

Plain signs give every small entry the scale of its block, and error feedback then
spends its time taking that back. Here a block sends the signs of its support, the
`density` largest magnitudes, with their mean as the scale, and the support itself in
the smallest of three formats, decided at build time by real size:

=========== ======================================== =====================
format      what is sent for k of w entries          bits
=========== ======================================== =====================
sub-block   Elias-Fano: the index within a sub-block k l + (k + w / 2^l) + k
            of 2^l, the sub-blocks in unary; signs
bitmap      one bit an entry, then the signs         w + k
dense       zero, plus or minus, five to a byte      1.6 w
=========== ======================================== =====================

The Elias-Fano code (Elias 1974, Fano 1971) costs 0.63 bits an entry at 10 % density,
under one bit up to about 18 %. At density 1 there is no support to send: it is `sign`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sfpo_jax._validate import check_range
from sfpo_jax.compression._base import Compressor, check_block_size
from sfpo_jax.compression._sign import check_relaxation, relaxed_name, sign
from sfpo_jax.compression._support import (
    place,
    positions,
    select_support,
    slots,
    take,
)
from sfpo_jax.kernels import (
    mean_magnitude,
    pack_bits,
    packed_size,
    unpack_bits,
    with_sign,
)


class SparseSignPayload(NamedTuple):
    """Signs of the support of blocks."""

    support: jax.Array  # uint8[r, bytes of the format]
    scales: jax.Array  # float[r]


class _Format(NamedTuple):
    """A code for (support, negative), each bool[r, w]."""

    name: str
    row_bytes: int
    encode: Callable[[jax.Array, jax.Array], jax.Array]
    decode: Callable[[jax.Array], tuple[jax.Array, jax.Array]]


def sparse_sign(
    density: float, block_size: int = 2048, relaxation: float = 1.0
) -> Compressor:
    """Signs of the `density` largest entries of each block, zero elsewhere.

    Args:
      density: share of entries sent in each block, in (0, 1].
      block_size: entries a block, a multiple of 8.
      relaxation: factor on the scale, as in `sign`.

    Returns:
      The compressor; ties go to the lower index, zeros are never sent, a block sends
      at least one entry.

    Example:
      >>> import jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> compressor = sfpo.compression.sparse_sign(density=0.5)
      >>> compressor.decompress(
      ...     compressor.compress(jnp.array([1.0, -3.0, 2.0, 0.0])), 4
      ... )
      Array([ 0. , -2.5,  2.5,  0. ], dtype=float32)
      >>> sfpo.compression.sparse_sign(0.1).payload_bytes(2048) * 8 / 2048
      0.64453125
    """
    check_range(
        "density", density, 0.0, 1.0, "the share of entries sent", open_low=True
    )
    check_block_size(block_size, 8)
    check_relaxation(relaxation)
    if density == 1.0:
        return sign(block_size, relaxation)

    def encode(rows: jax.Array, live: jax.Array) -> SparseSignPayload:
        support = select_support(rows, live, density)
        scales = mean_magnitude(rows, support) * np.asarray(relaxation, rows.dtype)
        code = smallest_format(density, rows.shape[-1])
        return SparseSignPayload(code.encode(support, jnp.signbit(rows)), scales)

    def decode(payload: SparseSignPayload, live: jax.Array) -> jax.Array:
        code = smallest_format(density, live.shape[-1])
        support, negative = code.decode(payload.support)
        return with_sign(payload.scales, negative, live & support)

    return Compressor(
        name=f"sparse_sign({density:g}, {block_size}{relaxed_name(relaxation)})",
        block_size=block_size,
        alignment=8,
        encode=encode,
        decode=decode,
        row_bytes=lambda width: smallest_format(density, width).row_bytes + 4,
    )


@functools.cache
def smallest_format(density: float, width: int) -> _Format:
    """The format of the fewest bytes for blocks of `width`."""
    count = slots(density, width)
    formats = [_bitmap(count, width), _ternary(width)]
    formats += [_sub_block(count, width, bits) for bits in range(1, 12)]
    return min(formats, key=lambda code: code.row_bytes)


def _bitmap(count: int, width: int) -> _Format:
    """The support as a bitmap, then its signs in order."""
    mask_bytes = packed_size(width)

    def encode(support: jax.Array, negative: jax.Array) -> jax.Array:
        signs = take(negative, positions(support, count))
        return jnp.concatenate([pack_bits(support), pack_bits(signs)], axis=-1)

    def decode(code: jax.Array) -> tuple[jax.Array, jax.Array]:
        support = unpack_bits(code[:, :mask_bytes], width)
        signs = unpack_bits(code[:, mask_bytes:], count)
        rank = jnp.cumsum(support, axis=-1, dtype=jnp.int32) - 1
        return support, take(signs, jnp.maximum(rank, 0))

    return _Format("bitmap", mask_bytes + packed_size(count), encode, decode)


def _ternary(width: int) -> _Format:
    """0, plus or minus for each entry, five to a byte (3**5 = 243)."""
    size = -(-width // 5)
    powers = np.array([1, 3, 9, 27, 81], np.uint8)

    def encode(support: jax.Array, negative: jax.Array) -> jax.Array:
        digits = support.astype(jnp.uint8) + (support & negative).astype(jnp.uint8)
        digits = jnp.pad(digits, ((0, 0), (0, 5 * size - width)))
        digits = digits.reshape(digits.shape[0], size, 5)
        return jnp.sum(digits * powers[None, None, :], axis=-1, dtype=jnp.uint8)

    def decode(code: jax.Array) -> tuple[jax.Array, jax.Array]:
        digits = (code[:, :, None] // powers[None, None, :]) % np.uint8(3)
        digits = digits.reshape(code.shape[0], 5 * size)[:, :width]
        return digits > 0, digits > 1

    return _Format("dense", size, encode, decode)


def _sub_block(count: int, width: int, low_bits: int) -> _Format:
    """Elias-Fano: `low_bits` of each index, the sub-blocks in unary, the signs.

    The i-th entry of the support, in sub-block b, sets bit b + i of the unary part;
    slots left over set none.
    """
    unary = count + ((width - 1) >> low_bits)
    low_bytes, unary_bytes = packed_size(count * low_bits), packed_size(unary)
    shifts = np.arange(low_bits, dtype=np.int32)

    def encode(support: jax.Array, negative: jax.Array) -> jax.Array:
        index = positions(support, count)
        low = (index[:, :, None] >> shifts[None, None, :]) & 1
        low = pack_bits(low.reshape(index.shape[0], count * low_bits) > 0)
        slot = jax.lax.broadcasted_iota(jnp.int32, index.shape, 1)
        bit = jnp.where(index < width, (index >> low_bits) + slot, unary)
        marks = place(jnp.ones_like(bit, dtype=jnp.uint8), bit, unary)
        signs = pack_bits(take(negative, index))
        return jnp.concatenate([low, pack_bits(marks > 0), signs], axis=-1)

    def decode(code: jax.Array) -> tuple[jax.Array, jax.Array]:
        low_code, unary_code, sign_code = jnp.split(
            code, [low_bytes, low_bytes + unary_bytes], axis=-1
        )
        low = unpack_bits(low_code, count * low_bits).astype(jnp.int32)
        low = low.reshape(code.shape[0], count, low_bits) << shifts[None, None, :]
        low = jnp.sum(low, axis=-1, dtype=jnp.int32)
        bit = positions(unpack_bits(unary_code, unary), count)
        slot = jax.lax.broadcasted_iota(jnp.int32, bit.shape, 1)
        index = jnp.where(bit < unary, ((bit - slot) << low_bits) + low, width)
        negative = unpack_bits(sign_code, count).astype(jnp.uint8)
        digits = place(negative + np.uint8(1), index, width)
        return digits > 0, digits > 1

    size = low_bytes + unary_bytes + packed_size(count)
    return _Format(f"sub-block of {1 << low_bits}", size, encode, decode)
