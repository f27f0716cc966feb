"""Random bits that cost no memory: a hash of each entry's number and a seed.

The finaliser of MurmurHash3 (Austin Appleby, public domain,
https://github.com/aappleby/smhasher), applied twice, the seed mixed in before each. It
is a bijection of 32-bit words, so over all numbers every value comes up equally often.
`jax.random.bits` would write its bits to memory; this is elementwise, and XLA computes
it inside whatever uses it. Good for rounding, not for statistics.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_EXPONENT = np.uint32(0x7F800000)


class Seed(NamedTuple):
    """What `random_bits` depends on beside the number of the entry."""

    before: jax.Array  # uint32[]
    between: jax.Array  # uint32[]


def make_seed(*words: jax.Array) -> Seed:
    """Mixes integers, each taken as uint32[], into a seed."""
    # Two chains that start apart, or 64 bits of a key would become 32.
    seeds = []
    for start in (0x9E3779B9, 0x7F4A7C15):
        seed = jnp.uint32(start)
        for word in words:
            seed = _finalise(seed ^ word.astype(jnp.uint32)) + jnp.uint32(start)
        seeds.append(seed)
    return Seed(*seeds)


def random_bits(seed: Seed, shape: tuple[int, ...]) -> jax.Array:
    """uint32[shape], a function of the seed and an entry's row-major number mod 2^32.

    Example:
      >>> bits = random_bits(make_seed(jnp.int32(7)), (1 << 10, 1 << 10))
      >>> print((bits >> 31).mean().round(2))
      0.5
    """
    number = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = np.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        number += lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    return _finalise(_finalise(number ^ seed.before) ^ seed.between)


def random_units(seed: Seed, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    """Multiples of 2^-24 in [0, 1), of a float dtype of at least 24 bits."""
    return (random_bits(seed, shape) >> 8).astype(dtype) * np.asarray(2.0**-24, dtype)


def round_at_random(x: jax.Array, seed: Seed) -> jax.Array:
    """float32 to bfloat16, up with the probability of the remainder.

    Example:
      >>> x = jnp.full(1 << 16, 1 + 2.0**-9)
      >>> rounded = round_at_random(x, make_seed(jnp.int32(7)))
      >>> print((rounded > 1).mean().round(2), rounded.max())
      0.25 1.00781
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    # The sign stands apart, so adding to the magnitude's bits moves away from zero.
    moved = bits + (random_bits(seed, x.shape) & np.uint32(0xFFFF))
    cut = lax.bitcast_convert_type(moved & np.uint32(0xFFFF0000), jnp.float32)
    # Added bits would make a NaN of an infinity.
    is_finite = (bits & _EXPONENT) != _EXPONENT
    return jnp.where(is_finite, cut, x).astype(jnp.bfloat16)


def _finalise(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * np.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
