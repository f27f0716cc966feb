"""1-bit Adam against the NumPy oracle, in float64, on 1 to 8 ranks.

In float32 a sign at an entry near zero may fall the other way, which no tolerance that
means anything would let pass; in float64 it does not happen.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sfpo_jax as sfpo
from sfpo_jax.collectives import plan_buckets
from tests.oracle import Codec, OnebitAdam
from tests.ranks import Ranks, assert_alike

Shapes = list[tuple[int, ...]]

STEPS, WARMUP = 50, 20
# Leaves of whole blocks, of a short one, of one entry, and of all of them.
SMALL = [(4099,), (2048,), (2, 3), (), (2049,)]
LARGE = [(100_000,), *SMALL[1:]]
ODD = [(99_999,), (2048,), (37, 3), (), (2049,)]
DECAYED = [True, False, True, False, True]
ENTRIES = {1: 1 << 20, 2: 4000}  # that close a bucket, by the buckets they make
FLOOR = 0.01
UNUSED = 500  # entries of leaf 4 that never have a gradient
FIXED = 1  # columns of leaf 2 without a gradient before the freeze


def rate(step: Any) -> Any:
    """Powers of two: the same number in every precision."""
    return jnp.where(step < 30, 2.0**-6, 2.0**-7)


class Problem:
    """Each rank's gradient: noise of its own and a pull of the parameters to zero."""

    def __init__(self, ranks: int, shapes: Shapes) -> None:
        rng = np.random.default_rng(ranks)
        self.ranks = ranks
        self.params = [np.asarray(rng.normal(size=s)) for s in shapes]
        self.noise = [rng.normal(size=(7, ranks, *s)) for s in shapes]
        # So little that the floor of the variance is above them; in leaf 4 beside
        # entries that never have any.
        for leaf, few in ((0, slice(9)), (4, slice(UNUSED, UNUSED + 9))):
            little = 1e-3 * self.noise[leaf][0, 0, few]
            self.params[leaf][few] = self.noise[leaf][..., few] = little

    def grads(self, step: int, params: list[Any]) -> list[np.ndarray]:
        """[ranks, ...] a leaf."""
        grads = [
            n[step % 7] + 0.1 * np.asarray(p)
            for n, p in zip(self.noise, params, strict=True)
        ]
        if step < WARMUP:
            grads[2][..., -FIXED:] = 0.0
        grads[4][:, :UNUSED] = 0.0
        return grads


CASES = [
    # Ranks, leaves, density, error feedback, buckets the leaves travel in.
    pytest.param(None, SMALL, 1.0, True, 1, id="no-axis"),
    pytest.param(1, LARGE, 1.0, True, 1, id="1"),
    pytest.param(2, LARGE, 1.0, True, 1, id="2"),
    pytest.param(2, SMALL, 1.0, False, 1, id="2-no-feedback"),
    pytest.param(3, ODD, 1.0, True, 1, id="3"),
    pytest.param(3, SMALL, 0.3, True, 1, id="3-sparse"),
    pytest.param(4, LARGE, 1.0, True, 2, id="4"),
    pytest.param(8, LARGE, 1.0, True, 1, id="8"),
]


@pytest.mark.parametrize(("ranks", "shapes", "density", "feedback", "buckets"), CASES)
@pytest.mark.slow
def test_it_follows_the_equations(
    ranks: int | None, shapes: Shapes, density: float, feedback: bool, buckets: int
) -> None:
    follow(ranks, shapes, Codec(density), feedback, buckets, {})


@pytest.mark.parametrize("density", [1.0, 0.3])
def test_what_goes_beyond_the_paper_follows_its_equations(density: float) -> None:
    codec = Codec(density, relaxation=1.5)
    follow(3, SMALL, codec, True, 1, {"refresh_every": 4})


def follow(
    ranks: int | None,
    shapes: Shapes,
    codec: Codec,
    feedback: bool,
    buckets: int,
    beyond: dict[str, Any],
) -> None:
    problem = Problem(ranks or 1, shapes)
    oracle = OnebitAdam(
        problem.params,
        problem.ranks,
        rate,
        WARMUP,
        weight_decay=0.1,
        decayed=DECAYED,
        codec=codec,
        feedback=feedback,
        nu_floor=FLOOR,
        **beyond,
    )
    for step in range(STEPS):
        own = problem.grads(step, oracle.params)
        oracle.step([[g[i] for g in own] for i in range(problem.ranks)])

    compressor = sfpo.compression.sparse_sign(
        codec.density, relaxation=codec.relaxation
    )
    with jax.enable_x64(True):
        tx = sfpo.onebit_adam(
            rate,
            weight_decay=0.1,
            warmup_steps=WARMUP,
            axis_name=None if ranks is None else "data",
            compressor=compressor,
            error_feedback=feedback,
            nu_floor=FLOOR,
            **beyond,
            mask=DECAYED,
            bucket_size=f"{4 * ENTRIES[buckets]}B",
        )
        run = Ranks(tx, [jnp.asarray(p) for p in problem.params], ranks)
        for step in range(STEPS):
            run.step(problem.grads(step, run.params))
        state = run.state
        assert run.traces == 1
        assert int(state.count) == STEPS
        assert_alike((run.params, state.count, state.freeze, state.mu, state.nu))
        assert_close(run.params, oracle.params)
        assert_close(state.mu, oracle.m)
        assert_close(state.nu, oracle.v)
        if not feedback:
            assert not jax.tree.leaves((state.worker_error, state.server_error))
            return
        for i in range(problem.ranks):
            residual = [
                np.asarray(e).reshape(-1, *s)[i]
                for e, s in zip(state.worker_error.tree, shapes, strict=True)
            ]
            assert_close(residual, oracle.mean.worker[i], oracle.m)
        sizes = [int(np.prod(s)) for s in shapes]
        plan = plan_buckets(sizes, compressor, ranks or 1, ENTRIES[buckets])
        assert len(plan) == buckets
        server = server_errors(state.server_error.tree, plan, shapes)
        assert_close(server, oracle.mean.server, oracle.m)


def server_errors(tree: Any, plan: Any, shapes: Shapes) -> list[np.ndarray]:
    """The server error [N, rows / N, width] a group, laid out as the leaves are."""
    flat = [np.zeros(int(np.prod(s))) for s in shapes]
    for bucket, groups in zip(plan, tree, strict=True):
        for group, rows in zip(bucket.groups, groups, strict=True):
            entries = np.asarray(rows).reshape(-1)
            for piece in group.pieces:
                end = piece.start + piece.length
                flat[piece.leaf][piece.start : end] = entries[: piece.length]
                entries = entries[-(-piece.length // group.width) * group.width :]
    return [x.reshape(s) for x, s in zip(flat, shapes, strict=True)]


def assert_close(found: Any, expected: Any, scale: Any = None) -> None:
    """Relative L2 difference at most 1e-6 in each leaf.

    `scale` is what the rounding of a residual comes from: with one worker the server's
    is 0 in exact arithmetic, and there is nothing else to measure by.
    """
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        limit = 1e-6 * float(np.linalg.norm(b))
        if scale is not None:
            limit += 1e-12 * float(np.linalg.norm(scale[i]))
        difference = float(np.linalg.norm(np.asarray(a) - b))
        assert np.asarray(a).dtype == np.float64
        assert difference <= limit, f"leaf {i}: {difference} over {limit}"
