"""What `bench.kernels` times, and how it is made ready."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from sfpo_jax.kernels import use_twins

Run = Callable[[], None]
_ANY_SIZE = 10**12


class Contender(NamedTuple):
    """Something to time.

    Attributes:
      name: what it is called.
      prepare: entries -> what to time, or None where it cannot be done here.
      limit: the most entries it is asked to do.
    """

    name: str
    prepare: Callable[[int], Run | None]
    limit: int = _ANY_SIZE


def copy_in_threads(size: int) -> Run:
    """A copy of float32 entries into a warm destination, a part for each core."""
    threads = os.cpu_count() or 1
    source, target = normal(size), np.zeros(size, np.float32)
    pairs = list(
        zip(
            np.array_split(source, threads),
            np.array_split(target, threads),
            strict=True,
        )
    )
    pool = ThreadPoolExecutor(threads)

    def run() -> None:
        list(pool.map(lambda pair: np.copyto(pair[1], pair[0]), pairs))

    return run


def normal(size: int, seed: int = 0) -> np.ndarray:
    """Random float32 entries."""
    return np.random.default_rng(seed).standard_normal(size, np.float32)


def in_place(step: Callable[..., Any], state: Any, *constants: Any) -> Run:
    """Runs (state, _) = step(state, *constants) with the state donated."""
    compiled = jax.jit(step, donate_argnums=0)
    held = [state]

    def run() -> None:
        held[0], _ = jax.block_until_ready(compiled(held[0], *constants))

    return run


def twin(prepare: Callable[[int], Run]) -> Callable[[int], Run]:
    """The same with the jnp twins: they are chosen when the program is traced."""

    def prepare_twin(size: int) -> Run:
        with use_twins():
            run = prepare(size)
            run()
        return run

    return prepare_twin
