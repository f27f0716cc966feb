"""The CUDA kernels that work on leaves, on a CPU: the same bits as the CPU kernels'."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfpo_jax.kernels import (
    Seed,
    Thresholds,
    _sparsify,
    _threshold,
    adamw8bit_directions,
    adamw8bit_parameters,
    quantize,
)
from tests.kernels.adamw8bit_steps import at
from tests.kernels.emulated import compare, needs_emulation

pytestmark = needs_emulation

# More leaves than one table takes; empty ones, scalars, spans and rests of them.
SIZES = [0, 1, 5, 1024, 2051, *[3 + 5 * i % 37 for i in range(80)]]


def _normal(shape: Any, seed: int) -> jax.Array:
    """Multiples of an eighth, so that there are ties, and zeros of both signs."""
    rng = np.random.default_rng(seed)
    x = np.round(8 * rng.standard_normal(shape)) / 8
    return jnp.asarray(x, jnp.float32)


@pytest.mark.parametrize("has_residual", [False, True])
def test_sparsify(has_residual: bool) -> None:
    rng = np.random.default_rng(0)
    keys = np.asarray([0.0, 0.5, 1.0, np.nan], np.float32).view(np.uint32)
    keys = np.append(keys, np.uint32(2**32 - 1))
    found = Thresholds(
        jnp.asarray(rng.choice(keys, len(SIZES))),
        jnp.asarray([rng.integers(0, n + 1) for n in SIZES], jnp.uint32),
    )
    leaves = [_normal(n, i) for i, n in enumerate(SIZES)]
    residual = (
        [_normal(n, 999 + i) for i, n in enumerate(SIZES)] if has_residual else []
    )

    def run(is_on: jax.Array, is_new: jax.Array) -> Any:
        return _sparsify._native(is_on, is_new, found, leaves, residual)

    for flags in ((True, True), (True, False), (False, True)):
        compare(run, *map(jnp.asarray, flags))


# Blocks of 256, of 205, with a rest of one, shorter than a warp, in fours and not.
SHAPES = [(2, 512), (3, 1025), (2, 257), (9, 24), (2, 2, 50), (1, 3), (0, 256), (1, 7)]


@pytest.mark.parametrize("taken", [True, False])
def test_adamw8bit(taken: bool) -> None:
    grads = [_normal(shape, i) for i, shape in enumerate(SHAPES)]
    mu = jax.jit(lambda grads: [quantize(x + 1) for x in grads])(grads)
    nu = jax.jit(lambda grads: [quantize(x * x, False) for x in grads])(grads)
    numbers, _, flag = (jax.tree.map(jnp.asarray, x) for x in at(3, taken))
    seed, *seeds = [
        Seed(jnp.uint32(i), jnp.uint32(77 * i)) for i in range(len(SHAPES) + 1)
    ]

    def directions(grads: Any) -> Any:
        return adamw8bit_directions(grads, mu, nu, numbers, seed, flag)

    compare(directions, grads)
    dtypes = [jnp.float32, jnp.bfloat16]
    params = [_normal(shape, i).astype(dtypes[i % 2]) for i, shape in enumerate(SHAPES)]
    for rounding in ((), seeds):

        def parameters(params: Any, rounding: Any = rounding) -> Any:
            return adamw8bit_parameters(
                grads,
                mu,
                nu,
                params,
                numbers,
                seed,
                flag,
                is_decayed=[i % 3 > 0 for i in range(len(SHAPES))],
                rounding=rounding,
            )

        compare(parameters, params)


# Of a warp, of a block, of many, and the next one up; whole quads, rests and nothing.
ROWS = [(3, 7), (2, 0), (0, 9), (4, 128), (3, 129), (2, 1024), (5, 1025), (1, 2**15)]
LONG_ROWS = [(6, 2**15 + 1), (5, 40_004)]


@pytest.mark.parametrize("shapes", [ROWS, LONG_ROWS], ids=["rows", "long rows"])
@pytest.mark.parametrize("kind", ["plain", "addend", "live", "bfloat16", "float16"])
def test_thresholds(shapes: Any, kind: str) -> None:
    rng = np.random.default_rng(7)
    dtype = kind if "float" in kind else "float32"
    # Few numbers, so that ties are left out, beside rows with hardly any.
    arrays = [
        jnp.where(np.arange(s[0])[:, None] % 2 == 0, _normal(s, 1), _uniform(s, 2))
        for s in shapes
    ]
    arrays = [x.astype(dtype) for x in arrays]
    addend = [_normal(s, 3) for s in shapes] if kind == "addend" else []
    # One row has nothing alive.
    shares = [(rng.random((s[0], 1)) * (np.arange(s[0])[:, None] != 1)) for s in shapes]
    live = [jnp.asarray(rng.random(s) < f) for s, f in zip(shapes, shares, strict=True)]
    counts = [_counts(s, rng) for s in shapes]

    def run(arrays: Any, counts: Any, live: Any, addend: Any) -> Any:
        present = arrays, counts, live, addend
        return _threshold._native(present)

    compare(run, arrays, counts, live if kind == "live" else [], addend)


def _uniform(shape: Any, seed: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).random(shape), jnp.float32)


def _counts(shape: tuple[int, int], rng: np.random.Generator) -> jax.Array:
    """Nothing of the second row and all of the fifth; of others some."""
    some = rng.integers(0, shape[1] + 1, shape[0])
    some[1:2], some[4:5] = 0, shape[1]
    return jnp.asarray(some, jnp.uint32)


def test_workspaces_of_long_rows_are_as_wanted() -> None:
    widths = [2**15, 2**15 + 1, 3 * 2**14, 3 * 2**14 + 1]
    words = [_threshold._workspace([jnp.zeros((2, w))]) for w in widths]
    assert words == [0, 2 * 2055, 2 * 2055, 2 * 2056]
