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
    call = _Call(bucket, has_momentum=True)
    numbers = _numbers(factors, 0.0, 0.0, variance[0].dtype)
    u, m = call(numbers, signs, scales, variance, ())
    return list(u), list(m)


def onebit_apply(
    bucket: Bucket,
    signs: Arrays,
    scales: Arrays,
    variance: Arrays,
    params: Arrays,
    factors: AdamFactors,
    learning_rate: Any,
    weight_decay: Any = 0.0,
    is_decayed: Sequence[bool] = (),
    *,
    has_momentum: bool = True,
) -> tuple[list[jax.Array], list[jax.Array]]:
    """p - learning_rate (u + weight_decay p), in the memory of `params` if donated.

    Args:
      bucket, signs, scales, variance, factors: as in `onebit_directions`.
      params: p, float arrays of the leaves' shapes.
      learning_rate: a number or float scalar array.
      weight_decay: likewise.
      is_decayed: which leaves decay; () for none.
      has_momentum: also return m.

    Returns:
      (p, m), m being [] without `has_momentum`.
    """
    call = _Call(bucket, has_momentum, tuple(is_decayed) or (False,) * len(params))
    numbers = _numbers(factors, learning_rate, weight_decay, variance[0].dtype)
    p, m = call(numbers, signs, scales, variance, params)
    return list(p), list(m)


def _numbers(factors: AdamFactors, rate: Any, decay: Any, dtype: Any) -> jax.Array:
    return jnp.stack([jnp.asarray(x, dtype) for x in (*factors, rate, decay)])


class _Call(NamedTuple):
    """What is known of an update when it is traced."""

    bucket: Bucket
    has_momentum: bool
    is_decayed: tuple[bool, ...] = ()

    def __call__(self, *args: Any) -> Any:
        args = alike(tuple(x if isinstance(x, jax.Array) else tuple(x) for x in args))
        _, _, scales, variance, params = args
        if not is_float32([*scales, *variance, *params]):
            return self._twin(*args)
        return choose(self._native, self._twin, *args)

    def _native(
        self, numbers: jax.Array, signs: Any, scales: Any, variance: Any, params: Any
    ) -> Any:
        count, before = len(variance), 1 + len(signs) + len(scales) + len(variance)
        found = ffi_call(
            "sfpo_onebit_update",
            [numbers, *signs, *scales, *variance, *params],
            [(x.shape, jnp.float32) for x in variance] * (1 + self.has_momentum),
            {
                "leaves": count,
                "has_parameters": bool(params),
                "has_momentum": self.has_momentum,
                "is_decayed": np.array(self.is_decayed or (0,) * count, np.int64),
                **layout_attributes(self.bucket),
            },
            {before + i: i for i in range(len(params))},
        )
        return tuple(found[:count]), tuple(found[count:])

    def _twin(
        self, numbers: jax.Array, signs: Any, scales: Any, variance: Any, params: Any
    ) -> Any:
        m_correction, v_correction, eps, floor, rate, decay = numbers
        shapes = [v.shape for v in variance]
        mu = decode_signs(self.bucket, signs, scales, shapes, variance)
        rows = [raised_variance(v, floor) for v in self.bucket.pack_own(variance)]
        found = []
        for place, flat in enumerate(self.bucket.unpack(rows)):
            v, m = flat.reshape(shapes[place]), mu[place] / m_correction
            u = jnp.where(v > 0, m / (jnp.sqrt(v / v_correction) + eps), 0)
            if params:
                p = params[place]
                u = p - rate * (u + decay * p if self.is_decayed[place] else u)
            found.append(u)
        return tuple(found), tuple(mu) if self.has_momentum else ()


def raised_variance(rows: jax.Array, nu_floor: Any) -> jax.Array:
    """v of blocks [r, w], where not 0 at least `nu_floor` of its block's mean."""
    live = rows > 0
    count = jnp.maximum(jnp.sum(live, axis=-1, dtype=jnp.int32), 1)
    mean = jnp.sum(rows, axis=-1) / count.astype(rows.dtype)
    return jnp.where(live, jnp.maximum(rows, nu_floor * mean[:, None]), 0)
