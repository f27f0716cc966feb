"""The layout on the wire: nothing lost, nothing twice, few groups, few bytes."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfpo_jax import compression
from sfpo_jax.collectives import Bucket, plan_buckets
from sfpo_jax.compression import Compressor

SPARSE = compression.sparse_sign(0.1, 64)
COMPRESSORS = [
    compression.sign(64),
    # Its format is found by trying all: once a width is enough.
    SPARSE._replace(row_bytes=cache(SPARSE.row_bytes)),
    compression.int8(16),
    compression.identity(),
]
RANKS = [1, 2, 3, 4, 8]
MANY = 1 << 40

sizes_of_leaves = st.lists(
    st.one_of(
        st.integers(1, 200), st.sampled_from([1, 7, 8, 9, 63, 64, 65, 997, 4096])
    ),
    min_size=1,
    max_size=12,
)
plans = (sizes_of_leaves, st.sampled_from(COMPRESSORS), st.sampled_from(RANKS))


def tree_of_300() -> list[int]:
    """A transformer's leaves: a few matrices, and biases and scales in their hundreds.

    Returns:
      Sizes from 1 to 1,048,576, 300 of them.
    """
    layer = [64**2] * 4 + [64 * 256] * 2 + [64] * 5 + [256, 197, 1]
    return [*layer * 21, 1024**2, 1024, 768, 1000, 13, 7]


def row_counts(bucket: Bucket) -> list[list[int]]:
    """Live entries of each row, by the pieces: whole rows, then what is left."""
    counts = []
    for group in bucket.groups:
        found: list[int] = []
        for piece in group.pieces:
            left = piece.length
            while left > 0:
                found.append(min(left, group.width))
                left -= group.width
        counts.append(found + [0] * (group.rows - len(found)))
    return counts


def payload_bytes(buckets: Sequence[Bucket], compressor: Compressor) -> int:
    groups = [group for bucket in buckets for group in bucket.groups]
    return sum(group.rows * compressor.row_bytes(group.width) for group in groups)


@given(*plans, st.sampled_from([1, 100, 1000, MANY]))
def test_every_entry_has_one_place(
    sizes: list[int], compressor: Compressor, ranks: int, bucket_entries: int
) -> None:
    buckets = plan_buckets(sizes, compressor, ranks, bucket_entries)
    assert [i for b in buckets for i in b.leaves] == [*range(len(sizes))]
    covered: Counter[tuple[int, int]] = Counter()
    for bucket in buckets:
        assert bucket.sizes == tuple(sizes[i] for i in bucket.leaves)
        for group in bucket.groups:
            assert group.rows % ranks == 0
            assert group.width % compressor.alignment == 0
            assert 0 < group.width <= compressor.block_size
            for leaf, start, length in group.pieces:
                assert leaf in bucket.leaves
                # Blocks are those of the leaf alone, whatever row they lie in.
                assert start % compressor.block_size == 0
                assert length <= group.width or group.width == compressor.block_size
                covered.update((leaf, i) for i in range(start, start + length))
        for group, rows in zip(bucket.groups, row_counts(bucket), strict=True):
            assert len(rows) == group.rows
    assert covered == Counter((i, j) for i, n in enumerate(sizes) for j in range(n))


@given(*plans, st.integers(1, 3000))
def test_buckets_close_when_they_are_full(
    sizes: list[int], compressor: Compressor, ranks: int, bucket_entries: int
) -> None:
    buckets = plan_buckets(sizes, compressor, ranks, bucket_entries)
    for bucket in buckets[:-1]:
        assert sum(bucket.sizes) >= bucket_entries > sum(bucket.sizes[:-1])
    assert sum(buckets[-1].sizes[:-1]) < bucket_entries


def fewest_bytes(sizes: Sequence[int], compressor: Compressor, ranks: int) -> int:
    """By trial of every choice of up to four widths; a block takes the next wider."""
    blocks = []
    for size in sizes:
        blocks += [compressor.block_size] * (size // compressor.block_size)
        if tail := size % compressor.block_size:
            blocks.append(-(-tail // compressor.alignment) * compressor.alignment)
    every, best = sorted(set(blocks)), MANY
    for count in range(1, 5):
        for widths in itertools.combinations(every, count):
            if widths[-1] != every[-1]:
                continue
            rows = Counter(min(w for w in widths if w >= b) for b in blocks)
            padded = {w: -(-n // ranks) * ranks for w, n in rows.items()}
            total = sum(n * compressor.row_bytes(w) for w, n in padded.items())
            best = min(best, total)
    return best


@given(*plans)
def test_no_choice_of_widths_sends_less(
    sizes: list[int], compressor: Compressor, ranks: int
) -> None:
    buckets = plan_buckets(sizes, compressor, ranks, MANY)
    assert payload_bytes(buckets, compressor) == fewest_bytes(sizes, compressor, ranks)


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize(
    "compressor",
    [compression.sign(), compression.sparse_sign(0.1), compression.int8()],
    ids=lambda c: c.name,
)
def test_300_leaves_make_few_groups_and_little_waste(
    compressor: Compressor, ranks: int
) -> None:
    sizes = tree_of_300()
    assert len(sizes) == 300
    (bucket,) = plan_buckets(sizes, compressor, ranks, MANY)
    assert len(bucket.groups) <= 4
    # Nothing is sent for what each leaf would not have sent alone, but for rows that
    # make a group divisible and for short rows widened to the next width.
    alone = sum(
        count * compressor.payload_bytes(n) for n, count in Counter(sizes).items()
    )
    widest = max(compressor.row_bytes(group.width) for group in bucket.groups)
    padding = (ranks - 1) * len(bucket.groups) * widest
    assert payload_bytes([bucket], compressor) <= 1.02 * alone + padding


def test_no_leaves_make_no_bucket() -> None:
    assert plan_buckets([], COMPRESSORS[0], 8, MANY) == ()


TREES = {
    "one entry": [(1,)],
    "scalars and primes": [(), (7,), (), (2, 3), (5, 13), (997,), (1, 1)],
    "whole blocks": [(64,), (128,), (8, 8)],
    "whole and short blocks": [(200,), (65,), (63,), (64, 2), (31,)],
    "many": [(n % 23 + 1,) for n in range(30)],
}


@pytest.mark.parametrize(
    ("name", "ranks"), [*((name, 8) for name in TREES), ("whole and short blocks", 1)]
)
def test_leaves_survive(name: str, ranks: int) -> None:
    shapes = TREES[name]
    ends = np.cumsum([0, *map(math.prod, shapes)])
    leaves = [
        np.arange(start + 1, end + 1, dtype=np.float32).reshape(shape)
        for start, end, shape in zip(ends, ends[1:], shapes, strict=False)
    ]
    sizes = [x.size for x in leaves]
    buckets = plan_buckets(sizes, COMPRESSORS[0], ranks, 300)
    packed = jax.jit(lambda x: [b.pack(x) for b in buckets])(leaves)
    for bucket, rows in zip(buckets, packed, strict=True):
        for group, array, live in zip(bucket.groups, rows, bucket.live(), strict=True):
            assert array.shape == live.shape == (group.rows, group.width)
            # Every entry of a leaf is positive here, all else is zero.
            np.testing.assert_array_equal(np.asarray(array) > 0, live)
        counts = [np.asarray(live).sum(1).tolist() for live in bucket.live()]
        assert counts == row_counts(bucket)
        unpacked = jax.jit(partial(Bucket.unpack, bucket))(rows)
        for leaf, found in zip(bucket.leaves, unpacked, strict=True):
            np.testing.assert_array_equal(found, leaves[leaf].ravel())
