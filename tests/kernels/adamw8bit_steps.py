"""Gradients, numbers and moments of steps; the kernel and its twin compiled."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfpo_jax.kernels import (
    Adamw8bitResult,
    AdamwNumbers,
    Quantized,
    _adamw8bit,
    adamw8bit_directions,
    make_seed,
    native_platforms,
    quantize,
)

needs_native = pytest.mark.skipif(
    "cpu" not in native_platforms(), reason="no native kernels for the CPU"
)
# Blocks of 256, of 205, with a rest of one, a vector and a half, and an axis more.
SHAPES = [(64, 512), (3, 1025), (16, 257), (30, 24), (3, 2, 64)]
ULP = 2.0**-23
RATE, DECAY = 2.0**-7, 0.125


def numbers(step: int, rate: float = RATE) -> AdamwNumbers:
    """Of a step; not made inside the programs, which may do it in two ways."""
    root = np.sqrt(1 - 0.95**step)
    plan = AdamwNumbers(0.8, 0.95, root / (1 - 0.8**step), 1e-8 * root, rate, DECAY)
    return AdamwNumbers(*(np.float32(x) for x in plan))


def directions(
    grads: Any, mu: Any, nu: Any, plan: AdamwNumbers, step: Any, taken: Any
) -> Adamw8bitResult:
    return adamw8bit_directions(grads, mu, nu, plan, make_seed(step), taken)


def at(step: int, taken: bool = True) -> Any:
    """The last operands of `directions`."""
    return numbers(step), np.int32(step), np.bool(taken)


def twin(monkeypatch: pytest.MonkeyPatch, fn: Any, *args: Any) -> Any:
    """`fn`, compiled without the native kernel."""
    with monkeypatch.context() as patch:
        patch.setattr(
            _adamw8bit, "choose", lambda native, twin, *args, **_: twin(*args)
        )
        return jax.jit(lambda *args: fn(*args)).lower(*args).compile()


def gradients(step: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[jax.Array]:
    """Rows of zeros, of huge and of tiny numbers among others."""
    rng = np.random.default_rng(step)
    grads = []
    for shape in shapes:
        g = rng.normal(size=shape) * np.exp(2 * rng.normal(size=shape[-1:]))
        g[0] = 0.0
        g[1] *= 1e12
        g[2] *= 1e-15
        g[:, ..., 5] = 0.0
        grads.append(jnp.asarray(g, jnp.float32))
    return grads


def zeros(grads: Sequence[jax.Array], signed: bool) -> list[Quantized]:
    make = jax.jit(lambda grads: [quantize(0 * g, signed) for g in grads])
    return make(list(grads))
