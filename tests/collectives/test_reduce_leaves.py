"""Leaves of any shape through the two phases, and how few transfers they make."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from sfpo_jax import compression
from sfpo_jax.collectives import plan_buckets, reduce_leaves, transfers, wire_bytes
from tests.collectives.exchange import CODECS, SIGN, assert_close
from tests.oracle import TwoPhaseMean
from tests.ranks import data_mesh


def test_leaves_of_any_shape() -> None:
    ranks, shapes = 3, [(1,), (3, 3), (1023,), (), (33, 61)]
    sizes = [int(np.prod(shape)) for shape in shapes]
    buckets = plan_buckets(sizes, SIGN, ranks, 1000)
    assert len(buckets) > 1
    rng = np.random.default_rng(0)
    x = [rng.standard_normal((ranks, *shape)) for shape in shapes]
    server = [[np.zeros((g.rows, g.width)) for g in b.groups] for b in buckets]

    def local(own: Any, server: Any) -> Any:
        live = [bucket.live() for bucket in buckets]
        own = [leaf[0] for leaf in own]
        out = reduce_leaves(SIGN, buckets, own, server, live, "data")
        return out.mean, [e[None] for e in out.worker_error], out.server_error

    mapped = jax.shard_map(
        local,
        mesh=data_mesh(ranks),
        in_specs=P("data"),
        out_specs=(P(), P("data"), P("data")),
    )
    oracle = TwoPhaseMean([leaf[0] for leaf in x], ranks, CODECS[SIGN.name])
    with jax.enable_x64(True):
        run = jax.jit(mapped)
        for _ in range(2):
            worker = [np.stack(e) for e in zip(*oracle.worker, strict=True)]
            own = [leaf + e for leaf, e in zip(x, worker, strict=True)]
            mean, errors, server = run(own, server)
            sent = [list(leaves) for leaves in zip(*x, strict=True)]
            expected = oracle(sent, [np.ones(shape, bool) for shape in shapes])
            for leaf, shape in enumerate(shapes):
                assert mean[leaf].shape == shape
                assert_close(mean[leaf], expected[leaf])
                assert_close(errors[leaf], [e[leaf] for e in oracle.worker], x[leaf])
            flat = [
                error
                for bucket, rows in zip(buckets, server, strict=True)
                for error in bucket.unpack(rows)
            ]
            for found, error, m in zip(flat, oracle.server, expected, strict=True):
                assert_close(found, error.ravel(), m)


def test_300_leaves_make_four_transfers() -> None:
    sizes = [8 * (n % 3 + 1) for n in range(300)]
    buckets = plan_buckets(sizes, compression.sign(), 8, 1 << 26)

    def local(own: Any) -> Any:
        live = [bucket.live() for bucket in buckets]
        out = reduce_leaves(compression.sign(), buckets, own, None, live, "data")
        # Cutting the mean into 300 results would only cost time.
        return out.payload

    mapped = jax.shard_map(
        local, mesh=data_mesh(8), in_specs=P(), out_specs=P(), check_vma=False
    )
    compiled = jax.jit(mapped).lower([jnp.zeros(n) for n in sizes]).compile()
    text = compiled.as_text()
    assert text is not None
    # Bits and scales, each exchanged once and gathered once.
    opcodes = re.findall(r"\s(all-[a-z\-]+|reduce-scatter|collective-permute)\(", text)
    assert sorted(opcodes) == ["all-gather"] * 2 + ["all-to-all"] * 2
    groups = [group for bucket in buckets for group in bucket.groups]
    payload = sum(g.rows * compression.sign().row_bytes(g.width) for g in groups)
    moved = transfers(text, {"data": 8}, None, ())
    assert wire_bytes(moved) == {"data": 2 * payload * 7 // 8}
    scales = 2 * 4 * sum(group.rows for group in groups) * 7 // 8
    assert sum(t.sent for t in moved if t.dtypes == ("f32",)) == scales
