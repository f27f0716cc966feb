"""Two products over a ring, and their gradients, which are the same two again.

Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053) with the activations between
products cut along the sequence (Korthikanti et al. 2022, arXiv:2205.05198), and each
gather or scatter taken apart so that it overlaps its product (Wang et al. 2023,
"Overlap communication with dependent computation via decomposition", ASPLOS).

Shapes stand in the names: l = L / op rows of a rank, f = F / op columns of a rank.
Gradients are those of the sum over ranks of what each computes. Only local arrays are
saved: the backward pass sends x round again rather than keep it whole.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sfpo_jax.parallel._leafwise import after
from sfpo_jax.parallel._ring import Ring, reduce, rotate
from sfpo_jax.parallel._stack_pass import wide_dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def all_gather_matmul(x_lxD: jax.Array, w_Dxf: jax.Array, ring: Ring) -> jax.Array:
    """The rows of all ranks times this rank's columns.

    Args:
      x_lxD: [..., l, D], this rank's rows.
      w_Dxf: [D, f], of the same dtype.
      ring: the ranks; pieces * (size - 1) permutes.

    Returns:
      [..., L, f] in the dtype of x, accumulated in float32 or wider.
    """
    return _gathered_product(x_lxD, w_Dxf, ring)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul_reduce_scatter(y_Lxf: jax.Array, w_fxD: jax.Array, ring: Ring) -> jax.Array:
    """The product summed over ranks, of which each keeps its own rows.

    Args:
      y_Lxf: [..., L, f], this rank's columns; L a multiple of the ring's size.
      w_fxD: [f, D], of the same dtype.
      ring: the ranks; pieces * (size - 1) permutes.

    Returns:
      [..., l, D] in the dtype of y; products are accumulated in float32 or wider.
    """
    return _scattered_product(y_Lxf, w_fxD, ring)


def _gather_fwd(x: jax.Array, w: jax.Array, ring: Ring) -> Any:
    return _gathered_product(x, w, ring), (x, w)


def _gather_bwd(ring: Ring, saved: Any, dy_Lxf: jax.Array) -> Any:
    x_lxD, w_Dxf = saved
    rows = x_lxD.shape[-2]

    def multiply(x: jax.Array, owner: jax.Array, first: int) -> jax.Array:
        dy = _rows(dy_Lxf, owner * rows + first, x.shape[-2])
        return _outer(x, dy)

    dx_lxD = _scattered_product(dy_Lxf, w_Dxf.T, ring)
    # After the first ring, or a compiler joins transfers of the two; and not those of
    # the forward pass, whose pieces it would have to keep.
    x_lxD = after(x_lxD, dx_lxD)
    dw_Dxf = rotate(ring, x_lxD, multiply, lambda dw, part, *_: dw + part, 0.0)
    return dx_lxD, dw_Dxf.astype(w_Dxf.dtype)


def _scatter_fwd(y: jax.Array, w: jax.Array, ring: Ring) -> Any:
    return _scattered_product(y, w, ring), (y, w)


def _scatter_bwd(ring: Ring, saved: Any, dz_lxD: jax.Array) -> Any:
    """Both gradients read the rows that go round."""
    y_Lxf, w_fxD = saved
    rows = dz_lxD.shape[-2]

    def multiply(dz: jax.Array, owner: jax.Array, first: int) -> Any:
        y = _rows(y_Lxf, owner * rows + first, dz.shape[-2])
        return product(dz, w_fxD.T).astype(y.dtype), _outer(y, dz)

    def fold(carry: Any, products: Any, owner: jax.Array, first: int) -> Any:
        return _put(carry[0], products[0], owner * rows + first), carry[1] + products[1]

    dy_Lxf, dw_fxD = rotate(ring, dz_lxD, multiply, fold, (jnp.zeros_like(y_Lxf), 0.0))
    return dy_Lxf, dw_fxD.astype(w_fxD.dtype)


all_gather_matmul.defvjp(_gather_fwd, _gather_bwd)
matmul_reduce_scatter.defvjp(_scatter_fwd, _scatter_bwd)


def _gathered_product(x_lxD: jax.Array, w_Dxf: jax.Array, ring: Ring) -> jax.Array:
    rows = x_lxD.shape[-2]
    shape = (*x_lxD.shape[:-2], ring.size * rows, w_Dxf.shape[1])
    return rotate(
        ring,
        x_lxD,
        lambda x, *_: product(x, w_Dxf).astype(x_lxD.dtype),
        lambda y, part, owner, first: _put(y, part, owner * rows + first),
        jnp.zeros(shape, x_lxD.dtype),
    )


def _scattered_product(y_Lxf: jax.Array, w_fxD: jax.Array, ring: Ring) -> jax.Array:
    rows = y_Lxf.shape[-2] // ring.size

    def multiply(owner: jax.Array, first: int, count: int, before: Any) -> jax.Array:
        y = _rows(y_Lxf, owner * rows + first, count)
        return product(after(y, before), w_fxD)

    return reduce(ring, multiply, rows, y_Lxf.dtype)


def product(x: jax.Array, w: jax.Array) -> jax.Array:
    """x w in float32, float64 where given."""
    return jnp.matmul(x, w, preferred_element_type=wide_dtype(x.dtype))


def _outer(x_rxD: jax.Array, y_rxF: jax.Array) -> jax.Array:
    """Sum over leading axes and rows of x^T y, [D, F], in float32 or float64."""
    axes = tuple(range(x_rxD.ndim - 1))
    return lax.dot_general(
        x_rxD,
        y_rxF,
        ((axes, axes), ((), ())),
        preferred_element_type=wide_dtype(x_rxD.dtype),
    )


def _rows(x: jax.Array, first: jax.Array, count: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, first, count, axis=-2)


def _put(x: jax.Array, part: jax.Array, first: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice_in_dim(x, part, first, axis=-2)
