"""Arrays in the host's memory: which ones, where they lie, how they come and go.

JAX's types tell in which memory an array lies, inside a compiled function too. So what
reads or writes a layer of a stack looks at the stack's type and moves the layer, and
nothing else has to know. XLA's GPU compiler makes of it copies that run beside the
arithmetic, and puts what it was told in the host's memory there or nowhere: the bytes
are in the compiled program (`Plan.host_bytes`).
"""

from collections.abc import Iterable
from typing import Any, Literal, get_args

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Offload = Literal["states", "weights", "activations"]
_KNOWN = get_args(Offload)
_HOST = "pinned_host"
# Of one layer. What is smaller saves next to nothing, and each copy takes its turn.
_MIN_BYTES = 2**18


def check_offload(offload: Iterable[str]) -> tuple[Offload, ...]:
    """What is to be offloaded, each once, in the order of the type.

    Raises:
      ValueError: what cannot be.
    """
    names = [offload] if isinstance(offload, str) else list(offload)
    for name in names:
        if name not in _KNOWN:
            raise ValueError(
                f"`offload` must be of {', '.join(_KNOWN)}, got {name!r}: "
                'offload=("states",) keeps optimizer states in the host\'s memory.'
            )
    return tuple(name for name in _KNOWN if name in names)


def is_worth(shape: tuple[int, ...], dtype: Any) -> bool:
    """Whether one layer's array of this shape goes to the host."""
    size = jax.numpy.dtype(dtype).itemsize if not _is_key(dtype) else 0
    for length in shape:
        size *= length
    return size >= _MIN_BYTES


def offloaded(stack: Any) -> Any:
    """A tree of bools: which arrays of a stack, led by its layers, go to the host."""
    return jax.tree.map(lambda x: is_worth(x.shape[1:], x.dtype), stack)


def sharding(mesh: Mesh, spec: PartitionSpec, on_host: bool) -> NamedSharding:
    """How an array lies over the mesh, in its devices' memory or in their host's."""
    if not on_host:
        return NamedSharding(mesh, spec)
    placed = NamedSharding(mesh, spec, memory_kind=_HOST)
    if placed.memory_kind == _HOST:
        return placed
    # Devices that exist for the compiler alone have no memories to choose from, and the
    # choice is dropped; it is kept where a mesh names no devices.
    return NamedSharding(mesh.abstract_mesh, spec, memory_kind=_HOST)


def place(params: Any, shardings: Any) -> Any:
    """Copies what is to lie in the host's memory there; the rest stays as it is.

    Args:
      params: a tree of arrays.
      shardings: a tree of NamedShardings.
    """

    def put(x: Any, where: NamedSharding) -> Any:
        if where.memory_kind != _HOST:
            return x
        return jax.device_put(x, where, may_alias=False)

    return jax.tree.map(put, params, shardings)


def is_on_host(x: Any) -> bool:
    """Whether an array, inside a traced function, lies in the host's memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def to_device(x: jax.Array) -> jax.Array:
    """The array in the device's memory; itself where it lies there."""
    return jax.device_put(x, jax.memory.Space.Device) if is_on_host(x) else x


def to_memory_of(x: jax.Array, like: jax.Array) -> jax.Array:
    """The array in the memory that `like` lies in."""
    return to_host(x) if is_on_host(like) else x


def to_host(x: jax.Array) -> jax.Array:
    """The array in the host's memory."""
    return jax.device_put(x, jax.memory.Space.Host)


def in_order(carry: Any, middle: list[jax.Array]) -> tuple[Any, list[jax.Array]]:
    """(carry, middle): what follows either waits for all that was written to the host.

    Args:
      carry: a tree of arrays; those in the host's memory are waited for.
      middle: arrays of the device.
    """
    leaves, treedef = jax.tree.flatten(carry)
    far = [i for i, x in enumerate(leaves) if is_on_host(x)]
    if not far:
        return carry, middle
    stacks, middle = jax.lax.optimization_barrier(([leaves[i] for i in far], middle))
    for place, stack in zip(far, stacks, strict=True):
        leaves[place] = stack
    return treedef.unflatten(leaves), middle


def _is_key(dtype: Any) -> bool:
    return jax.numpy.issubdtype(dtype, jax.dtypes.prng_key)
