"""What a receiver knows of one block, from the compressors' descriptions.

NumPy in float64 on blocks without padding: what a block has not cannot enter a scale.
"""

from collections.abc import Callable

import numpy as np

from tests.oracle import Codec, largest

Block = Callable[[np.ndarray], np.ndarray]


def by_block(block_size: int, known: Block) -> Block:
    """`known` of each run of `block_size` entries, the last one short."""

    def whole(x: np.ndarray) -> np.ndarray:
        blocks = [x[i : i + block_size] for i in range(0, x.size, block_size)]
        return np.concatenate([known(b) for b in blocks]) if blocks else np.zeros(0)

    return whole


def signs(density: float = 1.0) -> Block:
    """The mean magnitude of the support, with the sign of each of its entries."""

    def known(x: np.ndarray) -> np.ndarray:
        codec = Codec(density, block=x.size)
        return codec(x.astype(np.float64), np.ones(x.size, bool))

    return known


def top_k(density: float) -> Block:
    """The round(density n) largest, at least one, as bfloat16."""

    def known(x: np.ndarray) -> np.ndarray:
        count = max(1, int(np.round(np.float32(density) * np.float32(x.size))))
        return np.where(largest(x, count), bfloat16(x), 0)

    return known


def int8(x: np.ndarray) -> np.ndarray:
    """Whole 127ths of the largest magnitude."""
    unit = np.max(np.abs(x.astype(np.float64))) / 127
    return np.rint(x / unit) * unit if unit else np.zeros(x.size)


def bfloat16(x: np.ndarray) -> np.ndarray:
    """float32 cut to its upper 16 bits, half to even; never infinite."""
    bits = x.astype(np.float32).view(np.uint32).astype(np.uint64)
    magnitude, negative = bits & 0x7FFFFFFF, bits >> 31
    rounded = (magnitude + 0x7FFF + (magnitude >> 16 & 1)) & 0xFFFF0000
    rounded = np.minimum(rounded, 0x7F7F0000) | negative << 31
    return rounded.astype(np.uint32).view(np.float32).astype(np.float64)


def identity(x: np.ndarray) -> np.ndarray:
    """The block itself."""
    return x.astype(np.float64)
