"""Factors of low rank: how tensors are cut, and columns made orthonormal."""

import itertools
import math

import jax
import numpy as np
import pytest

from sfpo_jax.collectives import (
    Factors,
    low_rank_share,
    plan_factors,
    reduce_low_rank,
)
from sfpo_jax.collectives._low_rank import orthonormal


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((), None),
        ((100,), None),
        ((100, 0), None),
        ((40, 30), Factors(40, 30, 2)),
        ((7, 7, 3, 64), Factors(147, 64, 2)),
        ((24, 1024, 64, 16), Factors(24 * 1024, 1024, 2)),
        ((5, 1, 19), None),
        ((8, 1, 8), Factors(8, 8, 2)),  # at the first of equal places
        ((8, 7), None),  # 56 are not twice 30
    ],
)
def test_axes_are_cut_where_least_is_sent(
    shape: tuple[int, ...], expected: Factors | None
) -> None:
    assert plan_factors(shape, 2) == expected
    if expected is not None:
        sums = [
            math.prod(shape[:i]) + math.prod(shape[i:]) for i in range(1, len(shape))
        ]
        assert expected.entries == 2 * min(sums)


def test_a_rank_that_saves_nothing_leaves_the_tensor_whole() -> None:
    for rows, cols, rank in itertools.product((1, 2, 5, 9), (1, 3, 9), (1, 2, 3, 9)):
        factors = plan_factors((rows, cols), rank, 1.0)
        assert (factors is None) == (rank * (rows + cols) >= rows * cols)
        if rank >= min(rows, cols):
            assert factors is None


def test_the_share_counts_what_is_whole() -> None:
    shapes = [(100, 50), (7,), (3, 3)]
    assert low_rank_share(shapes, 3) == (3 * 150 + 7 + 9) / (5000 + 7 + 9)
    assert low_rank_share([(8,)], 3) == low_rank_share([], 3) == 1.0


made_orthonormal = jax.jit(orthonormal)


def gram(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, np.float64).mT @ np.asarray(x, np.float64)


def test_columns_nearly_alike_come_out_orthonormal() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=(3, 500, 1)).astype(np.float32)
    noise = rng.normal(size=(3, 500, 4)).astype(np.float32)
    columns = np.asarray([1e-30, 1.0, 1e25], np.float32)[:, None, None] * (
        base + np.float32(1e-4) * noise
    )
    found = np.asarray(made_orthonormal(columns))
    np.testing.assert_allclose(gram(found), np.eye(4)[None].repeat(3, 0), atol=1e-5)
    # The first keeps its direction.
    first = columns[..., 0].astype(np.float64)
    first /= np.linalg.norm(first, axis=-1, keepdims=True)
    np.testing.assert_allclose(found[..., 0], first, atol=1e-6)


def test_columns_that_are_not_there_are_zero() -> None:
    rng = np.random.default_rng(1)
    a, b = rng.normal(size=(2, 300)).astype(np.float32)
    columns = np.stack([a, 0 * a, np.float32(3) * a, b, a - b], axis=1)
    found = made_orthonormal(columns)
    np.testing.assert_allclose(gram(found), np.diag([1, 0, 0, 1, 0]), atol=1e-6)
    assert not np.asarray(found)[:, [1, 2, 4]].any()
    assert not np.asarray(made_orthonormal(0 * columns)).any()


def test_nan_is_not_hidden() -> None:
    columns = np.random.default_rng(2).normal(size=(2, 9, 3)).astype(np.float32)
    columns[0, 4, 1] = np.nan
    found = np.asarray(made_orthonormal(columns))
    assert np.isfinite(found[0, :, 0]).all() and np.isnan(found[0, :, 1:]).all()
    assert np.isfinite(found[1]).all()
    matrix = np.ones((9, 4), np.float32)
    matrix[2, 2] = np.nan
    basis = np.eye(4, 2, dtype=np.float32)
    reduced = jax.jit(lambda m, q: reduce_low_rank([m], [q], [], None))(matrix, basis)
    assert np.isnan(reduced.mean[0]).all() and np.isnan(reduced.basis[0]).all()
