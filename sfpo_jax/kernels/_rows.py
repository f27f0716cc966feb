"""Leaves of any shape as a few arrays of equal rows, and back.

A bucket is a layout, as `collectives.plan_buckets` plans it: which run of which leaf
fills which rows. It is what the compressors see of a tree of parameters.
"""

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")


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

    def first_rows(self) -> list[int]:
        """The row where each piece begins."""
        counts = [-(-piece.length // self.width) for piece in self.pieces]
        return [sum(counts[:i]) for i in range(len(counts))]

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

    def pack(
        self, leaves: Sequence[jax.Array] | Mapping[int, jax.Array]
    ) -> tuple[jax.Array, ...]:
        """All leaves (any shapes, this bucket's used) -> [rows, width] a group."""
        return tuple(_pack_group(group, leaves) for group in self.groups)

    def of(self, everything: Sequence[T]) -> list[T]:
        """This bucket's of one thing for each leaf; [] of none."""
        return [everything[i] for i in self.leaves] if everything else []

    def pack_own(self, own: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """`pack` of this bucket's leaves alone, in the order of `leaves`."""
        return self.pack(dict(zip(self.leaves, own, strict=True)))

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


def _pack_group(
    group: RowGroup, leaves: Sequence[jax.Array] | Mapping[int, jax.Array]
) -> jax.Array:
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
