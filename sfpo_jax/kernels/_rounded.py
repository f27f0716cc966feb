"""Products that are rounded before they are added, whatever a compiler likes better."""

from collections.abc import Callable

import jax
import jax.numpy as jnp


def uncontracted(number: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """A function that gives an array back as it is, out of a compiler's sight.

    XLA contracts a product and a sum to one operation with one rounding, on CPUs and on
    GPUs, and no option forbids it. Between them the function changes the product's bits
    by an or with a zero that is known at run time only.

    Args:
      number: any traced float scalar that is a number; where it is NaN so are results.

    Returns:
      (float32[...] or float64[...]) -> the same.

    Example:
      >>> whole = uncontracted(jnp.float32(0.9))
      >>> whole(jnp.array([1.5, -0.0])).tolist()
      [1.5, -0.0]
    """
    is_nan = number != number

    def whole(x: jax.Array) -> jax.Array:
        word = jnp.uint64 if x.dtype == jnp.float64 else jnp.uint32
        # All bits set is a NaN, so that nothing is hidden.
        unseen = jnp.where(is_nan, jnp.array(~word(0)), jnp.array(word(0)))
        bits = jax.lax.bitcast_convert_type(x, word)
        return jax.lax.bitcast_convert_type(bits | unseen, x.dtype)

    return whole
