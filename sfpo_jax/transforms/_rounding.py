r"""Weights in bfloat16 that lose no small updates.

bfloat16 has 8 significant bits: an update under 1/512 of its weight, as most are late
in a run, is rounded away each time. Two ways out, of no or one byte a parameter.

"stochastic": the sum is rounded up with the probability of its remainder, and so right
in the mean: uniform random bits are added below the last bit that stays, and the rest
is cut off. Gupta et al. 2015, "Deep Learning with Limited Numerical Precision",
https://arxiv.org/abs/1502.02551.

"error_term": what the rounding of a weight lost is kept beside it, as an int8 multiple
e of 1/256 of its unit in the last place:

    full = p + e * ulp(p) / 256 + u;   p = bfloat16(full)
    e = (full - p) / (ulp(p) / 256), rounded stochastically

so that a weight has 16 significant bits, and what goes below them is right in the mean.
This is the weight splitting of "FlashOptim: Optimizers for Memory Efficient Training"
(https://arxiv.org/abs/2602.23349), but in units of a power of two, which makes p + e *
ulp(p) / 256 exact in float32, and with that rounding of e.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from sfpo_jax.kernels import Seed, make_seed, random_units, round_at_random

_EXPONENT = np.uint32(0x7F800000)
# ulp of bfloat16 = 2^(exponent - 7), and 256 units of the error term in each.
_UNITS = np.float32(2.0**-15)


Parts = Sequence[jax.Array | None]


class Rounding(NamedTuple):
    """How updates are added to weights: two pure functions.

    Attributes:
      init: params -> state: () for no state, else a tree with int8 of a leaf's shape
        for each bfloat16 leaf, `optax.MaskedNode()` for the others.
      apply: (params, updates, state, key, parts=None) -> (params, state). Updates are
        float32 or bfloat16. bfloat16 weights are computed in float32 and rounded; other
        floating leaves get the plain sum in their dtype, integer and boolean ones pass.
        `key` is a PRNG key, another one in each step and for each layer; None for no
        rounding at random. `parts` are the numbers of the parts of the leaves that this
        device has, int32[] in their order, None for those of which all have the same.
    """

    init: Callable[[Any], Any]
    apply: Callable[..., tuple[Any, Any]]


def make_rounding(kind: str | None) -> Rounding:
    """How bfloat16 weights keep their small updates.

    Args:
      kind: None, the nearest bfloat16, as `optax.apply_updates`; "stochastic", right in
        the mean, without state; "error_term", with one byte a weight, 16 significant
        bits.

    Raises:
      ValueError: another kind; "stochastic" without a key, when applied.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> rounding = make_rounding("error_term")
      >>> weight = jnp.ones(1, jnp.bfloat16)
      >>> state = rounding.init(weight)
      >>> for _ in range(256):
      ...     weight, state = rounding.apply(weight, jnp.full(1, 2.0**-12), state, None)
      >>> print(weight)
      [1.0625]
    """
    if kind not in (None, "stochastic", "error_term"):
        raise ValueError(
            f'`kind` must be None, "stochastic" or "error_term", got {kind!r}.'
        )

    def init(params: Any) -> Any:
        if kind != "error_term":
            return ()
        return jax.tree.map(
            lambda p: (
                jnp.zeros(p.shape, jnp.int8) if _is_narrow(p) else optax.MaskedNode()
            ),
            params,
        )

    def apply(
        params: Any, updates: Any, state: Any, key: Any, parts: Parts | None = None
    ) -> tuple[Any, Any]:
        words = _key_words(key)
        if kind == "stochastic" and not words:
            raise ValueError(
                '`key` must be a PRNG key with "stochastic" rounding, got None: pass '
                "one such as jax.random.fold_in(key, step)."
            )
        leaves, treedef = jax.tree.flatten(params)
        moves = treedef.flatten_up_to(updates)
        has_error = kind == "error_term"
        errors = treedef.flatten_up_to(state) if has_error else [None] * len(leaves)
        parts = [None] * len(leaves) if parts is None else parts
        new = []
        for place, (p, u, e, part) in enumerate(
            zip(leaves, moves, errors, parts, strict=True)
        ):
            own = () if part is None else (part,)
            seed = make_seed(*words, jnp.uint32(place), *own) if words else None
            if kind is None or not _is_narrow(p):
                new.append((_plain_sum(p, u), e))
            elif e is None:
                assert seed is not None
                total = p.astype(jnp.float32) + u.astype(jnp.float32)
                new.append((round_at_random(total, seed), None))
            else:
                new.append(_add_with_error(p, u, e, seed))
        weights = treedef.unflatten([p for p, _ in new])
        return weights, treedef.unflatten([e for _, e in new]) if has_error else state

    return Rounding(init, apply)


def _is_narrow(p: Any) -> bool:
    return jnp.result_type(p) == jnp.bfloat16


def _key_words(key: Any) -> Sequence[jax.Array]:
    """The uint32[] words of a key, typed or raw; none of None."""
    if key is None:
        return ()
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(key) if is_typed else key
    return [data[i] for i in range(data.shape[0])]


def _plain_sum(p: Any, u: Any) -> Any:
    """p + u in the wider dtype, cast to p's; p where it is no float."""
    if not jnp.issubdtype(jnp.result_type(p), jnp.floating):
        return p
    is_double = jnp.float64 in (p.dtype, u.dtype)
    work = jnp.float64 if is_double else jnp.float32
    return (p.astype(work) + u.astype(work)).astype(p.dtype)


def _add_with_error(
    p: jax.Array, u: jax.Array, e: jax.Array, seed: Seed | None
) -> tuple[jax.Array, jax.Array]:
    """(weight, int8 error term) of p + e * unit(p) + u."""
    wide = p.astype(jnp.float32)
    full = wide + e.astype(jnp.float32) * _unit(wide) + u.astype(jnp.float32)
    # A cast to bfloat16 and back may be compiled to nothing, which leaves no error.
    rounded = lax.reduce_precision(full, exponent_bits=8, mantissa_bits=7)
    unit = _unit(rounded)
    is_finite = unit > 0
    # Dividing by a power of two is exact.
    count = (full - rounded) / jnp.where(is_finite, unit, 1)
    if seed is None:
        count = jnp.round(count)
    else:
        count = jnp.floor(count + random_units(seed, p.shape, count.dtype))
    # Half a unit in the last place is 128, one more than int8 has.
    count = jnp.where(is_finite, jnp.clip(count, -128, 127), 0)
    return rounded.astype(jnp.bfloat16), count.astype(jnp.int8)


def _unit(p: jax.Array) -> jax.Array:
    """ulp(p) / 256, at least the smallest normal float32; 0 where p is not finite."""
    exponent = lax.bitcast_convert_type(p, jnp.uint32) & _EXPONENT
    power = lax.bitcast_convert_type(exponent, jnp.float32)
    unit = jnp.maximum(power * _UNITS, jnp.finfo(jnp.float32).smallest_normal)
    return jnp.where(exponent == _EXPONENT, 0, unit)
