"""A short timed probe: what mesh axes carry, and what the devices' codecs take.

Every device times the same few programs at two sizes; the line through the medians
gives the time of a message and of a byte. Processes then agree on the slowest of them:
a choice that differs between processes would leave them waiting in different programs.
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sfpo_jax.collectives import Codec, Link, Method
from sfpo_jax.transforms import compressed_mean

_SMALL, _FIRST, _LARGEST = 1 << 10, 1 << 20, 1 << 26  # bytes that a device holds
# A busy machine comes late by some milliseconds, which must not pass for bandwidth.
_LONG_ENOUGH = 0.03
_CODEC_SIZE = 1 << 22  # entries
_REPEATS, _AT_MOST = 7, 1.0


class _Line(NamedTuple):
    """Seconds of a program of any size."""

    small: float
    per_unit: float


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

    reduced = _fit(mesh, reduce, jnp.float32, ranks)
    exchanged = _fit(mesh, exchange, jnp.uint8, ranks)
    return Link(
        latency=reduced.small / (2 * (ranks - 1)),
        bandwidth=2 * share / reduced.per_unit,
        exchange=2 * share / exchanged.per_unit,
    )


def probe_codecs(mesh: Mesh, methods: Mapping[str, Method]) -> dict[str, Codec]:
    """Measures compressing, error feedback and decompressing on all devices at once.

    Args:
      mesh: the devices.
      methods: by name; "dense" has no codec and costs nothing.
    """
    found = {}
    for name, method in methods.items():
        if method.compressor is None:
            found[name] = Codec(0.0, 0.0)
            continue
        tx = compressed_mean(method.compressor, None)

        def run(x: jax.Array, tx: Any = tx) -> Any:
            # The errors are results, too, or they would not be computed.
            return tx.update(x, tx.init(x))

        timed = _Timed(mesh, run, jnp.float32)
        small, large = timed(_SMALL), timed(_CODEC_SIZE)
        found[name] = Codec(small, max(large - small, 0.0) / _CODEC_SIZE)
    return found


def _fit(
    mesh: Mesh, program: Callable[[jax.Array], Any], dtype: Any, parts: int
) -> _Line:
    """Seconds of no bytes and of each byte that a device holds."""
    width = jnp.dtype(dtype).itemsize
    timed = _Timed(mesh, program, dtype, parts)
    small = timed(_SMALL // width)
    size = _FIRST
    seconds = timed(size // width)
    while seconds < small + _LONG_ENOUGH and size < _LARGEST:
        size *= 4
        seconds = timed(size // width)
    # Never 0, so that rates stay finite.
    return _Line(small, max((seconds - small) / (size - _SMALL), 1e-14))


class _Timed:
    """Times a program of one device's array, run by all devices at once."""

    def __init__(
        self,
        mesh: Mesh,
        program: Callable[[jax.Array], Any],
        dtype: Any,
        parts: int = 1,
    ) -> None:
        self._dtype, self._parts, self._devices = dtype, parts, mesh.size
        spec = PartitionSpec(mesh.axis_names)
        self._sharding = NamedSharding(mesh, spec)
        self._jitted = jax.jit(
            jax.shard_map(
                program, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
            )
        )

    def __call__(self, size: int) -> float:
        """The median, in seconds, for `size` entries a device, alike everywhere."""
        size = -(-size // self._parts) * self._parts
        x = jax.make_array_from_callback(
            (size * self._devices,),
            self._sharding,
            functools.partial(_part, size, self._dtype),
        )
        # Compiles; its time decides for all how often the program is run.
        jax.block_until_ready(self._jitted(x))
        (once,) = agreed([self._once(x)])
        repeats = int(min(_REPEATS, max(2, _AT_MOST / max(once, 1e-6))))
        return agreed([statistics.median(self._once(x) for _ in range(repeats))])[0]

    def _once(self, x: jax.Array) -> float:
        began = time.perf_counter()
        jax.block_until_ready(self._jitted(x))
        return time.perf_counter() - began


def _part(size: int, dtype: Any, index: Any) -> np.ndarray:
    # Not all alike: a codec may be faster on zeros.
    del index
    return np.random.default_rng(0).normal(size=size).astype(dtype)


def agreed(values: list[float]) -> list[float]:
    """The largest of all processes, the same numbers on each."""
    if jax.process_count() == 1:
        return values
    from jax.experimental import multihost_utils

    gathered = multihost_utils.process_allgather(np.asarray(values, np.float32))
    return np.max(np.asarray(gathered), axis=0).astype(float).tolist()
