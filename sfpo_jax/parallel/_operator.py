"""Linear layers whose product is shared by the ranks of the mesh axis `op`.

Between them the activations are cut along the sequence, axis -2, and each rank works on
its own rows. A layer cut by columns reads the rows of all ranks and gives each rank
some features of all rows; one cut by rows of its kernel takes these back to rows. Both
pass pieces round a ring instead of one large gather or scatter (`_ring_matmul`).

Gradients are those of the sum over ranks of what each rank computes: a loss that all
ranks of `op` compute alike counts as often as there are ranks.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from sfpo_jax.collectives import axis_size, is_bound
from sfpo_jax.parallel._ring import Ring
from sfpo_jax.parallel._ring_matmul import (
    all_gather_matmul,
    matmul_reduce_scatter,
    product,
)
from sfpo_jax.tuning import check_chunk_size


class Operator(NamedTuple):
    """How one product is shared.

    Example:
      >>> import sfpo_jax as sfpo
      >>> sfpo.Operator(chunk_size=8).size()  # outside shard_map
      1
    """

    chunk_size: int = 4
    """Pieces of a product, over all ranks; a multiple of the size of the axis."""
    prefetch_depth: int = 2
    """Pieces in flight at most; half of `chunk_size` or fewer."""
    axis_name: str = "op"
    """The mesh axis."""

    def size(self) -> int:
        """Ranks that share a product; 1 where the axis is not bound."""
        return axis_size(self.axis_name) if is_bound(self.axis_name) else 1

    def ring(self) -> Ring:
        """The ring to send pieces round, inside `shard_map`.

        Raises:
          ValueError: numbers that `sfpo_jax.tuning.check_chunk_size` refuses.
        """
        size = self.size()
        check_chunk_size(self.chunk_size, self.prefetch_depth, size)
        pieces = self.chunk_size // size
        return Ring(self.axis_name, size, pieces, self.prefetch_depth)


_DEFAULT = Operator()


def column_parallel(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    operator: Operator = _DEFAULT,
) -> jax.Array:
    """x kernel + bias for the rows of all ranks and this rank's columns.

    Args:
      x: [..., L / op, D], this rank's rows of the sequence.
      kernel: [D, F / op], this rank's columns, in the dtype of x.
      bias: [F / op] in the dtype of x, or None.
      operator: how the product is shared; a plain product where its axis is not bound
        or has size 1.

    Returns:
      [..., L, F / op] in the dtype of x, accumulated in float32 or wider.

    Raises:
      ValueError: shapes that do not fit, fewer rows than pieces, or numbers that
        `sfpo_jax.tuning.check_chunk_size` refuses.
      TypeError: dtypes that differ.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = sfpo.make_mesh(op=2)
      >>> multiply = jax.jit(
      ...     jax.shard_map(
      ...         sfpo.column_parallel,
      ...         mesh=mesh,
      ...         in_specs=(P(None, "op"), P(None, "op")),
      ...         out_specs=P(None, None, "op"),
      ...         check_vma=False,
      ...     )
      ... )
      >>> multiply(jnp.ones((2, 8, 3)), jnp.ones((3, 12))).shape
      (2, 8, 12)
    """
    _check(x, kernel, bias)
    ring = operator.ring()
    if ring.size == 1:
        return _with_bias(product(x, kernel).astype(x.dtype), bias)
    y: Any = all_gather_matmul(x, kernel, ring)
    return _with_bias(y, bias)


def row_parallel(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None = None,
    operator: Operator = _DEFAULT,
) -> jax.Array:
    """x kernel + bias, summed over the ranks, for this rank's rows.

    Args:
      x: [..., L, F / op], this rank's features of the whole sequence.
      kernel: [F / op, D], this rank's rows of the kernel, in the dtype of x.
      bias: [D], the same on all ranks, in the dtype of x; or None.
      operator: as in `column_parallel`.

    Returns:
      [..., L / op, D] in the dtype of x. Products are accumulated in float32 or wider;
      sums that travel have the dtype of x.

    Raises:
      ValueError: as `column_parallel`, and an L that is no multiple of the axis' size.
      TypeError: dtypes that differ.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> from jax.sharding import PartitionSpec as P
      >>> mesh = sfpo.make_mesh(op=2)
      >>> multiply = jax.jit(
      ...     jax.shard_map(
      ...         sfpo.row_parallel,
      ...         mesh=mesh,
      ...         in_specs=(P(None, None, "op"), P("op")),
      ...         out_specs=P(None, "op"),
      ...         check_vma=False,
      ...     )
      ... )
      >>> float(multiply(jnp.ones((2, 8, 12)), jnp.ones((12, 3)))[1, 7, 2])
      12.0
    """
    _check(x, kernel, bias)
    ring = operator.ring()
    if ring.size == 1:
        return _with_bias(product(x, kernel).astype(x.dtype), bias)
    if x.shape[-2] % ring.size:
        raise ValueError(
            f"`x` must have a sequence that the axis {operator.axis_name} divides, got "
            f"{x.shape[-2]} rows and {ring.size} ranks: pad it, as `shard_sequence` "
            f"does, to {-(-x.shape[-2] // ring.size) * ring.size}"
        )
    y: Any = matmul_reduce_scatter(x, kernel, ring)
    return _with_bias(y, bias)


def shard_sequence(
    x: jax.Array,
    operator: Operator = _DEFAULT,
    *,
    axis: int = -2,
    fill: Any = 0,
) -> jax.Array:
    """This rank's part of a sequence that all ranks hold whole.

    Args:
      x: an array with a sequence along `axis`.
      operator: whose axis shares it; x comes back where that is not bound.
      axis: of the sequence.
      fill: what the sequence is padded with at its end, up to a multiple of the ranks.

    Returns:
      x with ceil(L / op) entries along `axis`.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> from jax.sharding import PartitionSpec as P
      >>> cut = jax.shard_map(
      ...     sfpo.shard_sequence,
      ...     mesh=sfpo.make_mesh(op=4),
      ...     in_specs=P(),
      ...     out_specs=P("op"),
      ...     check_vma=False,
      ... )
      >>> cut(jnp.ones((6, 1))).ravel().tolist()
      [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    """
    size = operator.size()
    if size == 1:
        return x
    axis %= x.ndim
    rows = -(-x.shape[axis] // size)
    padding = [(0, 0)] * x.ndim
    padding[axis] = (0, rows * size - x.shape[axis])
    whole = jnp.pad(x, padding, constant_values=fill)
    first = lax.axis_index(operator.axis_name) * rows
    return lax.dynamic_slice_in_dim(whole, first, rows, axis)


def _with_bias(y: jax.Array, bias: jax.Array | None) -> jax.Array:
    return y if bias is None else y + jnp.broadcast_to(bias, y.shape)


def _check(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> None:
    if x.ndim < 2 or kernel.ndim != 2 or x.shape[-1] != kernel.shape[0]:
        raise ValueError(
            f"`kernel` must have a row for each feature of `x`, got "
            f"{list(kernel.shape)} and {list(x.shape)}: cut both alike over the axis"
        )
    if bias is not None and bias.shape != kernel.shape[1:]:
        raise ValueError(
            f"`bias` must have an entry for each column of `kernel`, got "
            f"{list(bias.shape)} and {list(kernel.shape)}: cut both alike over the axis"
        )
    dtypes = {str(a.dtype) for a in (x, kernel, bias) if a is not None}
    if len(dtypes) > 1:
        raise TypeError(
            f"`x`, `kernel` and `bias` must have one dtype, got {sorted(dtypes)}: cast "
            "them to that of the arithmetic"
        )
