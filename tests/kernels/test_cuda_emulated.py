"""The CUDA kernels' results, on a CPU: the same bits as the CPU kernels'.

Both are sums in the same order of the same rounded operations. The source that nvcc
reads is compiled by the host's compiler against an emulation of what it uses of CUDA,
so that its indices, tails, shuffles and tables of jobs are tested without a GPU.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfpo_jax.kernels import (
    AdamFactors,
    Bucket,
    Piece,
    RowGroup,
    decode_signs,
    encode_signs,
    onebit_directions,
    serve_signs,
)
from sfpo_jax.kernels._native import ffi_call
from sfpo_jax.kernels._signs import layout_attributes
from tests.kernels.emulated import (
    assert_same_bits,
    compare,
    emulated,
    in_both_orders,
    needs_emulation,
)

pytestmark = needs_emulation


class Case(NamedTuple):
    bucket: Bucket
    what: str


def _many_small() -> Bucket:
    """More pieces than one table of jobs takes."""
    sizes = tuple(3 + 5 * i % 37 for i in range(80))
    pieces = tuple(Piece(i, 0, size) for i, size in enumerate(sizes))
    return Bucket(tuple(range(80)), sizes, (RowGroup(40, 82, pieces),))


CASES = [
    Case(
        Bucket(
            (0, 1),
            (5000, 67),
            (
                RowGroup(2048, 4, (Piece(0, 0, 4096),)),
                RowGroup(904, 2, (Piece(1, 0, 67), Piece(0, 4096, 904))),
            ),
        ),
        "whole rows, a short row in a wide one, padding rows",
    ),
    Case(Bucket((0,), (9,), (RowGroup(16, 1, (Piece(0, 0, 9),)),)), "half a byte"),
    Case(_many_small(), "several tables"),
    Case(
        Bucket((0,), (12_345,), (RowGroup(5000, 4, (Piece(0, 0, 12_345),)),)),
        "rows wider than a tile",
    ),
    Case(
        Bucket((0,), (700,), (RowGroup(256, 4, (Piece(0, 0, 2), Piece(0, 2, 698))),)),
        "pieces that are not aligned to 16 bytes",
    ),
]
EACH = pytest.mark.parametrize(
    "bucket", [case.bucket for case in CASES], ids=[case.what for case in CASES]
)


def _leaves(bucket: Bucket, seed: int) -> list[jax.Array]:
    """Normal values with zeros of both signs among them."""
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(size).astype(np.float32) for size in bucket.sizes]
    for array in arrays:
        array[::7] = 0.0
        array[3::11] = -0.0
    return [jnp.asarray(array) for array in arrays]


def _variance(bucket: Bucket) -> list[jax.Array]:
    return [jnp.maximum(x, 0) for x in _leaves(bucket, 4)]


@EACH
def test_encode(bucket: Bucket) -> None:
    x, m, e = (_leaves(bucket, seed) for seed in (1, 2, 3))
    for momentum, error, variance in (
        ((), (), ()),
        ((), e, ()),
        (m, (), _variance(bucket)),
        (m, e, _variance(bucket)),
    ):
        given = {"momentum": momentum, "error": error, "variance": variance}
        compare(lambda g=given: encode_signs(bucket, x, b1=0.9, relaxation=0.75, **g))


@EACH
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_serve(bucket: Bucket, ranks: int) -> None:
    rng = np.random.default_rng(ranks)

    def bits(rows: int, width: int) -> jax.Array:
        return jnp.asarray(rng.integers(0, 256, (rows, width // 8)), jnp.uint8)

    groups = bucket.groups
    signs = [bits(ranks * g.rows, g.width) for g in groups]
    live = [bits(g.rows, g.width) for g in groups]
    scales = [jnp.asarray(rng.random(ranks * g.rows, dtype=np.float32)) for g in groups]
    error = [
        jnp.asarray(rng.standard_normal((g.rows, g.width), dtype=np.float32))
        for g in groups
    ]
    for errors in ((), error):
        compare(
            lambda e=errors: serve_signs(bucket, signs, scales, live, e, ranks, 0.75)
        )


@EACH
def test_decode_and_directions(bucket: Bucket) -> None:
    encoded = encode_signs(bucket, _leaves(bucket, 1))
    signs, scales, variance = encoded.signs, encoded.scales, _variance(bucket)
    shapes = [v.shape for v in variance]
    for given in ((), variance):
        compare(lambda v=given: decode_signs(bucket, signs, scales, shapes, v))
    factors = AdamFactors(0.1, 0.02, 1e-8, 0.1)
    compare(lambda: onebit_directions(bucket, signs, scales, variance, factors))


@EACH
@pytest.mark.parametrize("has_momentum", [False, True])
def test_update_of_parameters(bucket: Bucket, has_momentum: bool) -> None:
    encoded = encode_signs(bucket, _leaves(bucket, 1))
    factors = jnp.asarray([0.1, 0.02, 1e-8, 0.1, 1e-3, 0.01], jnp.float32)
    count = len(bucket.leaves)
    operands = [factors, *encoded.signs, *encoded.scales, *_variance(bucket)]
    attributes = {
        "leaves": count,
        "has_parameters": True,
        "has_momentum": has_momentum,
        "is_decayed": np.arange(count) % 2,
        **layout_attributes(bucket),
    }
    shapes = [((size,), jnp.float32) for size in bucket.sizes]

    def updated(target: str) -> Sequence[jax.Array]:
        def step(operands: Any, parameters: Any) -> Any:
            return ffi_call(
                target,
                [*operands, *parameters],
                shapes * (1 + has_momentum),
                attributes,
                {len(operands) + i: i for i in range(count)},
            )

        # Donated, so that the new parameters lie where the old ones were.
        return jax.jit(step, donate_argnums=1)(operands, _leaves(bucket, 5))

    wanted = updated("sfpo_onebit_update")
    for found in in_both_orders(lambda: updated("emulated_sfpo_onebit_update")):
        assert_same_bits(found, wanted)


def test_nothing_to_do_is_no_launch() -> None:
    empty = Bucket((0,), (0,), (RowGroup(8, 0, ()),))
    with emulated():
        found = encode_signs(empty, [jnp.zeros(0)], error=[jnp.zeros(0)])
    assert [x.size for x in jax.tree.leaves(found)] == [0, 0, 0, 0]
