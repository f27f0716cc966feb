"""Finds the native libraries, and registers their handlers with XLA.

A library is used if it is there, can be loaded, and was built against an interface of
XLA that the running jaxlib knows: given a newer handler, jaxlib would refuse to start
any backend. Otherwise the jnp twins run, after one warning that gives the cause.
`SFPO_JAX_FFI=0` in the environment asks for the twins, `SFPO_JAX_FFI=require` for an
error in place of the warning.
"""

import ctypes
import functools
import os
import re
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import jax

# The handlers that each platform's library has.
TARGETS = (
    "sfpo_adamw8bit",
    "sfpo_magnitude_threshold",
    "sfpo_onebit_update",
    "sfpo_sign_decode",
    "sfpo_sign_encode",
    "sfpo_sign_serve",
    "sfpo_sparsify",
)
# JAX's names of the platforms that a library can serve.
PLATFORMS = ("cpu", "cuda")
_XLA_NAMES = {"cpu": "cpu", "cuda": "CUDA"}
_MAKERS = {"cpu": "a C++ compiler", "cuda": "nvcc"}
_SWITCH = "SFPO_JAX_FFI"


class Library(NamedTuple):
    """A native library, or why there is none.

    Attributes:
      platform: "cpu" or "cuda".
      path: its file, None where none was found.
      problem: why it is not used; empty for one that is.
    """

    platform: str
    path: Path | None
    problem: str


@functools.cache
def native_platforms() -> tuple[str, ...]:
    """Platforms whose native kernels are registered, of "cpu" and "cuda".

    Warns, once for the process, of what cannot be used. A CUDA library that was never
    built is not worth a warning.

    Raises:
      RuntimeError: `SFPO_JAX_FFI=require`, and the CPU's library cannot be used.
    """
    libraries = load_libraries()
    switch = _switch()
    for library in libraries:
        is_expected = library.platform == "cpu" or library.path
        if not library.problem or not is_expected or switch == "0":
            continue
        text = f"native kernels for {library.platform.upper()}: {library.problem}"
        if switch == "require" and library.platform == "cpu":
            raise RuntimeError(f"{text} ({_SWITCH}=require)")
        warnings.warn(
            f"{text}. The slower jnp versions run instead; {_SWITCH}=0 says that this "
            "is meant.",
            stacklevel=2,
        )
    return tuple(x.platform for x in libraries if not x.problem)


@functools.cache
def load_libraries() -> tuple[Library, ...]:
    """Loads and registers what there is, once for the process."""
    if _switch() == "0":
        reason = f"turned off by {_SWITCH}=0"
        return tuple(Library(platform, None, reason) for platform in PLATFORMS)
    return tuple(_load(name, find_library(_file_name(name))) for name in PLATFORMS)


def _switch() -> str:
    switch = os.environ.get(_SWITCH, "")
    if switch not in ("", "0", "1", "require"):
        raise ValueError(
            f"`{_SWITCH}` must be 0, 1 or require, got {switch!r}: 0 turns the native "
            "kernels off."
        )
    return switch


def _file_name(platform: str) -> str:
    return f"libsfpo_jax_{platform}.so"


def find_library(name: str) -> Path | None:
    """The library beside this file, or where an editable installation has put it."""
    beside = Path(__file__).parent / name
    if beside.exists():
        return beside
    try:
        files = metadata.files("sfpo_jax") or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == name:
            path = Path(str(file.locate()))
            return path if path.exists() else None
    return None


def _load(platform: str, path: Path | None) -> Library:
    if path is None:
        problem = (
            f"there is no library; `pip install` makes one with {_MAKERS[platform]}"
        )
        return Library(platform, None, problem)
    try:
        library = ctypes.CDLL(str(path))
        built = (library.sfpo_ffi_api_major(), library.sfpo_ffi_api_minor())
        handlers = {name: getattr(library, name) for name in TARGETS}
    except (OSError, AttributeError) as error:
        return Library(platform, path, f"'{path}' cannot be loaded: {error}")
    if problem := _version_problem(built, _running_version()):
        return Library(platform, path, problem)
    for name, handler in handlers.items():
        jax.ffi.register_ffi_target(
            name, jax.ffi.pycapsule(handler), platform=_XLA_NAMES[platform]
        )
    return Library(platform, path, "")


def _version_problem(built: Sequence[int], running: Sequence[int] | None) -> str:
    """Why handlers of one version must not meet another; empty if they may."""
    if running is None:
        return "the version of XLA's FFI that runs here could not be read"
    if built[0] == running[0] and built[1] <= running[1]:
        return ""
    return (
        f"built for version {built[0]}.{built[1]} of XLA's FFI, here runs "
        f"{running[0]}.{running[1]}: install sfpo_jax again beside this jaxlib"
    )


def _running_version() -> tuple[int, int] | None:
    """The version of the FFI in the running jaxlib, from the header it comes with."""
    header = Path(jax.ffi.include_dir()) / "xla" / "ffi" / "api" / "c_api.h"
    try:
        text = header.read_text(encoding="utf-8")
    except OSError:
        return None
    found = dict(re.findall(r"#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", text))
    if found.keys() != {"MAJOR", "MINOR"}:
        return None
    return int(found["MAJOR"]), int(found["MINOR"])
