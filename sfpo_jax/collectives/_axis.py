"""Questions to a mesh axis: its size, who varies over it, agreement over it.

`axis_name=None` is the same program with one worker: nothing is sent.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

AxisName = str | tuple[str, ...] | None


def axis_names(axis_name: AxisName) -> tuple[str, ...]:
    """The names in `axis_name`, none for None."""
    if axis_name is None:
        return ()
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def is_bound(axis_name: AxisName) -> bool:
    """True inside a `shard_map` over `axis_name`."""
    try:
        axis_size(axis_name)
    except NameError:
        return False
    return True


def axis_size(axis_name: AxisName) -> int:
    """Ranks along the axis, inside `shard_map`.

    Raises:
      NameError: the axis is not bound here.
    """
    return math.prod(lax.axis_size(name) for name in axis_names(axis_name))


def mesh_axis_size(axis_name: AxisName) -> int:
    """Ranks along the axis, inside `shard_map` or from the mesh of `jax.set_mesh`.

    Raises:
      ValueError: the axis is neither bound nor in a mesh that is set.
    """
    if is_bound(axis_name):
        return axis_size(axis_name)
    shape = jax.sharding.get_abstract_mesh().shape
    missing = [name for name in axis_names(axis_name) if name not in shape]
    if missing:
        raise ValueError(
            f"`axis_name` {axis_name!r} is no axis of a mesh here (known: "
            f"{list(shape) or 'none'}): call `init` under `jax.set_mesh(mesh)` or "
            "inside `shard_map`."
        )
    return math.prod(shape[name] for name in axis_names(axis_name))


def axis_index(axis_name: AxisName) -> jax.Array:
    """This rank's place along the axis, int32 scalar."""
    names = axis_names(axis_name)
    return lax.axis_index(names) if names else jnp.int32(0)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Axes over which `shard_map`, with its checks on, holds x to differ."""
    return frozenset(jax.typeof(x).mat.varying)


def vary(tree: Any, axis_name: AxisName) -> Any:
    """Marks every leaf as differing between ranks, for `shard_map`'s checks."""

    def mark(x: jax.Array) -> jax.Array:
        missing = set(axis_names(axis_name)) - varying_axes(x)
        return lax.pcast(x, tuple(sorted(missing)), to="varying") if missing else x

    return jax.tree.map(mark, tree)


def varies(x: jax.Array, axis_name: AxisName) -> bool:
    """True where `shard_map` cannot rule out that `x` differs between ranks.

    With its checks off (`check_vma=False`) nothing can be ruled out.
    """
    names = set(axis_names(axis_name))
    is_checked = names <= varying_axes(axis_index(axis_name))
    return not is_checked or not names.isdisjoint(varying_axes(x))


def square_norm(leaves: Sequence[jax.Array]) -> jax.Array:
    """Sum of squares of all entries, accumulated in float32 (float64 where given)."""
    squares = [jnp.sum(jnp.square(widen(x))) for x in leaves]
    is_wide = any(x.dtype == jnp.float64 for x in squares)
    work = jnp.float64 if is_wide else jnp.float32
    return sum((x.astype(work) for x in squares), jnp.zeros([], work))


def is_float(x: Any) -> bool:
    """Whether an array, or a shape, is of floating numbers, and so has gradients."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def widen(x: jax.Array) -> jax.Array:
    """x in float32, float64 where it is float64: the precision all is computed in."""
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


def all_finite(leaves: Sequence[jax.Array], axis_name: AxisName) -> jax.Array:
    """True where every entry on every rank is finite and so are their squares' sums.

    One scalar crosses the wire. Adam squares its gradient: one whose square overflows
    poisons the variance as surely as an infinity.
    """
    total = square_norm(leaves)
    if axis_name is not None:
        total = lax.psum(vary(total, axis_name), axis_name)
    return jnp.isfinite(total)
