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

from sfpo_jax.collectives import transfers, wire_bytes
from sfpo_jax.memory._buffers import covered, read_dump
from sfpo_jax.memory._cache import Cache
from sfpo_jax.memory._measurement import Measurement

# Part of the key: raise it when the meaning of a measurement changes.
_VERSION = 1
_KEPT_BUFFERS = 32
_NO_TRITON = {"xla_gpu_enable_triton_gemm": False}


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
    parts = (str(_VERSION), jax.__version__, target, axes, flags, text)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()
    kept = cache.load(key)
    if kept is not None:
        return kept
    measured = _compile(lowered, mesh_shape)
    cache.save(key, measured)
    return measured


def _compile(lowered: Any, mesh_shape: Mapping[str, int]) -> Measurement:
    with tempfile.TemporaryDirectory(prefix="sfpo-plan-") as folder:
        compiled, without_triton = _try_compile(lowered, folder)
        assigned = read_dump(Path(folder))
    stats = compiled.memory_analysis()
    buffers = assigned.buffers if assigned else ()
    activations = covered(b for b in buffers if b.is_activation)
    sent = transfers(compiled.as_text() or "", mesh_shape, None, ())
    return Measurement(
        argument_bytes=stats.argument_size_in_bytes,
        output_bytes=stats.output_size_in_bytes,
        alias_bytes=stats.alias_size_in_bytes,
        temporary_bytes=stats.temp_size_in_bytes,
        activation_bytes=min(activations, stats.temp_size_in_bytes),
        parameters=assigned.parameters if assigned else {},
        buffers=buffers[:_KEPT_BUFFERS],
        wire_bytes=wire_bytes(sent),
        without_triton=without_triton,
    )


def _try_compile(lowered: Any, folder: str) -> tuple[Any, bool]:
    """The program compiled, and whether it needed the second attempt."""
    errors = []
    for options in ({}, _NO_TRITON):
        with tempfile.TemporaryFile() as log:
            try:
                with _quiet(log.fileno()):
                    options = {"xla_dump_to": folder, **options}
                    return lowered.compile(compiler_options=options), len(options) > 1
            # Some shapes do not tile without autotuning, which needs the card.
            except jax.errors.JaxRuntimeError as error:
                errors.append(str(error).strip().splitlines() or [""])
    raise CompileError(f"the program does not compile: {errors[0][0]}")


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
