"""The compressed mean in two phases, against its equations and its own promises."""

import jax
import numpy as np
import pytest

from sfpo_jax import compression
from sfpo_jax.compression import Compressor
from tests.collectives.exchange import (
    CODECS,
    RANKS,
    ROWS,
    SIGN,
    SPARSE,
    WIDTH,
    Exchanged,
    assert_close,
    exchange,
    masks,
    rounds,
)
from tests.oracle import TwoPhaseMean


@pytest.mark.parametrize(
    ("compressor", "ranks"),
    [*((SIGN, ranks) for ranks in RANKS), (SPARSE, 3)],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_it_is_the_mean_of_the_equations(compressor: Compressor, ranks: int) -> None:
    with jax.enable_x64(True):
        for live in masks():
            oracle = TwoPhaseMean(
                [np.zeros((ROWS, WIDTH))], ranks, CODECS[compressor.name]
            )
            run = exchange(compressor, ranks)
            for x, _, _, out in rounds(run, ranks, live, np.float64):
                (mean,) = oracle([[own] for own in x], [live])
                assert_close(out.mean, mean)
                # A residual is what is left of a difference: of one worker's message
                # the server has nothing left to correct.
                assert_close(out.worker, [e[0] for e in oracle.worker], x)
                assert_close(out.server, oracle.server[0], mean)


def test_without_feedback_nothing_is_remembered() -> None:
    live, x = masks()[-1], np.random.default_rng(0).standard_normal((2, ROWS, WIDTH))
    oracle = TwoPhaseMean([x[0]], 2, CODECS[SIGN.name], feedback=False)
    with jax.enable_x64(True):
        # The server error given here must not be read.
        out = exchange(SIGN, 2, feedback=False)(x, np.full_like(x[0], np.nan), live)
    assert_close(out.mean, oracle([[own] for own in x], [live])[0])


def assert_conserved(
    own: np.ndarray, server: np.ndarray, out: Exchanged, ranks: int
) -> None:
    """Each message and its residual make what was sent, row by row."""
    sent, worker, mean, after = (
        np.asarray(part, np.float64)
        for part in (out.sent, out.worker, out.mean, out.server)
    )
    two_ulp = 2 * np.spacing(np.max(np.abs(own), -1, keepdims=True))
    assert (np.abs(sent + worker - own) <= two_ulp).all()
    total = sent.mean(0) + server
    parts = np.abs(sent).max((0, 2)) + np.abs(server).max(-1)
    # Two for the residual, and half a unit for each of the messages in the mean.
    ulp = np.spacing(parts.astype(np.float32))[:, None]
    assert (np.abs(mean + after - total) <= (2 + ranks / 2) * ulp).all()


def assert_alike(x: jax.Array, ranks: int) -> None:
    """All devices hold the same bits."""
    shards = [np.asarray(shard.data).tobytes() for shard in x.addressable_shards]
    assert len(shards) == ranks
    assert len(set(shards)) == 1


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_agree_and_nothing_is_lost(ranks: int) -> None:
    run = exchange(SIGN, ranks)
    for live in masks():
        for x, worker, server, out in rounds(run, ranks, live, np.float32):
            assert_alike(out.mean, ranks)
            own = np.where(live, x + worker, 0)
            assert_conserved(own, server, out, ranks)
            for part in out:
                assert part.dtype == np.float32
                assert not np.asarray(part)[..., ~live].any()


OTHERS = [
    compression.sparse_sign(0.1, WIDTH),
    compression.top_k(0.1, WIDTH),
    compression.int8(WIDTH),
    compression.bfloat16(),
    compression.identity(),
]


@pytest.mark.parametrize("compressor", OTHERS, ids=lambda c: c.name)
def test_any_compressor_serves(compressor: Compressor) -> None:
    run = exchange(compressor, 2)
    for live in (masks()[0], masks()[-1]):
        for x, worker, server, out in rounds(run, 2, live, np.float32):
            assert_alike(out.mean, 2)
            own = np.where(live, x + worker, 0)
            assert_conserved(own, server, out, 2)
            np.testing.assert_array_equal(out.unpacked, out.mean)
            if compressor.name == "identity":
                np.testing.assert_array_equal(out.mean, own.mean(0))
                assert not np.asarray(out.worker).any()


def test_no_axis_is_one_worker() -> None:
    live = masks()[-1]
    alone = rounds(exchange(SIGN, None), 1, live, np.float32)
    meshed = rounds(exchange(SIGN, 1), 1, live, np.float32)
    for (*_, one), (*_, other) in zip(alone, meshed, strict=True):
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)
