"""One exchange of rows over N ranks, compiled once for all sizes and rounds."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from sfpo_jax import compression
from sfpo_jax.collectives import two_phase_mean
from sfpo_jax.compression import Compressor
from tests.oracle import Codec
from tests.ranks import data_mesh

RANKS = [1, 2, 3, 4, 8]
# Rows divisible by all of them. What is live is an argument: one program, all sizes.
ROWS, WIDTH = 24, 64
SIZES = [0, 1, 7, 8, 9, 1023, ROWS * WIDTH]

SIGN = compression.sign(WIDTH)
SPARSE = compression.sparse_sign(0.3, WIDTH)
CODECS = {SIGN.name: Codec(1.0, WIDTH), SPARSE.name: Codec(0.3, WIDTH)}


class Exchanged(NamedTuple):
    """What an exchange leaves, of all ranks: [N, rows, width], or [rows, width]."""

    mean: Any
    worker: Any
    server: Any
    sent: Any  # what each rank's message says
    unpacked: Any  # what the payload that came off the wire says


@cache
def exchange(
    compressor: Compressor, ranks: int | None, feedback: bool = True
) -> Callable[..., Exchanged]:
    """(contributions [N, rows, width], server error, live) -> what is left."""
    axis_name = None if ranks is None else "data"

    def local(own: jax.Array, server: jax.Array, live: jax.Array) -> Exchanged:
        errors = [server] if feedback else None
        out = two_phase_mean(compressor, [own[0]], errors, [live], axis_name)
        sent = compressor.decode(compressor.encode(own[0], live), live)
        unpacked = compressor.decode(out.payload[0], live)
        worker = out.worker_error[0][None]
        return Exchanged(out.mean[0], worker, out.server_error[0], sent[None], unpacked)

    if ranks is None:
        return jax.jit(local)
    own, shared = P("data"), P()
    return jax.jit(
        jax.shard_map(
            local,
            mesh=data_mesh(ranks),
            in_specs=(own, own, shared),
            out_specs=Exchanged(shared, own, own, own, shared),
        )
    )


def masks() -> list[np.ndarray]:
    """The sizes laid in rows, and holes all over."""
    index = np.arange(ROWS * WIDTH).reshape(ROWS, WIDTH)
    holes = np.random.default_rng(1).random(index.shape) < 0.5
    return [*(index < n for n in SIZES), holes]


def rounds(
    run: Callable[..., Exchanged], ranks: int, live: np.ndarray, dtype: type
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, Exchanged]]:
    """Three exchanges, the errors carried on: (own, worker and server error, after)."""
    rng = np.random.default_rng(0)
    worker = np.zeros((ranks, ROWS, WIDTH), dtype)
    server = np.zeros((ROWS, WIDTH), dtype)
    for _ in range(3):
        # What is not live may hold anything.
        x = np.where(live, rng.standard_normal(worker.shape), 7).astype(dtype)
        out = run(x + worker, server, live)
        yield x, worker, server, out
        worker, server = np.asarray(out.worker), np.asarray(out.server)


def assert_close(found: Any, expected: Any, whole: Any = None) -> None:
    """L2 difference at most 1e-12 of `whole`, of what is expected if not given."""
    scale = np.linalg.norm(expected if whole is None else whole)
    assert np.linalg.norm(np.asarray(found) - expected) <= 1e-12 * scale
