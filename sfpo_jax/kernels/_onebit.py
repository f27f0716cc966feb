r"""The update of 1-bit Adam from a packed momentum and a frozen variance.

    u = (m / m_correction) / (sqrt(max(v, floor mean_B v) / v_correction) + eps)

where v > 0, else 0: v counts as at least the `floor`-th part of the mean over the live
entries of its block B. m is plus or minus one number a block, so that nothing of it is
read but its bits. Divisions and square roots are true ones, nothing is contracted.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sfpo_jax.kernels._native import alike, choose, ffi_call, is_float32
from sfpo_jax.kernels._rows import Bucket
from sfpo_jax.kernels._signs import (
    Arrays,
    decode_signs,
    layout_attributes,
)


class AdamFactors(NamedTuple):
    """The scalars of the update, each a number or a float scalar array."""

    m_correction: Any  # 1 - b1^t
    v_correction: Any  # 1 - b2^W
    eps: Any
    nu_floor: Any  # share of a block's mean variance


def onebit_directions(
    bucket: Bucket,
    signs: Arrays,
    scales: Arrays,
    variance: Arrays,
    factors: AdamFactors,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """Directions u and the momentum that the signs stand for.

    Args:
      bucket: the layout.
      signs: uint8[rows, width / 8] a group.
      scales: float[rows] a group.
      variance: v, float arrays in the order of `bucket.leaves`.
      factors: scalars.

    Returns:
      (u, m), float arrays of the leaves' shapes, both 0 where v is not positive.
    """
    dtype = variance[0].dtype
    numbers = jnp.stack([jnp.asarray(x, dtype) for x in (*factors, 0.0, 0.0)])
    present = alike((numbers, tuple(signs), tuple(scales), tuple(variance)))

    def twin(arrays: Any) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        return _directions_twin(bucket, *arrays)

    def native(arrays: Any) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        numbers, signs, scales, variance = arrays
        count = len(variance)
        found = ffi_call(
            "sfpo_onebit_update",
            [numbers, *signs, *scales, *variance],
            [(x.shape, jnp.float32) for x in variance] * 2,
            {
                "leaves": count,
                "has_parameters": False,
                "has_momentum": True,
                "is_decayed": np.zeros(count, np.int64),
                **layout_attributes(bucket),
            },
        )
        return tuple(found[:count]), tuple(found[count:])

    is_native = is_float32([*scales, *variance])
    u, m = choose(native, twin, present) if is_native else twin(present)
    return list(u), list(m)


def raised_variance(rows: jax.Array, nu_floor: Any) -> jax.Array:
    """v of blocks [r, w], where not 0 at least `nu_floor` of its block's mean."""
    live = rows > 0
    count = jnp.maximum(jnp.sum(live, axis=-1, dtype=jnp.int32), 1)
    mean = jnp.sum(rows, axis=-1) / count.astype(rows.dtype)
    return jnp.where(live, jnp.maximum(rows, nu_floor * mean[:, None]), 0)


def _directions_twin(
    bucket: Bucket,
    numbers: jax.Array,
    signs: Arrays,
    scales: Arrays,
    variance: Sequence[jax.Array],
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    m_correction, v_correction, eps, floor = (numbers[i] for i in range(4))
    shapes = [v.shape for v in variance]
    mu = decode_signs(bucket, signs, scales, shapes, variance)
    rows = [raised_variance(v, floor) for v in bucket.pack_own(variance)]
    raised = [
        v.reshape(shape) for v, shape in zip(bucket.unpack(rows), shapes, strict=True)
    ]
    directions = [
        jnp.where(v > 0, m / m_correction / (jnp.sqrt(v / v_correction) + eps), 0)
        for m, v in zip(mu, raised, strict=True)
    ]
    return tuple(directions), tuple(mu)
