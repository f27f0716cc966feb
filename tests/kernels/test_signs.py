"""The fused sign kernels against the equations, and native against jnp bit for bit."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from sfpo_jax.collectives import plan_buckets, transfers
from sfpo_jax.compression import sign
from sfpo_jax.kernels import (
    AdamFactors,
    Bucket,
    decode_signs,
    encode_signs,
    native_platforms,
    onebit_apply,
    onebit_directions,
    serve_signs,
    use_twins,
)

BLOCK = 64
# Whole blocks, a short last one, several axes, less than a byte, a scalar.
SHAPES = [(130,), (8, 32), (3, 5, 7), (5,), ()]
RANKS = 2
FACTORS = AdamFactors(0.19, 0.02, 1e-8, 0.1)
B1 = 0.9


def _bucket(shapes: list[Any], ranks: int = RANKS, block: int = BLOCK) -> Bucket:
    sizes = [int(np.prod(shape)) for shape in shapes]
    (bucket,) = plan_buckets(sizes, sign(block), ranks, 1 << 20)
    return bucket


BUCKET = _bucket(SHAPES)


@pytest.fixture(params=["native", "jnp"])
def which(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test with the native kernels, and with their twins."""
    if request.param == "native" and not native_platforms():
        pytest.skip("no native library is in use")
    with use_twins() if request.param == "jnp" else contextlib.nullcontext():
        yield request.param


def _normal(seed: int, shapes: list[Any] = SHAPES) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def _variance() -> list[np.ndarray]:
    """A third of the entries 0: they have no denominator and are not live."""
    return [np.where(np.abs(x) > 0.4, x * x, 0) for x in _normal(9)]


def _bits(packed: Any, width: int) -> np.ndarray:
    return np.unpackbits(np.asarray(packed), axis=-1, bitorder="little")[:, :width] > 0


def _rows(values: list[np.ndarray], fill: float = 0.0) -> list[np.ndarray]:
    """Rows of each group, made from the layout's words alone."""
    groups = []
    for group in BUCKET.groups:
        rows = np.full((group.rows, group.width), fill, np.float64)
        row = 0
        for piece in group.pieces:
            flat = values[BUCKET.leaves.index(piece.leaf)].reshape(-1)
            for start in range(0, piece.length, group.width):
                part = flat[piece.start : piece.start + piece.length]
                part = part[start : start + group.width]
                rows[row, : part.size] = part
                row += 1
        groups.append(rows)
    return groups


def _encode(**changes: Any) -> Callable[[], Any]:
    arguments: dict[str, Any] = {
        "momentum": _normal(1),
        "b1": B1,
        "error": _normal(2),
        "variance": _variance(),
        "relaxation": 1.5,
        **changes,
    }
    arrays: dict[str, Any] = {
        k: [jnp.asarray(x) for x in v] if isinstance(v, list) else v
        for k, v in arguments.items()
    }
    leaves = [jnp.asarray(x) for x in _normal(0)]
    return lambda: encode_signs(BUCKET, leaves, **arrays)


@pytest.mark.parametrize(
    "absent", [(), ("momentum",), ("error",), ("variance",), ("momentum", "variance")]
)
def test_encoding_follows_the_equations(which: str, absent: tuple[str, ...]) -> None:
    del which
    found = jax.jit(_encode(**{key: [] for key in absent}))()
    x, m, e = _normal(0), _normal(1), _normal(2)
    total = [a.astype(np.float64) for a in x]
    if "momentum" not in absent:
        total = [B1 * b + (1 - B1) * a for a, b in zip(x, m, strict=True)]
    if "error" not in absent:
        total = [c + a for c, a in zip(total, e, strict=True)]
    alive = [np.ones_like(a) for a in x]
    if "variance" not in absent:
        alive = [(v > 0).astype(float) for v in _variance()]
    lost = [np.zeros_like(c) for c in total]
    exists = _rows([np.ones_like(a) for a in x])
    for place, (c, live) in enumerate(zip(_rows(total), _rows(alive), strict=True)):
        width = c.shape[1]
        assert (_bits(found.signs[place], width) == (c < 0)).all()
        assert (_bits(found.live[place], width) == (live > 0)).all()
        scale = 1.5 * (np.abs(c) * live).sum(1) / np.maximum(live.sum(1), 1)
        np.testing.assert_allclose(found.scales[place], scale, rtol=1e-6)
        assert (live <= exists[place]).all()
    if "error" in absent:
        assert found.error == ()
        return
    for place in range(len(BUCKET.groups)):
        c, live = _rows(total)[place], _rows(alive)[place]
        scale = np.asarray(found.scales[place], np.float64)[:, None]
        want = np.where(live > 0, c - np.where(c < 0, -scale, scale), 0)
        got = _rows([np.asarray(a) for a in found.error])[place]
        np.testing.assert_allclose(got, want, atol=2e-6)
    assert [a.shape for a in found.error] == [a.shape for a in lost]


def test_serving_is_the_encoded_mean_and_its_error(which: str) -> None:
    del which
    rng = np.random.default_rng(3)
    shapes = [(g.rows // RANKS, g.width) for g in BUCKET.groups]
    negative = [rng.random((RANKS * r, w)) < 0.5 for r, w in shapes]
    scales = [rng.random(RANKS * r).astype(np.float32) for r, _ in shapes]
    live = [rng.random(shape) < 0.7 for shape in shapes]
    error = [np.where(m, rng.standard_normal(m.shape), 0) for m in live]
    error = [e.astype(np.float32) for e in error]

    def pack(flags: np.ndarray) -> jax.Array:
        return jnp.asarray(np.packbits(flags, -1, bitorder="little"))

    found = jax.jit(
        lambda: serve_signs(
            BUCKET,
            [pack(x) for x in negative],
            [jnp.asarray(x) for x in scales],
            [pack(x) for x in live],
            [jnp.asarray(x) for x in error],
            RANKS,
            1.5,
        )
    )()
    for place, (rows, width) in enumerate(shapes):
        values = np.where(negative[place], -1.0, 1.0) * scales[place][:, None]
        mean = values.reshape(RANKS, rows, width).mean(0) * live[place] + error[place]
        count = np.maximum(live[place].sum(1), 1)
        scale = 1.5 * (np.abs(mean) * live[place]).sum(1) / count
        np.testing.assert_allclose(found.scales[place], scale, rtol=1e-6)
        got = _bits(found.signs[place], width)
        assert (got == (mean < 0))[np.abs(mean) > 1e-6].all()
        decoded = np.where(got, -1, 1) * np.asarray(found.scales[place])[:, None]
        want = np.where(live[place], mean - decoded, 0)
        np.testing.assert_allclose(found.error[place], want, atol=2e-6)


def test_directions_are_adams(which: str) -> None:
    del which
    sent = jax.jit(_encode())()
    variance = [jnp.asarray(v) for v in _variance()]
    u, m = jax.jit(
        lambda: onebit_directions(BUCKET, sent.signs, sent.scales, variance, FACTORS)
    )()
    rows = zip(_rows([np.asarray(a) for a in u]), _rows(_variance()), strict=True)
    for place, (got, v) in enumerate(rows):
        live = v > 0
        scale = np.asarray(sent.scales[place], np.float64)[:, None]
        mu = np.where(_bits(sent.signs[place], v.shape[1]), -scale, scale)
        least = 0.1 * v.sum(1) / np.maximum(live.sum(1), 1)
        raised = np.maximum(v, least[:, None])
        want = mu / 0.19 / (np.sqrt(raised / 0.02) + 1e-8)
        np.testing.assert_allclose(got, np.where(live, want, 0), rtol=2e-6)
        kept = _rows([np.asarray(a) for a in m])[place]
        np.testing.assert_array_equal(kept, np.where(live, mu, 0))


def test_applied_in_place_is_the_direction_times_the_rate(which: str) -> None:
    del which
    sent = jax.jit(_encode())()
    variance = [jnp.asarray(v) for v in _variance()]
    params = [jnp.asarray(x) for x in _normal(5)]
    is_decayed = [True, False, True, False, True]

    def both() -> Any:
        u, _ = onebit_directions(BUCKET, sent.signs, sent.scales, variance, FACTORS)
        new = onebit_apply(
            BUCKET,
            sent.signs,
            sent.scales,
            variance,
            params,
            FACTORS,
            0.5,
            0.1,
            is_decayed,
            has_momentum=False,
        )
        return u, new

    u, (new, mu) = jax.jit(both)()
    assert mu == []
    for p, step, got, decays in zip(params, u, new, is_decayed, strict=True):
        want = p - 0.5 * (step + 0.1 * decays * np.asarray(p))
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_decoding_gives_back_the_signs_and_scales(which: str) -> None:
    del which
    sent = jax.jit(_encode(momentum=[], error=[], variance=[]))()
    leaves = jax.jit(lambda: decode_signs(BUCKET, sent.signs, sent.scales, SHAPES))()
    for x, got in zip(_normal(0), leaves, strict=True):
        assert got.shape == x.shape
        assert (np.signbit(got) == np.signbit(x)).all()


def _patterns() -> np.ndarray:
    """All bfloat16 and float16 values, and float32 bits at random."""
    half = np.arange(2**16, dtype=np.uint32)
    bf16 = (half << 16).view(np.float32)
    f16 = half.astype(np.uint16).view(np.float16).astype(np.float32)
    bits = np.random.default_rng(4).integers(0, 2**32, 10**6, dtype=np.uint32)
    subnormal = (bits[:1000] & np.uint32(0x807FFFFF)).view(np.float32)
    return np.concatenate([bf16, f16, bits.view(np.float32), subnormal])


def test_a_sign_is_bit_31_of_every_pattern(which: str) -> None:
    del which
    x = _patterns()
    bucket = _bucket([x.shape], ranks=1, block=2048)
    found = jax.jit(lambda v: encode_signs(bucket, [v]))(x)
    bits = np.concatenate([_bits(s, 8 * s.shape[1]).reshape(-1) for s in found.signs])
    want = x.view(np.uint32) >> 31 > 0
    begin = 0
    for group in bucket.groups:
        (piece,) = group.pieces  # the whole blocks, or the short last one
        here = bits[begin : begin + piece.length]
        assert (here == want[piece.start : piece.start + piece.length]).all()
        begin += group.rows * group.width


def test_nothing_is_sent_of_no_leaf_that_is_live(which: str) -> None:
    del which
    zero = [np.zeros(shape, np.float32) for shape in SHAPES]
    found = jax.jit(_encode(variance=zero))()
    assert all((np.asarray(s) == 0).all() for s in found.scales)
    assert all((np.asarray(e) == 0).all() for e in found.error)


def test_inside_shard_map_nothing_is_added(which: str, mesh8: Any) -> None:
    del which
    bucket = _bucket([(64, 4)], ranks=8)

    def local(x: jax.Array, e: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = encode_signs(bucket, [x[0]], error=[e[0]])
        signs = lax.all_gather(found.signs[0], "data")
        return signs[None], found.error[0][None]

    shape = jax.ShapeDtypeStruct((8, 64, 4), jnp.float32)
    sharded = jax.shard_map(local, mesh=mesh8, in_specs=P("data"), out_specs=P("data"))
    compiled = jax.jit(sharded).lower(shape, shape).compile()
    moved = transfers(compiled.as_text() or "", {"data": 8}, None, ())
    assert [t.opcode for t in moved] == ["all-gather"]


def test_bad_buffers_are_exceptions() -> None:
    if not native_platforms():
        pytest.skip("no native library is in use")

    def call(x: jax.Array, **changes: Any) -> Any:
        attributes: dict[str, Any] = {
            "leaves": 1,
            "has_momentum": False,
            "has_error": False,
            "has_variance": False,
            "relaxation": np.float32(1),
            "pieces": np.array([0, 0, 64, 0, 0]),
            "widths": np.array([64]),
            **changes,
        }
        results = [
            jax.ShapeDtypeStruct((1, 8), jnp.uint8),
            jax.ShapeDtypeStruct((1, 8), jnp.uint8),
            jax.ShapeDtypeStruct((1,), jnp.float32),
        ]
        call = jax.ffi.ffi_call("sfpo_sign_encode", results)
        return jax.block_until_ready(call(jnp.float32(0), x, **attributes))

    x = jnp.ones(64)
    assert call(x)[2][0] == 1
    for bad, message in [
        (lambda: call(x.astype(jnp.int32)), "wrong dtype"),
        (lambda: call(jnp.ones(63)), "beyond its leaf"),
        (lambda: call(x, pieces=np.array([0, 0, 64, 0, 1])), "beyond its group"),
        (lambda: call(x, pieces=np.array([0, 0, 2**62, 0, 0])), "beyond its leaf"),
        (lambda: call(x, pieces=np.array([1, 0, 64, 0, 0])), "not there"),
        (lambda: call(x, pieces=np.array([0, 0, 64])), "torn"),
        (lambda: call(x, widths=np.array([60])), "multiples of 8"),
        (lambda: call(x, widths=np.array([128])), "a bit for each entry"),
        (lambda: call(x, leaves=2), "there is no `x` 1"),
        (lambda: call(x, has_error=True), "there is no `error`"),
    ]:
        with pytest.raises(Exception, match=message):
            bad()
