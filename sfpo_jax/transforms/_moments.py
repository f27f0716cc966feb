"""How a moment or residual is kept: a float array, bytes, or two vectors.

A *kind* is what an argument such as `mu_dtype` resolves to: a float dtype, int8, the
word "factored", or None for the dtype of the arithmetic. A *node* is what is kept: an
array, a `Quantized` or a `Factored`. A node knows its kind, so that reading and writing
need no arguments; arrays too small to gain by it are kept as floats.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from sfpo_jax._validate import Scalar
from sfpo_jax.kernels import (
    Quantized,
    Seed,
    dequantize,
    is_worth_quantizing,
    quantize,
)
from sfpo_jax.transforms._factored import (
    Factored,
    expand,
    is_worth_factoring,
    update_factored,
    zeros_factored,
)


def resolve_kind(name: str, value: Any, allowed: Sequence[str]) -> Any:
    """A kind from an argument: one of `allowed`, dtype names and other words.

    Returns:
      None for None, a dtype for what names one, else the word.

    Raises:
      ValueError: what is not in `allowed`.
    """
    if value is None:
        return None
    if isinstance(value, str) and value in allowed and not _is_dtype(value):
        return value
    found = jnp.dtype(value) if _is_dtype(value) else None
    if found is None or found.name not in allowed:
        choices = [x if _is_float(x) else f'"{x}"' for x in allowed]
        raise ValueError(
            f"`{name}` must be None or one of {', '.join(choices)}, got {value!r}."
        )
    return found


def zeros_moment(
    shape: tuple[int, ...], kind: Any, work: Any, *, signed: bool = True
) -> Any:
    """A node of zeros.

    Args:
      shape: of the array.
      kind: as `resolve_kind` returns it.
      work: float32 or float64, the dtype of the arithmetic.
      signed: False for a second moment.
    """
    if isinstance(kind, str):
        if is_worth_factoring(shape):
            return zeros_factored(shape, work)
        return jnp.zeros(shape, work)
    if kind is None or kind != jnp.int8:
        return jnp.zeros(shape, kind or work)
    if not is_worth_quantizing(shape):
        return jnp.zeros(shape, work)
    # Not computed: outside `jit` each operation would make an array of floats.
    node = jax.eval_shape(lambda: quantize(jnp.zeros(shape, work), signed))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), node)


def load(node: Any, dtype: Any) -> jax.Array:
    """The array that a node stands for, in this dtype."""
    if isinstance(node, Quantized):
        return dequantize(node).astype(dtype)
    return (expand(node) if isinstance(node, Factored) else node).astype(dtype)


def store(value: jax.Array, like: Any, seed: Seed | None = None) -> Any:
    """A node of the kind of `like`, which is no `Factored`."""
    if isinstance(like, Quantized):
        signed = like.values.dtype == jnp.int8
        return quantize(value.astype(like.scales.dtype), signed, seed=seed)
    return value.astype(like.dtype)


def next_variance(
    node: Any, grads: jax.Array, b2: Scalar, seed: Seed, fresh: Scalar | None = None
) -> tuple[jax.Array, Any]:
    """v = b2 v + fresh g^2: (v for this step's update, the new node).

    Args:
      node: the second moment so far.
      grads: float32 or float64.
      b2: its decay.
      seed: for the rounding of a `Quantized`, another one in each step.
      fresh: weight of the gradient, None for 1 - b2.
    """
    fresh = 1 - b2 if fresh is None else fresh
    if isinstance(node, Factored):
        new = update_factored(node, grads, b2, fresh)
        return expand(new), new
    v = b2 * load(node, grads.dtype) + fresh * grads * grads
    return v, store(v, node, seed)


def bias_correction(decay: Scalar, count: jax.Array, dtype: Any) -> jax.Array:
    """1 - decay^count, a scalar."""
    return 1 - jnp.power(jnp.asarray(decay, dtype), count.astype(dtype))


def _is_dtype(value: Any) -> bool:
    try:
        jnp.dtype(value)
    except TypeError:
        return False
    return True


def _is_float(word: str) -> bool:
    return _is_dtype(word) and jnp.issubdtype(jnp.dtype(word), jnp.floating)
