"""The layout on the wire: leaves of any shape in a few arrays of equal rows.

Each leaf is cut into blocks of its own; blocks of several leaves then lie together as
rows of one array, because 300 leaves must not make 300 collectives. A leaf's last block
is short, and small leaves are nothing but a short block: giving each a full row would
send mostly padding. Rows therefore come in a few widths, the rows of each divisible by
the number of ranks. Sorted by length, the blocks are cut into runs that share the width
of their longest, at the cuts that send the fewest bytes.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sfpo_jax.compression import Compressor

# Each width is one more compiled encode and decode; a fifth saves under 1 % of bytes.
_MAX_WIDTHS = 4


class Piece(NamedTuple):
    """A run of one leaf that fills rows: whole blocks, or its short last one."""

    leaf: int
    start: int
    length: int


class RowGroup(NamedTuple):
    """Rows of one width, the pieces first, padding rows last."""

    width: int
    rows: int
    pieces: tuple[Piece, ...]

    def live(self) -> jax.Array:
        """bool[rows, width]: which entries belong to a leaf."""
        lengths = np.zeros(self.rows, np.int32)
        row = 0
        for piece in self.pieces:
            count = -(-piece.length // self.width)
            lengths[row : row + count] = self.width
            lengths[row + count - 1] = piece.length - (count - 1) * self.width
            row += count
        index = jax.lax.broadcasted_iota(jnp.int32, (self.rows, self.width), 1)
        return index < jnp.asarray(lengths)[:, None]


class Bucket(NamedTuple):
    """Leaves that travel together."""

    leaves: tuple[int, ...]  # their places among all leaves
    sizes: tuple[int, ...]  # entries of each
    groups: tuple[RowGroup, ...]

    def live(self) -> tuple[jax.Array, ...]:
        """bool[rows, width] a group: which entries belong to a leaf."""
        return tuple(group.live() for group in self.groups)

    def pack(self, leaves: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """All leaves (any shapes, this bucket's used) -> [rows, width] a group."""
        return tuple(_pack_group(group, leaves) for group in self.groups)

    def unpack(self, rows: Sequence[jax.Array]) -> list[jax.Array]:
        """[rows, width] a group -> flat arrays, one a leaf of this bucket."""
        found: dict[int, list[tuple[int, jax.Array]]] = {i: [] for i in self.leaves}
        for group, array in zip(self.groups, rows, strict=True):
            row = 0
            for piece in group.pieces:
                count = -(-piece.length // group.width)
                part = array[row : row + count].reshape(-1)[: piece.length]
                found[piece.leaf].append((piece.start, part))
                row += count
        # A leaf's short last block may lie in an earlier group than its whole ones.
        parts = [
            [part for _, part in sorted(found[i], key=itemgetter(0))]
            for i in self.leaves
        ]
        return [p[0] if len(p) == 1 else jnp.concatenate(p) for p in parts]


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


def _pack_group(group: RowGroup, leaves: Sequence[jax.Array]) -> jax.Array:
    parts = []
    for piece in group.pieces:
        flat = leaves[piece.leaf].reshape(-1)
        if piece.length != flat.size:
            flat = flat[piece.start : piece.start + piece.length]
        padding = -piece.length % group.width
        if padding:
            flat = jnp.pad(flat, (0, padding))
        parts.append(flat.reshape(-1, group.width))
    missing = group.rows - sum(part.shape[0] for part in parts)
    if missing:
        parts.append(jnp.zeros((missing, group.width), parts[0].dtype))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
