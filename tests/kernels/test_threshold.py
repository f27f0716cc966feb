"""Thresholds: the native kernel gives what its twin and a sort give, bit for bit."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sfpo_jax.kernels import _threshold as kernel
from sfpo_jax.kernels import (
    magnitude_thresholds,
    native_platforms,
    select_largest_of_each,
    use_twins,
)

LONG = 2**17 + 3  # in 33 blocks, the last of 3 entries
SHARES = [0.0, 1e-5, 0.01, 0.3, 0.5, 0.9, 0.999, 1.0]

_find = jax.jit(lambda x, k: magnitude_thresholds([x], [k]))
_marks = jax.jit(lambda x, k: kernel.is_kept(x, magnitude_thresholds([x], [k])))
_find_twin = jax.jit(lambda x, k: magnitude_thresholds([x], [k]))

needs_native = pytest.mark.skipif(
    "cpu" not in native_platforms(), reason="there is no native library here"
)


def keys(x: np.ndarray) -> np.ndarray:
    bits = x.view(f"u{x.dtype.itemsize}").astype(np.int64)
    return bits % 2 ** (8 * x.dtype.itemsize - 1)


def kept(row: np.ndarray, count: int, live: np.ndarray | None = None) -> np.ndarray:
    """The definition: by falling magnitude, then rising index; dead entries never."""
    rank = -keys(row) if live is None else np.where(live, -keys(row), 1)
    wanted = min(count, row.size if live is None else int(live.sum()))
    marks = np.zeros(row.size, bool)
    marks[np.argsort(rank, kind="stable")[:wanted]] = True
    return marks


def counts_of(size: int) -> np.ndarray:
    edges = [1, 2, size - 1, size]
    return np.array([*edges, *(int(s * size) for s in SHARES)], np.uint32)


def assert_keeps(rows: np.ndarray, counts: np.ndarray) -> None:
    marks = np.asarray(_marks(rows, counts))
    for i, count in enumerate(counts):
        np.testing.assert_array_equal(marks[i], kept(rows[i], int(count)), str(i))


def assert_as_twin(row: np.ndarray) -> None:
    for count in counts_of(row.size)[:, None]:
        found = _find(row[None], count)
        with use_twins():
            expected = _find_twin(row[None], count)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == np.uint32
            np.testing.assert_array_equal(a, b, str(count))


@needs_native
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16], ids=["bf16", "f16"])
def test_all_numbers_of_16_bits(dtype: Any) -> None:
    bits = np.random.default_rng(0).permutation(2**16).astype(np.uint16)
    assert_as_twin(bits.view(dtype))
    counts = counts_of(2**16)
    assert_keeps(np.tile(bits.view(dtype), (counts.size, 1)), counts)


@needs_native
def test_a_million_numbers_of_32_bits() -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 10**6, dtype=np.uint32)
    special = [0, 2**31, 1, 2**31 + 1, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FFFFFFF]
    bits[:: 10**6 // 80][:80] = np.tile(np.array(special, np.uint32), 10)
    assert_as_twin(bits.view(np.float32))


def distributions(size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(2)
    normal = rng.standard_normal(size)
    place = np.arange(size)
    return {
        "normal": normal,
        "heavy tails": normal**9,
        "zero": 0 * normal,
        "zeros of both signs": np.where(normal > 0, 0.0, -0.0),
        "equal": np.full(size, -2.5),
        "90 % zero": np.where(rng.random(size) < 0.9, 0, normal),
        "few distinct": rng.integers(-3, 4, size),
        "two values": np.where(rng.random(size) < 0.3, 1, -2),
        "rising": place / size,
        "falling": (size - place) / size,
        "periodic": np.sin(place * np.pi / 32),
        "subnormal": rng.integers(-(2**23) + 1, 2**23, size) * 2.0**-149,
        "infinite and NaN": np.where(
            rng.random(size) < 0.1, rng.choice([np.nan, np.inf, -np.inf], size), normal
        ),
    }


@pytest.mark.parametrize("case", distributions(1))
def test_distributions(case: str) -> None:
    row = distributions(LONG)[case].astype(np.float32)
    counts = counts_of(LONG)
    assert_keeps(np.tile(row, (counts.size, 1)), counts)


def sample_positions(size: int) -> np.ndarray:
    """As in `xla_ffi/core/select.h`."""
    bits = next(b for b in range(8, 15) if b == 14 or 8**b >= size**2)
    sample = np.arange(2**bits, dtype=np.uint64)
    hashed = (sample + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(32)
    start = sample * np.uint64(size) >> np.uint64(bits)
    return start + (hashed * np.uint64(size >> bits) >> np.uint64(32))


@pytest.mark.parametrize("sampled", ["small", "large", "spread", "equal"])
@pytest.mark.parametrize("rest", ["normal", "equal", "narrow"])
def test_rows_whose_sample_deceives(sampled: str, rest: str) -> None:
    rng = np.random.default_rng(3)
    place = sample_positions(LONG)
    assert np.unique(place).size == place.size and place.max() < LONG
    others = {
        "normal": rng.standard_normal(LONG),
        "equal": np.ones(LONG),
        "narrow": 1 + rng.integers(0, 2**12, LONG) * 2.0**-23,
    }
    samples = {
        "small": rng.random(place.size) * 1e-3,
        "large": 1e3 + rng.random(place.size),
        "spread": np.exp(4 * rng.standard_normal(place.size)),
        "equal": np.full(place.size, 1 + 2.0**-12),
    }
    row = others[rest].astype(np.float32)
    row[place] = samples[sampled]
    counts = counts_of(LONG)
    assert_keeps(np.tile(row, (counts.size, 1)), counts)


def test_arrays_of_all_sizes_with_dead_entries() -> None:
    rng = np.random.default_rng(4)
    shapes = [(3, 1), (2, 0), (0, 5), (5, 2047), (1, 4096), (2, 4097), (3, 70_001)]
    arrays = [rng.integers(-9, 9, s).astype(np.float32) / 4 for s in shapes]
    live = [rng.random(s) < rng.random((s[0], 1)) for s in shapes]
    counts = [rng.integers(0, s[1] + 1, s[0]).astype(np.uint32) for s in shapes]

    @jax.jit
    def run(arrays: Any, counts: Any, live: Any) -> Any:
        found = magnitude_thresholds(arrays, counts, live=live)
        parts = zip(arrays, kernel.of_each(found, arrays), live, strict=True)
        return [kernel.is_kept(x, part) & m for x, part, m in parts]

    for marks, x, count, alive in zip(
        run(arrays, counts, live), arrays, counts, live, strict=True
    ):
        for i in range(x.shape[0]):
            expected = kept(x[i], int(count[i]), alive[i])
            np.testing.assert_array_equal(marks[i], expected, str(x.shape))


def test_an_addend_comes_before_the_magnitude() -> None:
    rng = np.random.default_rng(5)
    shapes = [(2, 1000), (1, 70_001)]
    arrays, addend = (
        [rng.integers(-99, 99, s).astype(np.float32) for s in shapes] for _ in range(2)
    )
    counts = [np.array([1, 500], np.uint32), np.array([7000], np.uint32)]
    run = jax.jit(lambda x, k, a: magnitude_thresholds(x, k, addend=a))
    total = [jnp.asarray(x + a) for x, a in zip(arrays, addend, strict=True)]
    found = kernel.of_each(run(arrays, counts, addend), total)
    for part, s, count in zip(found, total, counts, strict=True):
        marks, s = kernel.is_kept(s, part), np.asarray(s)
        for i in range(s.shape[0]):
            np.testing.assert_array_equal(marks[i], kept(s[i], int(count[i])))


def test_shards_select_without_a_word_to_each_other(mesh8: jax.sharding.Mesh) -> None:
    rng = np.random.default_rng(6)
    arrays = [rng.standard_normal((8, n)).astype(np.float32) for n in (9, 5000)]
    run = jax.jit(
        jax.shard_map(
            lambda *x: select_largest_of_each(x, [jnp.uint32(3), jnp.uint32(2500)]),
            mesh=mesh8,
            in_specs=P("data"),
            out_specs=P("data"),
        )
    )
    text = run.lower(*arrays).compile().as_text()
    assert text is not None
    for word in ("all-reduce", "all-gather", "all-to-all", "collective", "scatter"):
        assert word not in text
    for marks, x, count in zip(run(*arrays), arrays, (3, 2500), strict=True):
        for row, found in zip(x, np.asarray(marks), strict=True):
            np.testing.assert_array_equal(found, kept(row, count))


@needs_native
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros((2, 4), np.int32)}, "wrong dtype"),
        ({"x": np.zeros(7, np.float32), "live": np.zeros(7, bool)}, "must divide"),
        ({"count": np.zeros(3, np.uint32)}, "one number a row"),
        ({"live": np.zeros((2, 3), bool)}, "has 6 entries, needs 8"),
        ({"live": np.zeros((2, 4), np.uint8)}, "wrong dtype"),
        ({"rows": [2, 2]}, "there is no `x` 1"),
        ({"rows": [-2]}, "must divide"),
    ],
)
def test_a_wrong_call_is_an_exception(change: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "count": np.zeros(2, np.uint32),
        "x": np.zeros((2, 4), np.float32),
        "live": np.zeros((2, 4), bool),
        "rows": [2],
        **change,
    }
    results = [jax.ShapeDtypeStruct((n,), np.uint32) for n in (2, 2, 0)]
    call = jax.ffi.ffi_call("sfpo_magnitude_threshold", results)
    rows = np.array(given["rows"], np.int64)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        # Without an array to stand for the second one, `live` is taken for it.
        operands = [given["count"], given["x"]]
        operands += [given["live"]] if len(rows) == 1 else []
        call(*operands, has_addend=False, has_live=len(rows) == 1, rows=rows)
