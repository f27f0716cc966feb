r"""Arrays of one byte an entry, scaled block by block along their last axis.

Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization",
https://arxiv.org/abs/2110.02861, with linear codes in place of their table: of a block
of x with n units, n = 127 signed or 255 unsigned,

    signed:    scale = max|x| / n;        value = round(x / scale)
    unsigned:  scale = max(x)^(1/4) / n;  value = round(x^(1/4) / scale), 1 at least
                                          where x > 0

The unsigned code is for a variance, which is divided by. It spans five decades of v's
square root; a linear one of v itself gives most entries of a block the value 0, and
training diverges. That no entry above 0 becomes 0 keeps the denominators.

A variance of decay 0.999 changes by less than half a unit in a step, and rounding to
nearest would lose the change each time: the variance stands still while gradients
shrink or grow. With a `seed` the unsigned code therefore rounds up with the
probability of the remainder, and follows in the mean.

Values have the shape of the array and scales all its axes but the last, so that both
are sharded, stacked and sliced as the array is.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sfpo_jax.collectives import widen
from sfpo_jax.transforms._hash import Seed, random_units

# Dettmers et al. use 2,048; blocks of 256 cost 0.125 bit an entry and adapt better.
_BLOCK = 256
# A shorter divisor of the last axis would cost more scales than a ragged block.
_SHORTEST = 32
# Dettmers et al. keep tensors under 4,096 entries in 32 bits: they are biases and
# norms, which take no memory and suffer most.
_MIN_SIZE = 4096
_MIN_LAST_AXIS = 16


@dataclasses.dataclass(frozen=True, repr=False)
class Quantized:
    """An array as bytes; a pytree whose leaves `values` and `scales` go where it goes.

    Attributes:
      values: int8 in [-127, 127] (signed) or uint8 (unsigned), the array's shape.
      scales: float32 (float64 of a float64 array), [*shape[:-1], blocks].
      block_size: entries of the last axis that share a scale; the last may be fewer.
    """

    # Not `jax.Array`: JAX also fills its nodes with specs, shapes and placeholders.
    values: Any
    scales: Any
    block_size: int

    def __repr__(self) -> str:
        dtype = getattr(self.values, "dtype", None)
        if dtype is None:
            return f"Quantized({self.values}, {self.scales})"
        shape = ", ".join(map(str, self.values.shape))
        return f"Quantized({dtype}[{shape}], blocks of {self.block_size})"


jax.tree_util.register_dataclass(
    Quantized, data_fields=["values", "scales"], meta_fields=["block_size"]
)


def is_quantized(node: Any) -> bool:
    """True for a `Quantized`; the `is_leaf` of `jax.tree.map`."""
    return isinstance(node, Quantized)


def is_worth_quantizing(shape: tuple[int, ...]) -> bool:
    """Whether an array of this shape is kept as bytes: 4,096 entries, rows of 16."""
    return math.prod(shape) >= _MIN_SIZE and shape[-1] >= _MIN_LAST_AXIS


def block_size(last_axis: int) -> int:
    """Entries a block: the axis, a divisor of it from 32 to 256, or 256 and a rest.

    Example:
      >>> [block_size(n) for n in (64, 512, 1000, 1025, 257)]
      [64, 256, 250, 205, 256]
    """
    fitting = (d for d in range(min(_BLOCK, last_axis), 0, -1) if last_axis % d == 0)
    largest = next(fitting, 1)
    is_long_enough = largest >= min(_SHORTEST, last_axis)
    return largest if is_long_enough else _BLOCK


def quantize(
    x: jax.Array, signed: bool = True, *, seed: Seed | None = None
) -> Quantized:
    """Rounds a float array of one axis or more, finite, to one byte an entry.

    A block whose scale would not be a normal number is zero.

    Args:
      x: float[..., n]; not negative if not `signed`.
      signed: a linear code, or one of the fourth root for variances.
      seed: round unsigned values up or down at random, right in the mean; None rounds
        to nearest.

    Example:
      >>> quantize(jnp.ones((64, 512)))
      Quantized(int8[64, 512], blocks of 256)
    """
    x = widen(x)
    size, block = x.shape[-1], block_size(x.shape[-1])
    stored = jnp.abs(x) if signed else jnp.sqrt(jnp.sqrt(x))
    scales = _block_max(stored, block) * np.asarray(1 / _units(signed), x.dtype)
    # As in `compression.int8`: the reciprocal of the smallest scale is still normal.
    is_normal = scales >= 4 * jnp.finfo(x.dtype).smallest_normal
    scales = jnp.where(is_normal, scales, 0)
    inverse = jnp.where(is_normal, 1 / jnp.where(is_normal, scales, 1), 0)
    inverse = _spread(inverse, size, block)
    if signed:
        units = jnp.clip(jnp.round(x * inverse), -127, 127)
        return Quantized(units.astype(jnp.int8), scales, block)
    units = stored * inverse
    if seed is None:
        units = jnp.round(units)
    else:
        units = jnp.floor(units + random_units(seed, x.shape, x.dtype))
    units = jnp.clip(units, (x > 0).astype(x.dtype), 255)
    return Quantized(units.astype(jnp.uint8), scales, block)


def dequantize(node: Quantized) -> jax.Array:
    """The array that a `Quantized` stands for, in the dtype of its scales.

    Example:
      >>> dequantize(quantize(jnp.array([127.0, -3.4])))
      Array([127.,  -3.], dtype=float32)
    """
    scales = _spread(node.scales, node.values.shape[-1], node.block_size)
    stored = node.values.astype(scales.dtype) * scales
    return stored if node.values.dtype == jnp.int8 else (stored * stored) ** 2


def _units(signed: bool) -> int:
    return 127 if signed else 255


def _block_max(x: jax.Array, block: int) -> jax.Array:
    """[..., n] -> [..., blocks], of entries that are not negative."""
    rest = -x.shape[-1] % block
    if rest:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rest)])
    return jnp.max(x.reshape(*x.shape[:-1], -1, block), axis=-1)


def _spread(scales: jax.Array, size: int, block: int) -> jax.Array:
    """[..., blocks] -> [..., size]: to each entry what belongs to its block."""
    wide = jnp.broadcast_to(scales[..., None], (*scales.shape, block))
    return wide.reshape(*scales.shape[:-1], -1)[..., :size]
