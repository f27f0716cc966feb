"""Compiles a lowered program for what it says about memory, and keeps the answer."""

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from sfpo_jax.collectives import transfers, wire_bytes
from sfpo_jax.memory._buffers import Assignment, covered, read_dump
from sfpo_jax.memory._cache import Cache
from sfpo_jax.memory._lowered import compiler_options
from sfpo_jax.memory._measurement import Measurement
from sfpo_jax.transforms import PHASE_SCOPES

# Part of the key: raise it when the meaning of a measurement changes.
_VERSION = 5
_PHASES = tuple(PHASE_SCOPES.values())
_CACHE_SWITCH = "jax_enable_compilation_cache"
_KEPT_BUFFERS = 32
_NO_TRITON = "without-triton"
_ATTEMPTS: dict[str, dict[str, bool]] = {
    "as-is": {},
    # Some shapes do not tile without autotuning, which needs the card.
    _NO_TRITON: {"xla_gpu_enable_triton_gemm": False},
}


class CompileError(RuntimeError):
    """XLA could not compile the program; the message has its reason."""


def measure(
    lowered: Any, target: str, mesh_shape: Mapping[str, int], cache: Cache
) -> Measurement:
    """Compiles, unless the same program was compiled before.

    Args:
      lowered: what `.lower` returned.
      target: what it is compiled for, all that decides the code.
      mesh_shape: the axes whose wire bytes are told apart.
      cache: where measurements are kept.

    Raises:
      CompileError: the compiler gave up.
    """
    text = lowered.as_text()
    axes = ",".join(f"{name}={size}" for name, size in mesh_shape.items())
    flags = os.environ.get("XLA_FLAGS", "")
    flags += compiler_options(lowered)
    parts = (str(_VERSION), jax.__version__, target, axes, flags, text)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    kept = cache.load(key)
    if kept is not None:
        return kept
    measured = _compile(lowered, mesh_shape)
    cache.save(key, measured)
    return measured


def _compile(lowered: Any, mesh_shape: Mapping[str, int]) -> Measurement:
    compiled, assigned, without_triton = compile_and_read(lowered)
    stats = compiled.memory_analysis()
    buffers = assigned.buffers if assigned else ()
    activations = covered(b for b in buffers if b.is_activation)
    sent = transfers(compiled.as_text() or "", mesh_shape, None, _PHASES)
    return Measurement(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temporary_bytes=stats.temp_size_in_bytes,
        activation_bytes=min(activations, stats.temp_size_in_bytes),
        host_bytes=stats.host_argument_size_in_bytes
        + stats.host_output_size_in_bytes
        - stats.host_alias_size_in_bytes
        + stats.host_temp_size_in_bytes,
        constant_bytes=assigned.constant_bytes if assigned else 0,
        parameters=assigned.parameters if assigned else {},
        buffers=buffers[:_KEPT_BUFFERS],
        wire_bytes=wire_bytes(sent),
        without_triton=without_triton,
        timeline=assigned.timeline if assigned else None,
    )


def compile_and_read(lowered: Any) -> tuple[Any, Assignment | None, bool]:
    """The compiled program, its memory, and whether it was compiled without Triton.

    Raises:
      CompileError: the compiler gave up.
    """
    with tempfile.TemporaryDirectory(prefix="sfpo-plan-") as folder:
        with _no_compilation_cache():
            compiled, dump = _try_compile(lowered, Path(folder))
        return compiled, read_dump(dump), dump.name == _NO_TRITON


def _try_compile(lowered: Any, folder: Path) -> tuple[Any, Path]:
    """The compiled program, and the folder of what the compiler wrote about it."""
    errors: list[str] = []
    for name, options in _ATTEMPTS.items():
        with tempfile.TemporaryFile() as log:
            try:
                with _quiet(log.fileno()):
                    where = {"xla_dump_to": str(folder / name)}
                    compiled = lowered.compile(compiler_options=where | options)
                return compiled, folder / name
            except jax.errors.JaxRuntimeError as error:
                errors += str(error).strip().splitlines()[:1]
    reason = errors[0] if errors else "the compiler gives no reason"
    raise CompileError(f"the program does not compile: {reason}")


@contextlib.contextmanager
def _no_compilation_cache() -> Iterator[None]:
    """A program from JAX's own cache on disk is not compiled and tells nothing."""
    if not getattr(jax.config, "jax_compilation_cache_dir", None):
        yield
        return
    before = getattr(jax.config, _CACHE_SWITCH)
    jax.config.update(_CACHE_SWITCH, False)
    # JAX looks at the setting once.
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update(_CACHE_SWITCH, before)
        compilation_cache.reset_cache()


@contextlib.contextmanager
def _quiet(target: int) -> Iterator[None]:
    """Sends what the compiler, which is not Python, writes to stderr elsewhere."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # a process without stderr
        yield
        return
    os.dup2(target, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
