"""The contract of every compressor: rows of entries to a payload and back.

A tensor of n entries is cut into blocks of `block_size`; the last one may be short.
Blocks of one width lie together as rows, and a payload is a pytree whose leaves are all
led by that row axis: a collective may cut it between any two blocks. What is no entry
of the tensor (padding), or must not be sent (a dead entry), is not `live`: it enters no
scale and comes back as exactly zero.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Payload = Any


class Compressor(NamedTuple):
    """How an array is put on the wire: pure functions, static sizes.

    Attributes:
      name: what it is called in messages and reports.
      block_size: entries a block, the unit of scales and of the cuts of a collective.
      alignment: a row's width is a multiple of this.
      encode: (rows: float[r, w], live: bool[r, w]) -> payload, every leaf led by r.
        Live entries must be finite, and so must the sum of their magnitudes.
      decode: (payload, live: bool[r, w]) -> float[r, w], zero where not live.
      row_bytes: (w: int) -> bytes of one encoded float32 row.
      relaxation: of a compressor whose payload is a `SignPayload`, the factor on its
        scales: fused kernels can stand for it. None for all others.
    """

    name: str
    block_size: int
    alignment: int
    encode: Callable[[jax.Array, jax.Array], Payload]
    decode: Callable[[Payload, jax.Array], jax.Array]
    row_bytes: Callable[[int], int]
    relaxation: float | None = None

    def compress(self, x: jax.Array) -> Payload:
        """float[n] -> payload; every leaf is led by the block axis."""
        if x.ndim != 1:
            raise ValueError(f"`x` must have one axis, got shape {x.shape}: ravel it.")
        rows, width = self._shape(x.size)
        padded = jnp.pad(x, (0, rows * width - x.size)).reshape(rows, width)
        return self.encode(padded, self._live(x.size))

    def decompress(self, payload: Payload, n: int) -> jax.Array:
        """payload of n entries -> float[n], what the receiver knows of the array."""
        return self.decode(payload, self._live(n)).reshape(-1)[:n]

    def payload_bytes(self, n: int) -> int:
        """Bytes of the payload of float32[n]: the sum over its leaves."""
        rows, width = self._shape(n)
        return rows * self.row_bytes(width)

    def _shape(self, n: int) -> tuple[int, int]:
        width = min(self.block_size, max(round_up(n, self.alignment), self.alignment))
        return -(-n // width), width

    def _live(self, n: int) -> jax.Array:
        rows, width = self._shape(n)
        return (jnp.arange(rows * width) < n).reshape(rows, width)


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def check_block_size(block_size: int, alignment: int, limit: int = 2**24) -> None:
    """Raises ValueError unless it is a positive multiple of `alignment`."""
    is_int = isinstance(block_size, int)
    if not is_int or block_size % alignment or not 0 < block_size <= limit:
        raise ValueError(
            f"`block_size` must be a multiple of {alignment} between {alignment} and "
            f"{limit}, got {block_size}."
        )
