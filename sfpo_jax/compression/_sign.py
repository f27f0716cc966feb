"""One bit an entry: the sign, and for each block the mean magnitude.

mean|x| is the scale that minimises the squared error of ``scale * sign(x)``, and the
only common choice that is contractive on every block (Karimireddy et al. 2019, "Error
Feedback Fixes SignSGD", https://arxiv.org/abs/1901.09847).

Error feedback lets a scale be larger than that: with w times it, what is left of a
block of n entries is ||x||^2 - w (2 - w) n mean|x|^2, less than ||x||^2 for every x as
long as 0 < w < 2. As over-relaxation does for linear systems, w = 1.5 empties the
residuals of the large entries sooner, and a residual is an update that comes late.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sfpo_jax._validate import check_range
from sfpo_jax.compression._base import Compressor, check_block_size
from sfpo_jax.kernels import (
    mean_magnitude,
    pack_bits,
    packed_size,
    unpack_bits,
    with_sign,
)


class SignPayload(NamedTuple):
    """Signs of blocks of w entries."""

    signs: jax.Array  # uint8[r, w / 8], bit 1 = negative
    scales: jax.Array  # float[r]


def sign(block_size: int = 2048, relaxation: float = 1.0) -> Compressor:
    """Signs with one float32 scale a block: 1 + 32 / block_size bits an entry.

    Args:
      block_size: entries a scale, a multiple of 8.
      relaxation: factor on the scale, in (0, 2). 1 gives the smallest error of a single
        block; with error feedback 1.5 converges faster.

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
    check_relaxation(relaxation)

    def encode(rows: jax.Array, live: jax.Array) -> SignPayload:
        scales = mean_magnitude(rows, live) * np.asarray(relaxation, rows.dtype)
        return SignPayload(pack_bits(jnp.signbit(rows)), scales)

    return Compressor(
        name=f"sign({block_size}{relaxed_name(relaxation)})",
        block_size=block_size,
        alignment=8,
        encode=encode,
        decode=_decode,
        row_bytes=lambda width: packed_size(width) + 4,
        relaxation=relaxation,
    )


def _decode(payload: SignPayload, live: jax.Array) -> jax.Array:
    negative = unpack_bits(payload.signs, live.shape[-1])
    return with_sign(payload.scales, negative, live)


def check_relaxation(relaxation: float) -> None:
    """Raises ValueError where a scale would add to the error rather than take away."""
    check_range(
        "relaxation",
        relaxation,
        0.0,
        2.0,
        "the factor on the scale, and from 2 on the error would not shrink",
        open_low=True,
        open_high=True,
    )


def relaxed_name(relaxation: float) -> str:
    """What the name of a compressor says of its relaxation."""
    return "" if relaxation == 1.0 else f", relaxation={relaxation:g}"
