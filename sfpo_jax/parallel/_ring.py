"""Pieces that go round a ring of ranks while the products of others are computed.

A rank sends to its neighbours only, so all links of the ring carry equal loads and
nobody ever holds the whole array. A rank's part is cut into pieces, because a transfer
can hide under a product only if there is another piece to multiply meanwhile. Every
other piece goes the other way round: a link has two directions, and a compiler does not
join two transfers that go different ways into a large one.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sfpo_jax.collectives import widen
from sfpo_jax.parallel._leafwise import after


class Ring(NamedTuple):
    """The ranks of a mesh axis, each of which sends to its neighbours."""

    axis_name: str
    size: int  # ranks
    pieces: int  # into which each rank's rows are cut
    depth: int  # pieces in flight at most

    def send(self, x: jax.Array, piece: int) -> jax.Array:
        """What the rank behind holds of this piece."""
        way = _way(piece)
        # Of two ranks both ways are the same pairs: the order tells them apart.
        pairs = [(rank, (rank + way) % self.size) for rank in range(self.size)][::way]
        return lax.ppermute(x, self.axis_name, pairs)

    def rank_behind(self, hops: int, piece: int) -> jax.Array:
        """The rank from which a piece gets here in so many hops, int32 scalar."""
        ahead = -hops * _way(piece) % self.size
        return lax.rem(lax.axis_index(self.axis_name) + ahead, jnp.int32(self.size))

    def cuts(self, rows: int) -> list[tuple[int, int]]:
        """(first row, rows) of each piece; their sizes differ by one at most.

        Raises:
          ValueError: fewer rows than pieces.
        """
        if rows < self.pieces:
            raise ValueError(
                f"`chunk_size` cuts the rows of each rank into {self.pieces} pieces, "
                f"got {rows} rows: lower chunk_size to "
                f"{max(rows, 1) * self.size} or less, or take longer sequences"
            )
        bounds = [rows * i // self.pieces for i in range(self.pieces + 1)]
        return [(a, b - a) for a, b in itertools.pairwise(bounds)]


def rotate(
    ring: Ring,
    x: jax.Array,
    multiply: Callable[[jax.Array, jax.Array, int], Any],
    fold: Callable[[Any, Any, jax.Array, int], Any],
    carry: Any,
) -> Any:
    """Brings every rank's rows past every rank, a piece at a time.

    Args:
      ring: the ranks.
      x: this rank's rows, [..., l, D].
      multiply: (piece [..., r, D], rank it comes from, its first row in that rank's
        rows) -> products.
      fold: (carry, products, rank, first row) -> carry.
      carry: the first carry.

    Returns:
      The last carry, after pieces * size products and pieces * (size - 1) transfers.
    """
    cuts = ring.cuts(x.shape[-2])
    held = [lax.slice_in_dim(x, a, a + n, axis=-2) for a, n in cuts]
    transfers = ring.pieces * (ring.size - 1)
    for place in range(min(ring.depth, transfers)):
        held.append(ring.send(held[place], place % ring.pieces))
    products: Any = ()
    for turn in range(ring.pieces * ring.size):
        hops, piece = divmod(turn, ring.pieces)
        owner, first = ring.rank_behind(hops, piece), cuts[piece][0]
        # In turn: products that wait for nothing are joined into a large one.
        products = multiply(after(held[turn], products), owner, first)
        carry = fold(carry, products, owner, first)
        place = turn + ring.depth
        if place < transfers:
            # One more may leave: the oldest in flight is here and this product done.
            x = after(held[place], (held[turn + ring.pieces], products))
            held.append(ring.send(x, place % ring.pieces))
    return carry


def reduce(
    ring: Ring,
    multiply: Callable[[jax.Array, int, int, Any], jax.Array],
    rows: int,
    dtype: Any,
) -> jax.Array:
    """Sums over ranks that go round and end where their rows belong.

    Args:
      ring: the ranks.
      multiply: (rank, first row in its rows, rows, what to wait for) -> this rank's
        part of the sum for these rows, [..., r, D], in float32 or wider.
      rows: l, of each rank.
      dtype: of what travels and of the result.

    Returns:
      The sum for this rank's rows, [..., l, D].
    """
    cuts = ring.cuts(rows)
    transfers = ring.pieces * (ring.size - 1)
    sent: list[jax.Array] = []
    done: list[jax.Array] = []
    part: Any = ()
    for turn in range(ring.pieces * ring.size):
        hops, piece = divmod(turn, ring.pieces)
        # The last rank to add is the one whose rows they are.
        owner = ring.rank_behind(1 + hops, piece)
        part = multiply(owner, *cuts[piece], part)
        total = part
        if hops:
            # A product that adds in place would have to wait for what it adds.
            total = lax.optimization_barrier(part) + widen(sent[turn - ring.pieces])
        total = total.astype(dtype)
        if turn >= transfers:
            done.append(total)
            continue
        if turn >= ring.depth:
            total = after(total, sent[turn - ring.depth])
        sent.append(ring.send(total, piece))
    return jnp.concatenate(done, axis=-2)


def _way(piece: int) -> int:
    return -1 if piece % 2 else 1
