"""Layouts and random values: such that native kernel and twin round them alike.

Where a bit depends on a rounding, the two may differ: XLA contracts products and sums.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sfpo_jax.kernels import Bucket, Piece, Quantized, RowGroup, block_size

Rng = np.random.Generator
# Short ones, one of several chunks, and one that is no multiple of anything.
SIZES = [(64,), (3, 1000), (5, 64, 7), (200_003, 17)]


def floats(rng: Rng, shape: Any) -> np.ndarray:
    """Multiples of 1/8 of both signs, zeros among them: exact in sums and in halves."""
    return (rng.integers(-40, 41, shape) / 8).astype(np.float32)


def any_floats(rng: Rng, shape: Any) -> np.ndarray:
    """The same, and subnormal, huge, infinite and undefined numbers here and there."""
    special = np.array([0.0, -0.0, 1e-42, -3e38, np.inf, -np.inf, np.nan], np.float32)
    x, is_special = floats(rng, shape), rng.random(shape) < 0.05
    return np.where(is_special, rng.choice(special, shape), x).astype(np.float32)


def variance(rng: Rng, shape: Any) -> np.ndarray:
    return np.maximum(floats(rng, shape), 0)


def bucket(sizes: Sequence[int], width: int) -> Bucket:
    """Whole blocks first, short last ones in a group of their own, then padding."""
    whole = [Piece(i, 0, n // width * width) for i, n in enumerate(sizes)]
    rests = [
        Piece(i, piece.length, n - piece.length)
        for i, (n, piece) in enumerate(zip(sizes, whole, strict=True))
    ]
    groups = []
    for pieces in (whole, rests):
        pieces = tuple(piece for piece in pieces if piece.length)
        if pieces:
            wide = max(min(width, piece.length) for piece in pieces)
            wide = -(-wide // 8) * 8
            rows = sum(-(-piece.length // wide) for piece in pieces) + 1
            groups.append(RowGroup(wide, rows, pieces))
    return Bucket(tuple(range(len(sizes))), tuple(sizes), tuple(groups))


def layout(variant: int) -> tuple[tuple[int, ...], Bucket]:
    sizes = tuple(int(np.prod(shape)) for shape in SIZES[: variant % 4 + 1])
    return sizes, bucket(sizes, (64, 256, 1000, 4096)[variant % 4])


def packed(rng: Rng, bucket: Bucket, ranks: int = 1) -> list[np.ndarray]:
    shapes = [(ranks * group.rows, group.width // 8) for group in bucket.groups]
    return [rng.integers(0, 256, shape, np.uint8) for shape in shapes]


def scales(rng: Rng, bucket: Bucket, ranks: int = 1) -> list[np.ndarray]:
    return [np.abs(floats(rng, ranks * group.rows)) for group in bucket.groups]


def moment(rng: Rng, shape: tuple[int, ...], dtype: Any) -> Quantized:
    """Of int8 or uint8, as `quantize` lays it out."""
    block = block_size(shape[-1])
    rows = (*shape[:-1], -(-shape[-1] // block))
    low = -127 if dtype == np.int8 else 0
    codes = rng.integers(low, 128, shape, dtype)
    scales = np.abs(floats(rng, rows)) / 64
    return Quantized(codes, scales.astype(np.float32), block)
