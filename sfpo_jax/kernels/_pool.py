"""The paged memory pool of `xla_ffi/memory_pool`, called through ctypes.

Addresses and sizes are plain integers here; `sfpo_jax.memory.Pool` makes arrays of
them. What the calls do stands in `xla_ffi/memory_pool/sfpo_pool.h`.
"""

import ctypes
import functools
import weakref
from typing import Any, NamedTuple

from sfpo_jax.kernels._library import find_library

FILE = "libsfpo_jax_pool.so"
# Of the header that this file was written by.
_VERSION = 1
_BACKENDS = {"host": 0, "cuda": 1}
_OUT_OF_MEMORY = 2
_U64, _I32, _ADDRESS = ctypes.c_uint64, ctypes.c_int32, ctypes.c_void_p


class PoolError(RuntimeError):
    """A call that the pool refused, or memory it could not get; one line says why."""


class PoolMemoryError(PoolError, MemoryError):
    """The pool has no room within its limit."""


class PoolNumbers(NamedTuple):
    """What a pool holds; bytes, but for the counts at the end."""

    reserved: int  # addresses; they cost nothing
    limit: int  # mapped memory at most
    page: int  # a page
    mapped: int  # pages now mapped, cached ones included
    cached: int  # mapped pages that no block lies in
    in_use: int  # blocks, each rounded up to the alignment; waiting ones too
    requested: int  # blocks, as they were asked for
    waiting: int  # blocks freed on a stream that has not come so far
    free: int  # limit - in_use
    largest_free: int  # the largest block that can be had now
    peak_mapped: int  # the most that was ever mapped
    peak_in_use: int  # the most that was ever in use
    moved: int  # copied by compactions
    blocks: int  # alive, waiting ones included
    allocations: int  # calls that gave a block
    compactions: int  # calls that looked for something to move
    pages_mapped: int  # pages ever mapped anew
    pages_given_back: int  # pages ever given back
    pages_moved: int  # free pages mapped at another address to lie side by side
    damaged: int  # writes after a free that were found


class _Options(ctypes.Structure):
    _fields_ = (
        *((name, _U64) for name in ("limit", "page", "cache")),
        *((name, _I32) for name in ("backend", "device", "poison", "compact_every")),
        ("driver", ctypes.c_char_p),
    )


class _Statistics(ctypes.Structure):
    _fields_ = tuple((name, _U64) for name in PoolNumbers._fields)


# The calls that return a code, and their arguments.
_CALLS: dict[str, tuple[Any, ...]] = {
    "probe": (ctypes.POINTER(_Options),),
    "create": (ctypes.POINTER(_Options), ctypes.POINTER(_ADDRESS)),
    "destroy": (_ADDRESS,),
    "allocate": (_ADDRESS, _U64, _U64, ctypes.POINTER(_ADDRESS)),
    "free": (_ADDRESS, _ADDRESS),
    "free_on_stream": (_ADDRESS, _ADDRESS, _ADDRESS),
    "wait": (_ADDRESS,),
    "allocate_movable": (_ADDRESS, _U64, ctypes.POINTER(_U64)),
    "pin": (_ADDRESS, _U64, ctypes.POINTER(_ADDRESS)),
    "unpin": (_ADDRESS, _U64),
    "free_movable": (_ADDRESS, _U64),
    "compact": (_ADDRESS, ctypes.POINTER(_U64)),
    "trim": (_ADDRESS,),
    "check": (_ADDRESS,),
    "get_statistics": (_ADDRESS, ctypes.POINTER(_Statistics)),
}


@functools.cache
def _library() -> ctypes.CDLL:
    path = find_library(FILE)
    if path is None:
        raise PoolError(
            f"the memory pool needs `{FILE}`, which was not built: install sfpo_jax "
            "again where there is a C++ compiler."
        )
    try:
        library = ctypes.CDLL(str(path))
        version = library.sfpo_pool_version()
        for name, arguments in _CALLS.items():
            getattr(library, f"sfpo_pool_{name}").argtypes = arguments
        library.sfpo_pool_last_message.restype = ctypes.c_char_p
    except (OSError, AttributeError) as error:
        raise PoolError(f"the memory pool cannot be loaded: {error}.") from error
    if version != _VERSION:
        raise PoolError(
            f"`{path}` has version {version} of the pool's interface, here is "
            f"{_VERSION}: install sfpo_jax again."
        )
    return library


def _call(name: str, *arguments: Any) -> None:
    library = _library()
    code = getattr(library, f"sfpo_pool_{name}")(*arguments)
    if code:
        line = library.sfpo_pool_last_message().decode()
        kind = PoolMemoryError if code == _OUT_OF_MEMORY else PoolError
        raise kind(f"{line}.")


def pool_problem(backend: str) -> str:
    """Why there is no pool of this memory here, "host" or "cuda"; empty if there is."""
    try:
        _call("probe", ctypes.byref(_Options(backend=_BACKENDS[backend])))
    except PoolError as error:
        return str(error).removesuffix(".")
    return ""


class NativePool:
    """A pool by the calls of its C interface.

    It ends when nobody has it any more; whoever holds a block must hold it as well.

    Args:
      limit, page, cache: bytes.
      backend: "host" or "cuda".
      device: CUDA's number of the GPU.
      poison: fill what is freed, and look whether it was written to since.
      compact_every: compact after so many frees; 0 for never by itself.
      driver: the file of CUDA's driver; empty for the system's.

    Raises:
      PoolError: a wrong option, no such memory here, or no library.
    """

    def __init__(
        self,
        limit: int,
        page: int,
        cache: int,
        backend: str = "host",
        device: int = 0,
        poison: bool = False,
        compact_every: int = 0,
        driver: str = "",
    ) -> None:
        options = _Options(
            *(limit, page, cache, _BACKENDS[backend], device, poison, compact_every),
            driver.encode() or None,
        )
        found = _ADDRESS()
        _call("create", ctypes.byref(options), ctypes.byref(found))
        self._pool = found.value
        # Not at exit: blocks may still be in use by threads that run until then.
        weakref.finalize(self, _end, self._pool).atexit = False

    def allocate(self, size: int, alignment: int = 0) -> int:
        """The address of a block of `size` bytes that stays where it is."""
        block = _ADDRESS()
        _call("allocate", self._pool, size, alignment, ctypes.byref(block))
        assert block.value is not None
        return block.value

    def free(self, address: int) -> None:
        """Ends a block of `allocate`."""
        _call("free", self._pool, address)

    def free_on_stream(self, address: int, stream: int) -> None:
        """Ends a block once a CUstream has done what it was given before."""
        _call("free_on_stream", self._pool, address, stream)

    def wait(self) -> None:
        """Waits until all that was freed on streams is free."""
        _call("wait", self._pool)

    def allocate_movable(self, size: int) -> int:
        """The handle of a block that compaction may move while it is not pinned."""
        handle = _U64()
        _call("allocate_movable", self._pool, size, ctypes.byref(handle))
        return handle.value

    def pin(self, handle: int) -> int:
        """The address of a movable block, which holds until `unpin`."""
        block = _ADDRESS()
        _call("pin", self._pool, handle, ctypes.byref(block))
        assert block.value is not None
        return block.value

    def unpin(self, handle: int) -> None:
        """Takes one pin back."""
        _call("unpin", self._pool, handle)

    def free_movable(self, handle: int) -> None:
        """Ends a block of `allocate_movable`."""
        _call("free_movable", self._pool, handle)

    def compact(self) -> int:
        """Moves blocks out of nearly empty pages; returns the bytes given back."""
        given_back = _U64()
        _call("compact", self._pool, ctypes.byref(given_back))
        return given_back.value

    def trim(self) -> None:
        """Gives the cached pages back."""
        _call("trim", self._pool)

    def check(self) -> None:
        """With `poison`, looks at all that is free, and raises at a write to it."""
        _call("check", self._pool)

    def numbers(self) -> PoolNumbers:
        """What the pool holds now."""
        found = _Statistics()
        _call("get_statistics", self._pool, ctypes.byref(found))
        return PoolNumbers(*(getattr(found, name) for name in PoolNumbers._fields))


def _end(pool: int | None) -> None:
    # BUSY where a block was never freed: its memory then stays until the process ends.
    _library().sfpo_pool_destroy(pool)
