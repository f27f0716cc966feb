"""One call for a native kernel and its jnp twin: whichever the platform has."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType

from sfpo_jax.kernels._library import native_platforms

T = TypeVar("T")


_is_native: ContextVar[bool] = ContextVar("_is_native", default=True)


@contextmanager
def use_twins() -> Iterator[None]:
    """What is traced inside runs the jnp twins: to compare them with the kernels.

    A function that `jax.jit` has traced before keeps what it was traced with.
    """
    token = _is_native.set(False)
    try:
        yield
    finally:
        _is_native.reset(token)


def choose(native: Callable[..., T], twin: Callable[..., T], *args: Any) -> T:
    """`native(*args)` where the program will run on a platform that has the kernels.

    Both return the same tree of shapes and dtypes, varying over the same mesh axes.
    What a program is compiled for is known only when it is lowered: the planner
    compiles for a GPU in a process without one. Of arrays that a compiler is to
    partition the twin runs: a custom call would have them gathered.
    """
    usable = native_platforms() if _is_native.get() else ()
    if not usable or is_partitioned(args):
        return twin(*args)

    def alike_twin(*args: Any) -> T:
        # Made of constants alone it would vary over nothing; a custom call's does.
        return alike((args, twin(*args)))[1]

    return lax.platform_dependent(
        *args, default=alike_twin, **dict.fromkeys(usable, native)
    )


def is_partitioned(tree: Any) -> bool:
    """Whether arrays live on a mesh of several devices, outside `shard_map` over it."""
    meshes = {jax.typeof(x).sharding.mesh for x in jax.tree.leaves(tree)}
    return any(
        size > 1 and kind != AxisType.Manual
        for mesh in meshes
        for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    )


def is_float32(arrays: Sequence[jax.Array]) -> bool:
    """Whether the native kernels take these arrays."""
    return all(x.dtype == jnp.float32 for x in arrays)


def alike(tree: T) -> T:
    """All arrays of a tree as varying over the mesh axes that any of them varies over.

    A custom call inside `shard_map` has one set of axes for all that goes in.
    """
    leaves, treedef = jax.tree.flatten(tree)
    axes = [frozenset(jax.typeof(x).mat.varying) for x in leaves]
    every = frozenset().union(*axes)
    return treedef.unflatten(
        [
            lax.pcast(x, tuple(sorted(every - own)), to="varying") if every - own else x
            for x, own in zip(leaves, axes, strict=True)
        ]
    )


def ffi_call(
    target: str,
    operands: Sequence[jax.Array],
    results: Sequence[tuple[tuple[int, ...], Any]],
    attributes: Mapping[str, Any],
    aliases: Mapping[int, int] | None = None,
) -> list[jax.Array]:
    """Calls a handler.

    Args:
      target: its name.
      operands: what it reads, as `alike` leaves it.
      results: (shape, dtype) of each array that it writes.
      attributes: constants of the program.
      aliases: results, by their operands, that may use the operand's memory.
    """
    like = jax.typeof(operands[0])
    types = [
        like.update(shape=shape, dtype=jnp.dtype(dtype)) for shape, dtype in results
    ]
    call = jax.ffi.ffi_call(
        target,
        types,
        vmap_method="sequential",
        input_output_aliases=dict(aliases or {}),
    )
    return list(call(*operands, **attributes))
