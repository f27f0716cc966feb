r"""Arrays of one byte an entry, scaled block by block along their last axis.

After Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization",
https://arxiv.org/abs/2110.02861, with roots in place of their table of values, as roots
are elementwise and their spacing is as fine near zero. Of a block of x,

    signed:    y = sign(x) |x|^(1/2);  scale = max|y| / 127;  value = round(y / scale)
    unsigned:  y = x^(1/4);            scale = max y / 255;   value = round(y / scale),
                                                              at least 1 where x > 0

The signed code is for moments and residuals. Where the sizes of a block's entries are
spread like exp(N(0, 1)), a momentum of decay 0.9 gets noise of 0.02 standard deviations
of its gradient from it, and 0.08 from a linear code, which loses a twentieth of the
drift of the smallest tenth as well; at exp(1.5 N(0, 1)) it is 0.05 against 0.23.

The unsigned code is for a variance, which is divided by: the root of its root is on the
scale that m is on. A linear one gives most entries the value 0, and training diverges.
That no entry above 0 becomes 0 keeps the denominators. A variance of decay 0.999
changes by less than half a unit in a step, and rounding to nearest would lose the
change each time: where gradients shrank or grew several times over, denominators were
off by an octave. With a `seed` the unsigned code therefore rounds up with the
probability of the remainder, which leaves them off by a quarter of one.

Values have the shape of the array and scales all its axes but the last, so that both
are sharded, stacked and sliced as the array is.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sfpo_jax.kernels._hash import Seed, random_units

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

    Args:
      x: float[..., n]; not negative if not `signed`.
      signed: the code of moments and residuals, or the one of variances.
      seed: round unsigned values up or down at random, right in the mean; None rounds
        to nearest.

    Example:
      >>> quantize(jnp.ones((64, 512)))
      Quantized(int8[64, 512], blocks of 256)
    """
    x = x if x.dtype == jnp.float64 else x.astype(jnp.float32)
    size, block = x.shape[-1], block_size(x.shape[-1])
    roots = jnp.sqrt(jnp.abs(x)) if signed else jnp.sqrt(jnp.sqrt(x))
    largest = 127 if signed else 255
    scales = _block_max(roots, block) * np.asarray(1 / largest, x.dtype)
    # The root even of the smallest number is far from it: there is no underflow.
    inverse = jnp.where(scales > 0, 1 / jnp.where(scales > 0, scales, 1), 0)
    units = roots * _spread(inverse, size, block)
    if signed:
        units = jnp.minimum(jnp.round(units), 127)
        return Quantized(jnp.copysign(units, x).astype(jnp.int8), scales, block)
    if seed is None:
        units = jnp.round(units)
    else:
        units = jnp.floor(units + random_units(seed, x.shape, x.dtype))
    units = jnp.clip(units, (x > 0).astype(x.dtype), 255)
    return Quantized(units.astype(jnp.uint8), scales, block)


def dequantize(node: Quantized) -> jax.Array:
    """The array that a `Quantized` stands for, in the dtype of its scales.

    Example:
      >>> print(dequantize(quantize(jnp.array([16.0, -1.0, 0.5]))).round(2))
      [16.   -1.02  0.48]
    """
    scales = _spread(node.scales, node.values.shape[-1], node.block_size)
    roots = node.values.astype(scales.dtype) * scales
    if node.values.dtype == jnp.int8:
        return roots * jnp.abs(roots)
    # The fourth power of a unit may underflow, and what was above 0 must stay so.
    smallest = jnp.finfo(scales.dtype).smallest_normal
    return jnp.where(node.values > 0, jnp.maximum((roots * roots) ** 2, smallest), 0)


def _block_max(x: jax.Array, block: int) -> jax.Array:
    """[..., n] -> [..., blocks], of entries that are not negative."""
    blocks = -(-x.shape[-1] // block)
    rest = blocks * block - x.shape[-1]
    if rest:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rest)])
    return jnp.max(x.reshape(*x.shape[:-1], blocks, block), axis=-1)


def _spread(scales: jax.Array, size: int, block: int) -> jax.Array:
    """[..., blocks] -> [..., size]: to each entry what belongs to its block."""
    wide = jnp.broadcast_to(scales[..., None], (*scales.shape, block))
    return wide.reshape(*scales.shape[:-1], scales.shape[-1] * block)[..., :size]
