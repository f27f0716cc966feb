r"""Leaves cut in two: their largest entries, and the rest as the next step's residual.

.. math::
    s = g + r, \qquad \mathrm{kept} = s \cdot [s \text{ among the k largest}],
    \qquad r' = s - \mathrm{kept}

The sum is never written: one native pass over g and r finds the threshold, another one
cuts. The residual is overwritten in place where its buffer may be.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from sfpo_jax.kernels._native import alike, choose, ffi_call, is_float32
from sfpo_jax.kernels._threshold import (
    Thresholds,
    is_kept,
    magnitude_thresholds,
    of_each,
)

Arrays = Sequence[jax.Array]


class Sparsified(NamedTuple):
    """Leaves and what was held back of them; of the leaves' shapes."""

    kept: tuple[jax.Array, ...]
    residual: tuple[jax.Array, ...]  # () without one
    counts: jax.Array  # uint32[leaves], entries kept of each


def sparsify_leaves(
    leaves: Arrays,
    counts: Sequence[jax.Array | int],
    *,
    residual: Arrays = (),
    is_on: jax.Array,
    is_new: jax.Array,
) -> Sparsified:
    """Keeps the largest magnitudes of each leaf and its residual together.

    Args:
      leaves: float32 arrays of any shapes.
      counts: how many to keep of each; all of a leaf costs no search.
      residual: of the leaves' shapes, added to them; () for none.
      is_on: bool scalar; False: the leaves pass as they are and the residual stays.
      is_new: bool scalar; False: the residual stays.
    """
    rows, held = ([x.reshape(1, -1) for x in group] for group in (leaves, residual))
    wanted = [jnp.asarray(count, jnp.uint32)[None] for count in counts]
    found = magnitude_thresholds(rows, wanted, addend=held)
    flags = is_on.reshape(()), is_new.reshape(())
    present = alike((*flags, found, tuple(leaves), tuple(residual)))
    if not is_float32([*leaves, *residual]):
        return _twin(*present)
    return choose(_native, _twin, *present)


def _native(
    is_on: jax.Array,
    is_new: jax.Array,
    found: Thresholds,
    leaves: Arrays,
    residual: Arrays,
) -> Sparsified:
    count = len(leaves)
    arrays = [(x.shape, jnp.float32) for x in (*leaves, *residual)]
    first = 4 + count
    results = ffi_call(
        "sfpo_sparsify",
        [is_on, is_new, found.key, found.end, *leaves, *residual],
        [((count,), jnp.uint32), *arrays],
        {"has_residual": bool(residual)},
        {first + i: 1 + count + i for i in range(len(residual))},
    )
    return Sparsified(
        kept=tuple(results[1 : 1 + count]),
        residual=tuple(results[1 + count :]),
        counts=results[0],
    )


def _twin(
    is_on: jax.Array,
    is_new: jax.Array,
    found: Thresholds,
    leaves: Arrays,
    residual: Arrays,
) -> Sparsified:
    total = leaves
    if residual:
        total = [x + r for x, r in zip(leaves, residual, strict=True)]
    rows = [s.reshape(1, -1) for s in total]
    parts = zip(rows, of_each(found, rows), total, strict=True)
    marks = [is_kept(row, part).reshape(s.shape) | ~is_on for row, part, s in parts]
    kept = [
        jnp.where(is_on, jnp.where(m, s, 0), x)
        for m, s, x in zip(marks, total, leaves, strict=True)
    ]
    left = [
        jnp.where(is_on & is_new, jnp.where(m, 0, s), r)
        for m, s, r in zip(marks, total, residual, strict=False)
    ]
    count = jnp.stack([jnp.sum(m, dtype=jnp.uint32) for m in marks])
    return Sparsified(tuple(kept), tuple(left), count)
