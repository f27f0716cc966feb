"""A pool of pages for memory outside of XLA's plan: staging buffers, workspaces.

It maps memory when it is first needed and gives whole pages back when nothing lies in
them. It does not replace XLA's allocator, which takes none from outside.
"""

import ctypes
import math
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import jax
import numpy as np

from sfpo_jax.kernels import NativePool, PoolError
from sfpo_jax.memory._pool_stats import PoolStats
from sfpo_jax.units import parse_bytes

Shape: TypeAlias = int | Sequence[int]

_JAX_ALIGNMENT = 64
DEFAULT_PAGE = 2 * 2**20  # bytes; the least that CUDA maps, and a huge page of Linux


class Pool:
    """A paged memory pool on the host.

    Args:
      limit: what it may map at most, as "2GB".
      page: the unit that is mapped and given back, a power of two, as "2MiB".
      cache: free pages that stay mapped for the next request, at most. "0B": each
        release is immediate. What it holds shows in `stats().cached`.
      poison: for debugging. Freed memory is filled, and a write to it is an error at
        the next allocation from the same place, or of `check`.
      compact_every: `compact` after so many frees; 0 for when asked, or when there is
        no room otherwise.

    Raises:
      PoolError: the library was not built, or an option makes no sense.
      UnitError: a size without its unit.

    All methods may be called from any thread. Closed, or left as a context manager, a
    pool gives nothing more; arrays stay valid as long as somebody has them.

    Example:
      >>> with Pool(limit="64MB", page="64KiB") as pool:
      ...     x = pool.array((1000, 100), "float32")
      ...     x[:] = 1
      ...     float(pool.to_jax(x).sum()), pool.stats().in_use
      (100000.0, 400000)
    """

    def __init__(
        self,
        limit: str = "1GB",
        page: str = "2MiB",
        cache: str = "64MiB",
        *,
        poison: bool = False,
        compact_every: int = 0,
    ) -> None:
        self._native = NativePool(
            parse_bytes(limit, name="limit"),
            parse_bytes(page, name="page"),
            parse_bytes(cache, name="cache"),
            poison=poison,
            compact_every=compact_every,
        )
        self._is_closed = False

    def array(self, shape: Shape, dtype: Any = np.float32) -> np.ndarray:
        """An array over a block of the pool; what lies in it is anything.

        The block is freed when the array, its views and the JAX arrays made of it are
        gone.

        Args:
          shape: as NumPy takes it.
          dtype: as NumPy takes it, JAX's bfloat16 included.

        Raises:
          PoolMemoryError: no room within the limit.
          PoolError: the pool is closed, or (`poison`) the memory was written to after
            it was freed.
        """
        native, size = self._open(), _bytes(shape, dtype)
        if size == 0:
            return np.empty(shape, dtype)
        address = native.allocate(size)
        return _view(native, address, shape, dtype, lambda: native.free(address))

    def movable(self, shape: Shape, dtype: Any = np.float32) -> "Movable":
        """An array that `compact` may move while it is not in use.

        Raises:
          PoolMemoryError, PoolError: as `array`; also for an array without elements.
        """
        return Movable(self._open(), shape, dtype)

    def to_jax(self, array: np.ndarray) -> jax.Array:
        """A JAX array on the CPU over the same memory, without a copy.

        JAX takes its arrays for constant: write nothing to `array` while it is in use.

        Raises:
          ValueError: JAX would have to copy: the array does not begin at a multiple of
            64 bytes, as a slice may not, is not contiguous, or has a dtype that JAX
            changes (float64 without `jax_enable_x64`).
        """
        place = array.ctypes.data
        shared = None
        if array.flags.c_contiguous and place % _JAX_ALIGNMENT == 0:
            device = jax.local_devices(backend="cpu")[0]
            # DLPack as NumPy has it does not know bfloat16.
            knows = array.dtype.kind in "?biufc"
            put = jax.dlpack.from_dlpack if knows else _alias
            shared = put(array, device)
        is_copy = shared is None or shared.unsafe_buffer_pointer() != place
        if shared is None or (is_copy and array.size):
            raise ValueError(
                f"JAX would copy `array`, of {array.dtype} at {place:#x}: it shares "
                "contiguous arrays at multiples of 64 bytes, of dtypes that it has; "
                "use jnp.array for a copy."
            )
        return shared

    def compact(self) -> int:
        """Moves movable blocks together; returns the bytes of pages given back."""
        return self._native.compact()

    def trim(self) -> None:
        """Gives the cached pages back."""
        self._native.trim()

    def check(self) -> None:
        """With `poison`, raises a `PoolError` if something free was written to."""
        self._native.check()

    def stats(self) -> PoolStats:
        """What the pool holds now; print it."""
        return PoolStats(*self._native.numbers())

    def close(self) -> None:
        """Gives the cache back, and nothing more out."""
        self._is_closed = True
        self._native.trim()

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _open(self) -> NativePool:
        if self._is_closed:
            raise PoolError("the pool is closed: make another one.")
        return self._native


class Movable:
    """A block without a fixed address: pin it to use it. Made by `Pool.movable`."""

    def __init__(self, native: NativePool, shape: Shape, dtype: Any) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self._native = native
        self._handle = native.allocate_movable(_bytes(shape, dtype))
        free = weakref.finalize(self, native.free_movable, self._handle)
        free.atexit = False

    @contextmanager
    def pinned(self) -> Iterator[np.ndarray]:
        """The array, which stays where it is until it and its views are gone.

        It may be kept after the block of `with`, and then keeps its place until it is
        gone.
        """
        native, handle = self._native, self._handle
        address = native.pin(handle)

        def unpin(owner: "Movable" = self) -> None:
            # Named, so that a block does not end before its array.
            owner._native.unpin(handle)

        yield _view(native, address, self.shape, self.dtype, unpin)


def _alias(array: np.ndarray, device: Any) -> jax.Array:
    return jax.device_put(array, device, may_alias=True)


def _bytes(shape: Shape, dtype: Any) -> int:
    count = shape if isinstance(shape, int) else math.prod(shape)
    if count < 0:
        raise ValueError(f"`shape` must not be negative, got {shape!r}.")
    return count * np.dtype(dtype).itemsize


def _view(
    native: NativePool, address: int, shape: Shape, dtype: Any, release: Any
) -> np.ndarray:
    """An array over memory, and `release` once it and its views are gone."""
    buffer = (ctypes.c_ubyte * _bytes(shape, dtype)).from_address(address)
    # Every view has it as its base; and the pool lasts as long as the call is due.
    weakref.finalize(buffer, release).atexit = False
    return np.ctypeslib.as_array(buffer).view(dtype).reshape(shape)
