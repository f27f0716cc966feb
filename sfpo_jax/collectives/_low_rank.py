"""The mean of matrices over an axis by two thin factors, in the manner of PowerSGD.

For rank i of N with the matrix M_i [rows, cols] (its error already added), and Q [cols,
rank], alike on all ranks and kept from the step before:

    P = mean_i M_i Q                  first all-reduce, rows x rank
    P = orthonormalised P
    Q = mean_i M_i^T P                second all-reduce, cols x rank
    mean = P Q^T                      new error  e_i = M_i - mean

All of it is linear in M_i, so the mean is that of the ranks projected onto the columns
of P, and exact where it has no more rank than these: one turn of subspace iteration,
which Q carries on over the steps. An all-reduce sends 2 (N - 1) / N of its array: 4
rank (rows + cols) bytes of float32 in place of 4 rows cols, whatever N is (Vogels,
Karimireddy, Jaggi 2019, "PowerSGD", https://arxiv.org/abs/1905.13727).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from sfpo_jax.collectives._axis import AxisName
from sfpo_jax.collectives._mean import axis_mean

# Below it a tensor's factors save too little to be worth an error.
MIN_COMPRESSION = 2.0
# A column of which others explain all but so many roundings is rounding itself.
_ROUNDINGS = 64


class Factors(NamedTuple):
    """The two factors that travel for one tensor.

    Attributes:
      rows: of the tensor as a matrix: the product of its first axes.
      cols: that of the others.
      rank: columns of either factor.
    """

    rows: int
    cols: int
    rank: int

    @property
    def entries(self) -> int:
        """Numbers that travel."""
        return self.rank * (self.rows + self.cols)


class LowRankMean(NamedTuple):
    """What one exchange leaves behind."""

    mean: list[jax.Array]  # [rows, cols] a matrix, alike on all ranks
    worker_error: list[jax.Array]  # [rows, cols] a matrix, this rank's own
    basis: list[jax.Array]  # Q of the next step: [cols, rank], alike on all ranks
    exact: list[jax.Array]  # the means of what travelled whole


def plan_factors(
    shape: Sequence[int], rank: int, min_compression: float = MIN_COMPRESSION
) -> Factors | None:
    """How a tensor travels: its factors, or None for as it is.

    The axes are cut in two where rows + cols is least, and with it what is sent; at the
    first such place.

    Args:
      shape: of the tensor.
      rank: columns of either factor.
      min_compression: how many times as many numbers the tensor must have.

    Example:
      >>> plan_factors((3, 3, 128, 256), 2)
      Factors(rows=1152, cols=256, rank=2)
      >>> plan_factors((256,), 2), plan_factors((8, 4), 2)
      (None, None)
    """
    cuts = [
        Factors(math.prod(shape[:axis]), math.prod(shape[axis:]), rank)
        for axis in range(1, len(shape))
    ]
    if not cuts:
        return None
    best = min(cuts, key=lambda factors: factors.entries)
    gains = best.rows * best.cols >= min_compression * best.entries
    # At equal size, or a rank that a matrix cannot have, whole is also exact.
    return best if gains and best.rows * best.cols > best.entries else None


def low_rank_share(
    shapes: Sequence[Sequence[int]],
    rank: int,
    min_compression: float = MIN_COMPRESSION,
) -> float:
    """Numbers that travel for tensors of these shapes, as a share of their entries.

    Example:
      >>> low_rank_share([(100, 100), (100,)], 2)  # 400 and 100 of 10,100
      0.04950495049504951
    """
    total = sum(math.prod(shape) for shape in shapes)
    sent = 0
    for shape in shapes:
        factors = plan_factors(shape, rank, min_compression)
        sent += math.prod(shape) if factors is None else factors.entries
    return sent / total if total else 1.0


def first_basis(factors: Factors, key: jax.Array, dtype: Any) -> jax.Array:
    """The Q to begin with: [cols, rank], columns drawn at random, of length 1."""
    shape = (factors.cols, factors.rank)
    return _unit_columns(jax.random.normal(key, shape, dtype))


def reduce_low_rank(
    matrices: Sequence[jax.Array],
    basis: Sequence[jax.Array],
    exact: Sequence[jax.Array],
    axis_name: AxisName,
) -> LowRankMean:
    """Means over the axis in two all-reduces, or none for one worker.

    Products are of the default precision: what they round differs in no way from what
    else is lost, and the error has it. A column of P that the others explain, zeros
    among them, becomes 0 and sends nothing; its column of Q stays as it was. So a
    matrix that is zero, or of low rank, for a while does not lose columns for good.

    Args:
      matrices: M_i, float32 or float64 [rows, cols] each, of one dtype. Of a NaN in one
        of them all entries of the mean are NaN, on all ranks, and so is the basis.
      basis: Q, [cols, rank] each.
      exact: arrays of any shape of the same dtype that travel as they are, with P.
      axis_name: the mesh axis, None for one worker.
    """
    left = [m @ q for m, q in zip(matrices, basis, strict=True)]
    means = axis_mean([*left, *exact], axis_name)
    left = _orthonormal_of_each(means[: len(left)])
    # M^T P in the order that M lies in: a 20th of M.T @ P for one column on CPUs.
    right = [(p.T @ m).T for m, p in zip(matrices, left, strict=True)]
    right = axis_mean(right, axis_name)
    mean = [p @ q.T for p, q in zip(left, right, strict=True)]
    error = [m - x for m, x in zip(matrices, mean, strict=True)]
    kept = [_unit_columns(q, old) for q, old in zip(right, basis, strict=True)]
    return LowRankMean(mean, error, kept, means[len(left) :])


def orthonormal(columns: jax.Array) -> jax.Array:
    """Columns [..., rows, rank] made orthonormal, each by those before it.

    Classical Gram-Schmidt, each column twice, after which it is as orthogonal as
    rounding allows (Giraud et al. 2005, https://doi.org/10.1007/s00211-005-0615-4):
    for a few columns it takes fewer passes over memory than QR, works on matrices of
    one shape together, and tells columns that are not there. A column that is zero, or
    that those before it explain but for rounding, becomes zero: its direction would be
    noise. Of a NaN all columns from its own on are NaN.
    """
    columns = _unit_columns(columns)
    noise = _ROUNDINGS * float(jnp.finfo(columns.dtype).eps)
    found: list[jax.Array] = []
    for place in range(columns.shape[-1]):
        column = columns[..., place : place + 1]
        for _ in range(2 if found else 0):
            before = jnp.concatenate(found, axis=-1)
            # Products of half a mantissa, as on tensor cores, would leave it askew.
            inside = jnp.matmul(before.mT, column, precision="highest")
            column = column - jnp.matmul(before, inside, precision="highest")
        length = jnp.sqrt(jnp.sum(column * column, axis=-2, keepdims=True))
        is_noise = length <= noise
        found.append(jnp.where(is_noise, 0, column / jnp.where(is_noise, 1, length)))
    return jnp.concatenate(found, axis=-1)


def _orthonormal_of_each(columns: Sequence[jax.Array]) -> list[jax.Array]:
    """`orthonormal`, matrices of one shape together: fewer and larger operations."""
    done = list(columns)
    for shape in sorted({x.shape for x in columns}):
        places = [i for i, x in enumerate(columns) if x.shape == shape]
        together = orthonormal(jnp.stack([columns[i] for i in places]))
        for row, place in enumerate(places):
            done[place] = together[row]
    return done


def _unit_columns(x: jax.Array, zeros: jax.Array | None = None) -> jax.Array:
    """Columns [..., n, rank] of length 1; those of zero as in `zeros`, or zero."""
    # By the largest first, for squares of 1e-25 are none, and those of 1e20 too many.
    largest = jnp.max(jnp.abs(x), axis=-2, keepdims=True)
    is_zero = largest == 0
    x = x / jnp.where(is_zero, 1, largest)
    length = jnp.sqrt(jnp.sum(x * x, axis=-2, keepdims=True))
    return jnp.where(is_zero, 0 if zeros is None else zeros, x / length)
