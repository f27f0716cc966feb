"""The layout on the wire: leaves of any shape in a few arrays of equal rows.

Each leaf is cut into blocks of its own; blocks of several leaves then lie together as
rows of one array, because 300 leaves must not make 300 collectives. A leaf's last block
is short, and small leaves are nothing but a short block: giving each a full row would
send mostly padding. Rows therefore come in a few widths, the rows of each divisible by
the number of ranks. Sorted by length, the blocks are cut into runs that share the width
of their longest, at the cuts that send the fewest bytes.
"""

from collections.abc import Sequence

import jax
import numpy as np

from sfpo_jax.compression import Compressor
from sfpo_jax.kernels import Bucket, Piece, RowGroup

# Each width is one more compiled encode and decode; a fifth saves under 1 % of bytes.
_MAX_WIDTHS = 4


@jax.tree_util.register_static
class WireLayout:
    """How leaves lie on the wire, for any number of ranks; a pytree without leaves.

    Args:
      sizes: entries of each leaf, all positive.
      compressor: whose blocks and row sizes decide the layout.
      bucket_entries: entries at which a bucket is closed.
    """

    def __init__(
        self, sizes: Sequence[int], compressor: Compressor, bucket_entries: int
    ) -> None:
        self._sizes, self._compressor = tuple(sizes), compressor
        self._entries = bucket_entries

    def buckets(self, ranks: int) -> tuple[Bucket, ...]:
        """`plan_buckets` for so many ranks."""
        return plan_buckets(self._sizes, self._compressor, ranks, self._entries)

    def _key(self) -> tuple[object, ...]:
        # All that the layout depends on; functions made twice are never equal.
        codec = self._compressor
        block = codec.block_size
        size = codec.row_bytes(block), codec.alignment
        return (self._sizes, codec.name, block, size, self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, WireLayout) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())


def plan_buckets(
    sizes: Sequence[int], compressor: Compressor, ranks: int, bucket_entries: int
) -> tuple[Bucket, ...]:
    """Groups leaves, in order, into buckets of at least `bucket_entries` but the last.

    Args:
      sizes: entries of each leaf, all positive.
      compressor: whose blocks and row sizes decide the layout.
      ranks: every group's rows are a multiple of it.
      bucket_entries: entries at which a bucket is closed.

    Returns:
      The buckets; every leaf is in exactly one.
    """
    buckets: list[Bucket] = []
    open_leaves: list[int] = []
    total = 0
    for leaf, size in enumerate(sizes):
        open_leaves.append(leaf)
        total += size
        if total >= bucket_entries or leaf == len(sizes) - 1:
            groups = _plan_groups(open_leaves, sizes, compressor, ranks)
            chosen = tuple(sizes[i] for i in open_leaves)
            buckets.append(Bucket(tuple(open_leaves), chosen, groups))
            open_leaves, total = [], 0
    return tuple(buckets)


def _plan_groups(
    leaves: Sequence[int], sizes: Sequence[int], compressor: Compressor, ranks: int
) -> tuple[RowGroup, ...]:
    block = compressor.block_size
    pieces: dict[int, list[Piece]] = {}  # by the width that would fit exactly
    for leaf in leaves:
        whole = sizes[leaf] // block * block
        if whole:
            pieces.setdefault(block, []).append(Piece(leaf, 0, whole))
        if tail := sizes[leaf] - whole:
            width = -(-tail // compressor.alignment) * compressor.alignment
            pieces.setdefault(width, []).append(Piece(leaf, whole, tail))
    widths = sorted(pieces)
    counts = [sum(-(-p.length // w) for p in pieces[w]) for w in widths]
    groups = []
    for first, last in _cheapest_split(widths, counts, compressor, ranks):
        inside = [piece for w in widths[first : last + 1] for piece in pieces[w]]
        rows = _padded(sum(counts[first : last + 1]), ranks)
        groups.append(RowGroup(widths[last], rows, tuple(inside)))
    return tuple(groups)


def _padded(rows: int, ranks: int) -> int:
    return -(-rows // ranks) * ranks


def _cheapest_split(
    widths: Sequence[int], counts: Sequence[int], compressor: Compressor, ranks: int
) -> list[tuple[int, int]]:
    """Cuts the sorted widths into runs (first, last) of the fewest bytes in all.

    Every run takes the width of its last. Dynamic programming over (runs, end).
    """
    row_bytes = [compressor.row_bytes(w) for w in widths]
    before = np.concatenate([[0], np.cumsum(counts)])

    def cost(first: int, last: int) -> int:
        rows = int(before[last + 1] - before[first])
        return _padded(rows, ranks) * row_bytes[last]

    count = len(widths)
    best: list[tuple[int, list[tuple[int, int]]]] = [
        (cost(0, last), [(0, last)]) for last in range(count)
    ]
    for _ in range(_MAX_WIDTHS - 1):
        improved = list(best)
        for last in range(count):
            for cut in range(1, last + 1):
                bytes_, runs = best[cut - 1]
                total = bytes_ + cost(cut, last)
                if total < improved[last][0]:
                    improved[last] = (total, [*runs, (cut, last)])
        best = improved
    return best[-1][1]
