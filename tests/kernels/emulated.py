"""The CUDA kernels compiled for the CPU, called in place of the CPU's own."""

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import jax
import numpy as np
import pytest

from sfpo_jax.kernels import (
    _adamw8bit,
    _library,
    _native,
    _onebit,
    _signs,
    _sparsify,
    _threshold,
)

T = TypeVar("T")

needs_emulation = [
    pytest.mark.skipif(
        "cpu" not in _library.native_platforms(),
        reason="no CPU library to compare with",
    ),
    pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler"),
]
_SOURCES = Path(__file__).parents[2] / "xla_ffi"
# Wrong alignment, and indices outside of arrays of known size, end the process.
_OPTIONS = (
    "-std=c++17 -O0 -fPIC -shared -w -ffp-contract=off "
    "-fsanitize=alignment,bounds,shift -fsanitize-undefined-trap-on-error"
).split()


@functools.cache
def library() -> ctypes.CDLL:
    """Compiles and registers the emulated handlers, once for the process.

    Raises:
      FileNotFoundError: there is no C++ compiler, or no source (an installed package).
    """
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or not _SOURCES.is_dir():
        raise FileNotFoundError("no C++ compiler, or no sources of the kernels")
    includes = [_SOURCES / "tests" / "emulated", _SOURCES, jax.ffi.include_dir()]
    path = Path(tempfile.gettempdir()) / f"sfpo_jax_emulated_{_digest()}.so"
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        command = [compiler, *_OPTIONS, *(f"-I{include}" for include in includes)]
        command += [str(includes[0] / "kernels.cc"), "-o", str(unfinished)]
        subprocess.run(command, check=True)
        unfinished.replace(path)
    loaded = ctypes.CDLL(str(path))
    for name in _library.TARGETS:
        handler = jax.ffi.pycapsule(getattr(loaded, name))
        jax.ffi.register_ffi_target(f"emulated_{name}", handler, platform="cpu")
    return loaded


@contextmanager
def emulated() -> Iterator[None]:
    """Every native kernel of a program traced inside is the emulated CUDA one."""
    library()

    def call(target: str, *args: Any) -> list[jax.Array]:
        return _native.ffi_call(f"emulated_{target}", *args)

    with ExitStack() as patches:
        for module in (_adamw8bit, _onebit, _signs, _sparsify, _threshold):
            patches.enter_context(mock.patch.object(module, "ffi_call", call))
        patches.enter_context(
            mock.patch.object(_native, "native_platforms", lambda: ("cpu",))
        )
        yield


def in_both_orders(run: Callable[[], T]) -> tuple[T, T]:
    """`run` where the first lane that can go on does, and where the last one does."""
    found = []
    for backward in (0, 1):
        library().sfpo_run_backward(backward)
        found.append(jax.block_until_ready(run()))
    return found[0], found[1]


def assert_same_bits(found: Any, wanted: Any) -> None:
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
    for got, expected in pairs:
        assert got.dtype == expected.dtype and got.shape == expected.shape
        got, expected = (np.asarray(x).ravel().view(np.uint8) for x in (got, expected))
        np.testing.assert_array_equal(got, expected)


def compare(run: Callable[..., Any], *args: Any) -> None:
    """Tells `run(*args)` with the CUDA kernels from it with those of the CPU."""
    wanted = jax.jit(run)(*args)
    with emulated():
        compiled = jax.jit(lambda *args: run(*args)).lower(*args).compile()
    for found in in_both_orders(lambda: compiled(*args)):
        assert_same_bits(found, wanted)


def _digest() -> str:
    """Of all that is compiled: another version is another file."""
    found = hashlib.sha256(" ".join(_OPTIONS).encode())
    for path in sorted(_SOURCES.rglob("*.*")):
        if path.suffix in (".h", ".cuh", ".cu", ".cc"):
            found.update(path.read_bytes())
    return found.hexdigest()[:16]
