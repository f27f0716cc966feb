"""Contenders for exact selection: the threshold of the largest 30 %, the cut by it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from experiments.bench.contender import Contender, Run, in_place, normal, twin
from sfpo_jax.kernels import kept_count, select_largest, sparsify_leaves
from sfpo_jax.kernels import magnitude_thresholds as thresholds

_SPARSITY = 0.7
# jnp.quantile and jax.lax.top_k sort: ten seconds at 16 million.
_SORTED = 16 * 10**6


def threshold(size: int) -> Run:
    """The exact threshold."""
    x, count = jnp.asarray(normal(size)), kept_count(size, _SPARSITY)
    found = jax.jit(lambda x: thresholds([x[None]], [count[None]]))
    return lambda: jax.block_until_ready(found(x))


def quantile(size: int) -> Run:
    """What one would write first, and not exact on ties."""
    x = jnp.asarray(normal(size))
    found = jax.jit(lambda x: jnp.quantile(jnp.abs(x), _SPARSITY))
    return lambda: jax.block_until_ready(found(x))


def top_k(size: int) -> Run:
    """The largest 30 % by value."""
    x, count = jnp.asarray(normal(size)), int(kept_count(size, _SPARSITY))
    found = jax.jit(lambda x: lax.top_k(jnp.abs(x), count)[0][-1])
    return lambda: jax.block_until_ready(found(x))


def partition(size: int) -> Run:
    """NumPy's, in one thread."""
    x, place = normal(size), size - int(kept_count(size, _SPARSITY))

    def run() -> None:
        np.partition(np.abs(x), place)

    return run


def cut(size: int) -> Run:
    """Threshold, kept entries and residual of gradient and residual."""
    x, residual = (jnp.asarray(normal(size, seed)) for seed in (0, 1))
    count = kept_count(size, _SPARSITY)

    def step(state: Any, x: Any) -> Any:
        residual, _ = state
        found = sparsify_leaves(
            [x],
            [count],
            residual=[residual],
            is_on=jnp.array(True),
            is_new=jnp.array(True),
        )
        return (found.residual[0], found.kept[0]), None

    return in_place(step, (residual, jnp.zeros_like(x)), x)


def cut_by_quantile(size: int) -> Run:
    """The same with `jnp.quantile` and `jnp.where`."""
    x, residual = (jnp.asarray(normal(size, seed)) for seed in (0, 1))

    def step(state: Any, x: Any) -> Any:
        total = x + state[0]
        is_kept = jnp.abs(total) >= jnp.quantile(jnp.abs(total), _SPARSITY)
        kept = jnp.where(is_kept, total, 0)
        return (total - kept, kept), None

    return in_place(step, (residual, jnp.zeros_like(x)), x)


def rows(size: int) -> Run:
    """The largest tenth of each block of 2,048, as the sparse compressors choose it."""
    blocks = jnp.asarray(normal(size // 2048 * 2048)).reshape(-1, 2048)
    counts = jnp.full(blocks.shape[0], 205, jnp.uint32)
    found = jax.jit(lambda x: select_largest(x, counts))
    return lambda: jax.block_until_ready(found(blocks))


SELECT_CASES = {
    "threshold": [
        Contender("native", threshold),
        Contender("jnp twin", twin(threshold), _SORTED),
        Contender("jnp.quantile", quantile, _SORTED),
        Contender("jax.lax.top_k", top_k, _SORTED),
        Contender("np.partition", partition),
    ],
    "sparsify": [
        Contender("native", cut),
        Contender("jnp twin", twin(cut), _SORTED),
        Contender("jnp.quantile, jnp.where", cut_by_quantile, _SORTED),
    ],
    "select in blocks": [
        Contender("native", rows),
        Contender("jnp twin", twin(rows), _SORTED),
    ],
}
