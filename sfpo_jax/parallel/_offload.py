"""Arrays in the host's memory: which ones, where they lie, how they come and go.

JAX's types tell in which memory an array lies, inside a compiled function too. So what
reads or writes a layer of a stack looks at the type of the stack and moves the layer,
and nothing else has to know. XLA's GPU compiler makes copies of it that run beside the
arithmetic. Whether it did is in the compiled program: `Plan.host_bytes`.
"""

import math
from collections.abc import Iterable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
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


def is_worth(x: Any) -> bool:
    """Whether an array of one layer, of which the shape is read, goes to the host."""
    return math.prod(x.shape) * jnp.dtype(x.dtype).itemsize >= _MIN_BYTES


def offloaded(stack: Any) -> Any:
    """A tree of bools: which arrays of a stack, led by its layers, go to the host."""
    return jax.tree.map(
        lambda x: is_worth(jax.ShapeDtypeStruct(x.shape[1:], x.dtype)), stack
    )


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


def layer_at(stack: Any, index: jax.Array) -> Any:
    """One slice of a stack, in the device's memory."""

    def read(x: jax.Array) -> jax.Array:
        part = lax.dynamic_index_in_dim(x, index, keepdims=False)
        return jax.device_put(part, jax.memory.Space.Device) if is_on_host(x) else part

    return jax.tree.map(read, stack)


def put_layer(stack: Any, layer: Any, index: jax.Array) -> Any:
    """The stack with one slice replaced, in the memory it lies in."""

    def write(x: jax.Array, part: jax.Array) -> jax.Array:
        part = to_host(part) if is_on_host(x) else part
        return lax.dynamic_update_index_in_dim(x, part, index, 0)

    return jax.tree.map(write, stack, layer)


def is_on_host(x: Any) -> bool:
    """Whether an array, inside a traced function, lies in the host's memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


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
    stacks, middle = lax.optimization_barrier(([leaves[i] for i in far], middle))
    for number, stack in zip(far, stacks, strict=True):
        leaves[number] = stack
    return treedef.unflatten(leaves), middle
