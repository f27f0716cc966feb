"""A short timed probe: what mesh axes carry, and what the devices' codecs take.

Every device times the same few programs at a few sizes, medians of several runs: two
sizes give the time of a message and of a byte, and what a whole mean takes beyond that
is its codec, which is no straight line where arrays outgrow caches. Processes agree on
the slowest of them: a choice that differed between processes would leave them waiting
in different programs.
"""

import math
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sfpo_jax.collectives import Codec, Link, Method, axis_mean, estimate, methods
from sfpo_jax.transforms import compressed_mean, low_rank_mean, sparsify

_SMALL, _FIRST, _LARGEST = 1 << 10, 1 << 20, 1 << 26  # bytes that a device holds
_CODEC_SIZES = (1 << 10, 1 << 20, 1 << 22, 1 << 24)  # entries
# A busy machine comes late by some milliseconds, which must not pass for bandwidth.
_LONG_ENOUGH, _TOO_LONG = 0.03, 0.3
_REPEATS, _AT_MOST = 7, 0.5
_SPARSITY = 0.5  # of the mask, whose time hardly depends on it


def probe_link(mesh: Mesh, axis: str) -> Link:
    """Measures one axis of more than one rank by its collectives.

    Args:
      mesh: the devices; all of them take part, as in a step.
      axis: the axis.
    """
    ranks = mesh.shape[axis]
    share = (ranks - 1) / ranks

    def reduce(x: jax.Array) -> jax.Array:
        return lax.psum(x, axis)

    def exchange(x: jax.Array) -> jax.Array:
        # Bytes, as payloads are: what a reduction spends on adding is no part of it.
        parts = x.reshape(ranks, -1)
        parts = lax.all_to_all(parts, axis, split_axis=0, concat_axis=0, tiled=True)
        return lax.all_gather(parts[0], axis, tiled=True)

    small, per_byte = _line(mesh, reduce, jnp.float32, ranks)
    _, per_exchanged = _line(mesh, exchange, jnp.uint8, ranks)
    return Link(
        latency=small / (2 * (ranks - 1)),
        bandwidth=2 * share / per_byte,
        exchange=2 * share / per_exchanged,
    )


def probe_codecs(
    mesh: Mesh, axis: str, link: Link, among: Mapping[str, Method]
) -> dict[str, Codec]:
    """Measures means over an axis; what the link does not explain is the codec.

    Encoding, error feedback, decoding and all copies are in it, as a step has them: the
    stages timed one by one take half as long.

    Args:
      mesh: the devices.
      axis: an axis of more than one rank, the fastest where there is a choice.
      link: what `probe_link` says of it.
      among: methods by name. Factors of low rank are those of one square matrix.
    """
    found = {}
    for name, method in among.items():
        points: list[tuple[int, float]] = []
        for size in _CODEC_SIZES:
            seconds = _seconds(_averaging(mesh, axis, method, size))
            free = Codec(((0, 0.0),))
            sent = _on_square(method, size)
            network = estimate(sent, size, mesh.shape[axis], link, free).network
            points.append((size, max(seconds - network, 0.0)))
            if seconds > _TOO_LONG:
                break
        found[name] = Codec(tuple(points))
    return found


def _averaging(mesh: Mesh, axis: str, method: Method, size: int) -> Callable[[], Any]:
    """A function that averages float32[size] of each device over the axis."""
    x = _array(mesh, size, jnp.float32)
    if method.is_exact:
        dense = _on_devices(mesh, lambda x: axis_mean([x], axis)[0])
        return lambda: dense(x)
    shape = (size,)
    if method.compressor is not None:
        tx = compressed_mean(method.compressor, axis)
    else:
        assert method.rank is not None
        tx, shape = low_rank_mean(method.rank, axis), _square(size)

    def program(x: jax.Array, state: Any) -> Any:
        if method.is_masked:
            masking = sparsify(_SPARSITY)
            masked: Any = masking.update(x, masking.init(x))[0]
            x = masked
        return tx.update(x.reshape(shape), state)

    update = _on_devices(mesh, program, donate=(1,))
    held = [_on_devices(mesh, lambda x: tx.init(x.reshape(shape)))(x)]

    def run() -> Any:
        mean, held[0] = update(x, held[0])
        return mean, held[0]

    return run


def _on_square(method: Method, size: int) -> Method:
    """The method, sending what it does of the matrix that the probe averages."""
    if method.rank is None:
        return method
    return methods(rank=method.rank, shapes=[_square(size)])[method.name]


def _square(size: int) -> tuple[int, int]:
    """The shape of a matrix of so many entries, a power of 4."""
    side = math.isqrt(size)
    return side, size // side


def _line(
    mesh: Mesh, program: Callable[[jax.Array], Any], dtype: Any, parts: int
) -> tuple[float, float]:
    """Seconds of hardly any bytes, and of each byte that a device holds."""
    jitted, width = _on_devices(mesh, program), jnp.dtype(dtype).itemsize

    def timed(
        size: int, typical: Callable[[list[float]], float] = statistics.median
    ) -> float:
        entries = -(-size // (width * parts)) * parts
        x = _array(mesh, entries, dtype)
        return _seconds(lambda: jitted(x), typical)

    # The quickest: that the machine was busy is no property of the link.
    small, size = timed(_SMALL, min), _FIRST
    seconds = timed(size)
    while seconds < small + _LONG_ENOUGH and size < _LARGEST:
        size *= 4
        seconds = timed(size)
    # Never 0, so that rates stay finite.
    return small, max((seconds - small) / (size - _SMALL), 1e-14)


def _on_devices(
    mesh: Mesh, program: Callable[..., Any], donate: tuple[int, ...] = ()
) -> Any:
    """The program of one device's arrays, run by all devices at once."""
    spec = PartitionSpec(mesh.axis_names)
    return jax.jit(
        jax.shard_map(
            program, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
        ),
        donate_argnums=donate,
    )


def _array(mesh: Mesh, size: int, dtype: Any) -> jax.Array:
    """Random numbers, `size` of them on each device: zeros might go faster."""

    def part(index: Any) -> np.ndarray:
        del index
        values = np.random.default_rng(0).normal(scale=10, size=size)
        return (
            values.astype(np.int8).view(dtype) if width == 1 else values.astype(dtype)
        )

    width = jnp.dtype(dtype).itemsize
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_callback((size * mesh.size,), sharding, part)


def _seconds(
    run: Callable[[], Any], typical: Callable[[list[float]], float] = statistics.median
) -> float:
    """The typical one of several runs, alike in all processes."""

    def once() -> float:
        began = time.perf_counter()
        jax.block_until_ready(run())
        return time.perf_counter() - began

    once()  # compiles
    # All must run it equally often, or some would wait for ever.
    (first,) = agreed([once()])
    repeats = int(min(_REPEATS, max(2, _AT_MOST / max(first, 1e-6))))
    return agreed([typical([once() for _ in range(repeats)])])[0]


def agreed(values: list[float]) -> list[float]:
    """The largest of all processes, the same numbers on each."""
    if jax.process_count() == 1:
        return values
    from jax.experimental import multihost_utils

    gathered = multihost_utils.process_allgather(np.asarray(values, np.float32))
    return np.max(np.asarray(gathered), axis=0).astype(float).tolist()
