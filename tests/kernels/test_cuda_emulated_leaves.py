"""The CUDA kernels that work on leaves, on a CPU: the same bits as the CPU kernels'."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfpo_jax.kernels import (
    Thresholds,
    _sparsify,
    adamw8bit_directions,
    adamw8bit_parameters,
    make_seed,
    quantize,
)
from tests.kernels.adamw8bit_steps import at
from tests.kernels.emulated import compare, needs_emulation

pytestmark = needs_emulation

# More leaves than one table of jobs takes; empty ones, scalars, spans and rests of them.
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


# Blocks of 256, of 205, with a rest of one, shorter than a warp, of 4 at a time and not.
SHAPES = [(2, 512), (3, 1025), (2, 257), (9, 24), (2, 2, 50), (1, 3), (0, 256), (1, 7)]


@pytest.mark.parametrize("taken", [True, False])
def test_adamw8bit(taken: bool) -> None:
    grads = [_normal(shape, i) for i, shape in enumerate(SHAPES)]
    mu = [quantize(_normal(shape, 20 + i)) for i, shape in enumerate(SHAPES)]
    nu = [
        quantize(abs(_normal(shape, 40 + i)), False) for i, shape in enumerate(SHAPES)
    ]
    numbers, step, flag = (jax.tree.map(jnp.asarray, x) for x in at(3, taken))

    def directions(grads: Any) -> Any:
        return adamw8bit_directions(grads, mu, nu, numbers, make_seed(step), flag)

    compare(directions, grads)
    dtypes = [jnp.float32, jnp.bfloat16]
    params = [_normal(shape, i).astype(dtypes[i % 2]) for i, shape in enumerate(SHAPES)]
    seeds = [make_seed(step, jnp.uint32(i)) for i in range(len(SHAPES))]
    for rounding in ((), seeds):

        def parameters(params: Any, rounding: Any = rounding) -> Any:
            return adamw8bit_parameters(
                grads,
                mu,
                nu,
                params,
                numbers,
                make_seed(step),
                flag,
                is_decayed=[i % 3 > 0 for i in range(len(SHAPES))],
                rounding=rounding,
            )

        compare(parameters, params)
