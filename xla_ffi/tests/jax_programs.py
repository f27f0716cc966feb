"""Programs of the public kernels: random values for each, and how near its twin comes.

A program is one shape of one kernel, compiled twice, for the native kernel and for the
twin.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import jax_values as values
import numpy as np

from sfpo_jax import kernels
from sfpo_jax.kernels import (
    _adamw8bit,
    _onebit,
    _signs,
    _sparsify,
    _threshold,
)

Rng = np.random.Generator
SHAPES = [(5, 96), (3, 257), (2, 3, 64), (300, 1024)]


class Call(NamedTuple):
    """What reaches a handler."""

    target: str
    operands: list[Any]
    results: list[tuple[tuple[int, ...], Any]]
    attributes: dict[str, Any]
    aliases: dict[int, int]


class Program(NamedTuple):
    target: str
    module: Any  # where its `ffi_call` is
    fn: Callable[..., Any]
    draw: Callable[[Rng], tuple[Any, ...]]
    # Absolute tolerances of the leaves of the result, of their operands' size; 0: bits.
    tolerances: Callable[[Any], Sequence[Any]]

    def compiled(self) -> tuple[Any, Any]:
        """The native one and the twin."""

        def twin(*args: Any) -> Any:
            with kernels.use_twins():
                return self.fn(*args)

        return jax.jit(lambda *args: self.fn(*args)), jax.jit(twin)

    def record(self, rng: Rng) -> Call:
        """The call that the native kernel would get, with its arrays."""
        calls = []

        def record(
            target: str,
            operands: Any,
            results: Any,
            attributes: Any,
            aliases: Any = None,
        ) -> list[jax.Array]:
            values = [np.asarray(x) for x in operands]
            calls.append(Call(target, values, results, dict(attributes), aliases or {}))
            return [jnp.zeros(shape, dtype) for shape, dtype in results]

        def native(native: Any, twin: Any, *args: Any, platforms: Any = ()) -> Any:
            del twin, platforms
            return native(*args)

        with (
            mock.patch.object(self.module, "ffi_call", record),
            mock.patch.object(self.module, "choose", native),
        ):
            self.fn(*self.draw(rng))
        return calls[-1]


def programs(variants: int) -> dict[str, list[Program]]:
    """So many of each target."""
    found: dict[str, list[Program]] = {}
    for make in (_encode, _serve, _decode, _onebit_, _adamw, _thresholds, _sparse):
        for variant in range(variants):
            program = make(variant)
            found.setdefault(program.target, []).append(program)
    return found


def _near(scale: float) -> Callable[[Any], list[float]]:
    """Sums of a block in another order, and what is made of them."""

    def tolerances(found: Any) -> list[float]:
        leaves = jax.tree.leaves(found)
        return [0 if x.dtype == jnp.uint8 else scale for x in leaves]

    return tolerances


def _encode(variant: int) -> Program:
    sizes, bucket = values.layout(variant)
    has_momentum, has_error = variant % 2 == 0, variant % 3 != 1

    def fn(b1: Any, x: Any, m: Any, e: Any, v: Any) -> Any:
        return kernels.encode_signs(
            bucket, x, momentum=m, b1=b1, error=e, variance=v, relaxation=0.5
        )

    def draw(rng: Rng) -> tuple[Any, ...]:
        def leaves(is_there: bool) -> list[np.ndarray]:
            return [values.floats(rng, n) for n in sizes] if is_there else []

        variance = [values.variance(rng, n) for n in sizes] if variant % 2 else []
        b1 = np.float32(rng.choice([0.0, 0.5, 1.0]))
        return b1, leaves(True), leaves(has_momentum), leaves(has_error), variance

    return Program("sfpo_sign_encode", _signs, fn, draw, _near(1e-5))


def _serve(variant: int) -> Program:
    _, bucket = values.layout(variant)
    ranks = (1, 2, 4, 8)[variant % 4]

    def fn(signs: Any, scales: Any, live: Any, error: Any) -> Any:
        return kernels.serve_signs(bucket, signs, scales, live, error, ranks, 1.5)

    def draw(rng: Rng) -> tuple[Any, ...]:
        shapes = [(g.rows, g.width) for g in bucket.groups] if variant % 2 == 0 else []
        error = [values.floats(rng, shape) for shape in shapes]
        sent = values.packed(rng, bucket, ranks), values.scales(rng, bucket, ranks)
        return *sent, values.packed(rng, bucket), error

    return Program("sfpo_sign_serve", _signs, fn, draw, _near(1e-5))


def _decode(variant: int) -> Program:
    sizes, bucket = values.layout(variant)
    shapes = [(n,) for n in sizes]

    def fn(signs: Any, scales: Any, variance: Any) -> Any:
        return kernels.decode_signs(bucket, signs, scales, shapes, variance)

    def draw(rng: Rng) -> tuple[Any, ...]:
        variance = [values.variance(rng, n) for n in sizes] if variant % 2 else []
        return values.packed(rng, bucket), values.scales(rng, bucket), variance

    return Program("sfpo_sign_decode", _signs, fn, draw, _near(0))


def _onebit_(variant: int) -> Program:
    sizes, bucket = values.layout(variant)
    factors = kernels.AdamFactors(0.5, 0.25, 1e-3, 0.125)
    is_decayed = [i % 2 == 0 for i in range(len(sizes))]

    def fn(signs: Any, scales: Any, v: Any, p: Any) -> Any:
        if not p:
            return kernels.onebit_directions(bucket, signs, scales, v, factors)
        return kernels.onebit_apply(
            bucket, signs, scales, v, p, factors, 0.25, 0.5, is_decayed
        )

    def draw(rng: Rng) -> tuple[Any, ...]:
        p = [values.floats(rng, n) for n in sizes] if variant % 2 == 0 else []
        v = [values.variance(rng, n) for n in sizes]
        return values.packed(rng, bucket), values.scales(rng, bucket), v, p

    return Program("sfpo_onebit_update", _onebit, fn, draw, _near(2e-6))


def _adamw(variant: int) -> Program:
    shapes = SHAPES[: variant % 4 + 1]
    has_parameters, is_random = variant % 2 == 0, variant % 4 == 0
    narrow = [i % 2 == 1 for i in range(len(shapes))]

    def fn(
        g: Any, mu: Any, nu: Any, p: Any, numbers: Any, seed: Any, taken: Any
    ) -> Any:
        seed = kernels.make_seed(seed)
        if not p:
            return kernels.adamw8bit_directions(g, mu, nu, numbers, seed, taken)
        rounding = [seed] * len(p) if is_random else ()
        decayed = [True] * len(p)
        return kernels.adamw8bit_parameters(
            g, mu, nu, p, numbers, seed, taken, is_decayed=decayed, rounding=rounding
        )

    def draw(rng: Rng) -> tuple[Any, ...]:
        g = [values.floats(rng, shape) for shape in shapes]
        mu = [values.moment(rng, shape, np.int8) for shape in shapes]
        nu = [values.moment(rng, shape, np.uint8) for shape in shapes]
        p = []
        if has_parameters:
            dtypes = [jnp.bfloat16 if x else jnp.float32 for x in narrow]
            pairs = zip(shapes, dtypes, strict=True)
            p = [
                jnp.asarray(values.floats(rng, shape), dtype) for shape, dtype in pairs
            ]
        numbers = kernels.AdamwNumbers(
            *map(np.float32, (0.5, 0.75, 1.5, 1e-3, 2.0**-7, 0.125))
        )
        taken = np.bool_(rng.random() < 0.8)
        return g, mu, nu, p, numbers, np.int32(rng.integers(1 << 30)), taken

    def tolerances(found: Any) -> list[float]:
        near = {"int8": 1, "uint8": 1, "bfloat16": 2**-6, "float32": 1e-4}
        return [near[str(x.dtype)] for x in jax.tree.leaves(found)]

    return Program("sfpo_adamw8bit", _adamw8bit, fn, draw, tolerances)


def _thresholds(variant: int) -> Program:
    dtype = (jnp.float32, jnp.bfloat16, jnp.float32, jnp.float16)[variant % 4]
    shapes = ((7, 33), (1, 5000), (2, 70_001))[: variant % 3 + 1]

    def fn(arrays: Any, counts: Any, live: Any, addend: Any) -> Any:
        return kernels.magnitude_thresholds(arrays, counts, live=live, addend=addend)

    def draw(rng: Rng) -> tuple[Any, ...]:
        with np.errstate(over="ignore"):  # of float16
            drawn = [values.any_floats(rng, shape) for shape in shapes]
            arrays = [jnp.asarray(x, dtype) for x in drawn]
        most = 2**32 - 1 if rng.random() < 0.1 else 2000
        counts = [rng.integers(0, most, shape[:1], np.uint32) for shape in shapes]
        live = [rng.random(shape) < 0.7 for shape in shapes] if variant % 2 else []
        is_added = variant % 4 == 2
        addend = [values.floats(rng, shape) for shape in shapes] if is_added else []
        return arrays, counts, live, addend

    return Program("sfpo_magnitude_threshold", _threshold, fn, draw, _near(0))


def _sparse(variant: int) -> Program:
    shapes = values.SIZES[: variant % 4 + 1]

    def fn(x: Any, counts: Any, residual: Any, is_on: Any, is_new: Any) -> Any:
        return kernels.sparsify_leaves(
            x, counts, residual=residual, is_on=is_on, is_new=is_new
        )

    def draw(rng: Rng) -> tuple[Any, ...]:
        x = [values.floats(rng, shape) for shape in shapes]
        residual = (
            [values.floats(rng, shape) for shape in shapes] if variant % 2 == 0 else []
        )
        counts = [np.uint32(rng.integers(0, 2000)) for _ in shapes]
        is_on, is_new = (np.bool_(rng.random() < 0.8) for _ in range(2))
        return x, counts, residual, is_on, is_new

    return Program("sfpo_sparsify", _sparsify, fn, draw, _near(0))
