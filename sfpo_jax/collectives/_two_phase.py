"""The compressed mean over one axis, in two phases with error feedback on both sides.

For rank i of N with contribution c_i (the worker error already added), C the
compressor, chunk j of the rows belonging to rank j, and E_j its server error:

    q_i = C(c_i)                          new worker error  e_i = c_i - q_i
    all-to-all: rank j receives chunk j of every q_i, packed
    h_j = mean_i q_i[j] + E_j;  Q_j = C(h_j)   new server error  E_j = h_j - Q_j
    all-gather: every rank receives every Q_j, packed

Every rank decodes the same bytes, so the mean is bit-identical on all of them. A rank
sends 2 (N - 1) / N payloads, whatever N is (Tang et al. 2021, "1-bit Adam",
https://arxiv.org/abs/2102.02888).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sfpo_jax.collectives._axis import AxisName, axis_index, axis_size
from sfpo_jax.compression import Compressor
from sfpo_jax.kernels import Bucket

Rows = tuple[jax.Array, ...]


class CompressedMean(NamedTuple):
    """What one exchange leaves behind; a tuple has one array [rows, width] a group."""

    mean: Rows  # alike on all ranks
    worker_error: Rows
    server_error: Rows  # this rank's rows: [rows / N, width]
    payload: tuple[Any, ...]  # the mean as it came off the wire, all rows


def two_phase_mean(
    compressor: Compressor,
    contributions: Sequence[jax.Array],
    server_error: Sequence[jax.Array] | None,
    live: Sequence[jax.Array],
    axis_name: AxisName,
) -> CompressedMean:
    """Mean of `contributions` over the axis, sent compressed.

    Args:
      compressor: what goes on the wire; inside, arrays keep the contributions' dtype.
      contributions: float[rows, width] a group, rows divisible by the ranks, finite.
      server_error: float[rows / N, width] a group of this rank, None for no feedback.
      live: bool[rows, width] a group, alike on all ranks: entries that exist.
      axis_name: the mesh axis, None for one worker.

    Returns:
      The mean, zero where not live, the new errors, and the payload it came from.
    """
    ranks = axis_size(axis_name)
    sent = [compressor.encode(c, m) for c, m in zip(contributions, live, strict=True)]
    worker_error = tuple(
        jnp.where(m, c - compressor.decode(p, m).astype(c.dtype), 0)
        for c, p, m in zip(contributions, sent, live, strict=True)
    )
    received = all_to_all_rows(sent, ranks, axis_name)
    mine = [own_rows(m, ranks, axis_name) for m in live]
    totals, replies, new_server_error = [], [], []
    for group, payload in enumerate(received):
        total = _mean_of_ranks(compressor, payload, mine[group], ranks)
        total = total.astype(contributions[group].dtype)
        if server_error is not None:
            total = total + server_error[group]
        reply = compressor.encode(total, mine[group])
        decoded = compressor.decode(reply, mine[group]).astype(total.dtype)
        totals.append(total)
        replies.append(reply)
        new_server_error.append(jnp.where(mine[group], total - decoded, 0))
    payload = tuple(all_gather_rows(replies, ranks, axis_name))
    mean = tuple(
        compressor.decode(p, m).astype(c.dtype)
        for p, m, c in zip(payload, live, contributions, strict=True)
    )
    return CompressedMean(mean, worker_error, tuple(new_server_error), payload)


class ReducedLeaves(NamedTuple):
    """`CompressedMean` of a list of leaves; a tuple has one entry a bucket."""

    mean: list[jax.Array]  # the leaves' shapes
    worker_error: list[jax.Array]  # the leaves' shapes
    server_error: tuple[Rows, ...]
    payload: tuple[Any, ...]


def reduce_leaves(
    compressor: Compressor,
    buckets: Sequence[Bucket],
    contributions: Sequence[jax.Array],
    server_error: Sequence[Sequence[jax.Array]] | None,
    live: Sequence[Rows],
    axis_name: AxisName,
) -> ReducedLeaves:
    """`two_phase_mean` of leaves of any shapes, a bucket at a time."""
    mean, worker_error = list(contributions), list(contributions)
    server, payload = [], []
    for place, bucket in enumerate(buckets):
        reduced = two_phase_mean(
            compressor,
            bucket.pack(contributions),
            None if server_error is None else server_error[place],
            live[place],
            axis_name,
        )
        means, errors = bucket.unpack(reduced.mean), bucket.unpack(reduced.worker_error)
        for leaf, m, e in zip(bucket.leaves, means, errors, strict=True):
            shape = contributions[leaf].shape
            mean[leaf], worker_error[leaf] = m.reshape(shape), e.reshape(shape)
        server.append(reduced.server_error)
        payload.append(reduced.payload)
    return ReducedLeaves(mean, worker_error, tuple(server), tuple(payload))


def own_rows(rows: jax.Array, ranks: int, axis_name: AxisName) -> jax.Array:
    """This rank's rows of an array that is alike on all ranks."""
    if axis_name is None:
        return rows
    size = rows.shape[0] // ranks
    return lax.dynamic_slice_in_dim(rows, axis_index(axis_name) * size, size)


def _mean_of_ranks(
    compressor: Compressor, payload: Any, live: jax.Array, ranks: int
) -> jax.Array:
    """Mean over the ranks of payloads led by [ranks * rows]: float[rows, width]."""
    rows, width = live.shape
    everyone = jnp.broadcast_to(live[None], (ranks, rows, width))
    decoded = compressor.decode(payload, everyone.reshape(ranks * rows, width))
    total = jnp.sum(decoded.reshape(ranks, rows, width), axis=0)
    return total * np.asarray(1 / ranks, total.dtype)


def all_to_all_rows(
    payloads: Sequence[Any], ranks: int, axis_name: AxisName
) -> list[Any]:
    """Chunk j of every payload to rank j; leaves stay led by all rows, by sender."""
    if axis_name is None:
        return list(payloads)

    def exchange(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, axis_name, split_axis=0, concat_axis=0, tiled=True)

    leaves, treedef = jax.tree.flatten(list(payloads))
    chunks = [x.reshape(ranks, -1) for x in leaves]
    moved = _by_dtype(chunks, exchange)
    return treedef.unflatten(
        [x.reshape(old.shape) for x, old in zip(moved, leaves, strict=True)]
    )


def all_gather_rows(
    payloads: Sequence[Any], ranks: int, axis_name: AxisName
) -> list[Any]:
    """Every rank's rows of each payload, in the order of the ranks."""
    if axis_name is None:
        return list(payloads)

    def gather(x: jax.Array) -> jax.Array:
        return lax.all_gather(x, axis_name, axis=0, tiled=True, to="invarying")

    leaves, treedef = jax.tree.flatten(list(payloads))
    moved = _by_dtype([x.reshape(1, -1) for x in leaves], gather)
    return treedef.unflatten(
        [
            x.reshape(ranks * old.shape[0], *old.shape[1:])
            for x, old in zip(moved, leaves, strict=True)
        ]
    )


def _by_dtype(arrays: Sequence[jax.Array], collective: Any) -> list[jax.Array]:
    """Applies a collective on arrays [m, .] joined by dtype along their last axis.

    Scales stay apart from bits: joined as bytes, XLA's GPU compiler would no longer
    run either transfer under arithmetic. bfloat16 travels as uint16, for XLA's CPU
    compiler would send it as float32.
    """
    given = arrays
    arrays = [
        lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x
        for x in arrays
    ]
    moved: list[Any] = [None] * len(arrays)
    for dtype in sorted({x.dtype.name for x in arrays}):
        places = [i for i, x in enumerate(arrays) if x.dtype.name == dtype]
        joined = jnp.concatenate([arrays[i] for i in places], axis=1)
        ends = np.cumsum([arrays[i].shape[1] for i in places])[:-1]
        parts = jnp.split(collective(joined), ends, axis=1)
        for place, part in zip(places, parts, strict=True):
            moved[place] = lax.bitcast_convert_type(part, given[place].dtype)
    return moved
