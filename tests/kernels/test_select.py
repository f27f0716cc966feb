"""Exact selection: how many are kept, which, and who wins a tie."""

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sfpo_jax.kernels import kept_count, select_largest, select_largest_of_each

SIZES = [1, 2, 3, 101, 1000, 2**16, 2**16 + 1, 2**24 - 1, 2**24 + 1, 2**31, 2**32 - 1]
SPARSITIES = [0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999, 0.9999, 1.0]
BELOW_ONE = float(np.nextafter(np.float32(1), np.float32(0)))
TINY = float(np.finfo(np.float32).smallest_subnormal)
WIDTH = 1000

# One program answers for all sizes: the size is static, the sparsity is not.
_counts = jax.jit(lambda s: jnp.stack([kept_count(n, s) for n in SIZES]))
_select = jax.jit(select_largest)
_select_each = jax.jit(select_largest_of_each)


def exact_count(size: int, sparsity: float) -> int:
    return size - math.ceil(Fraction(float(np.float32(sparsity))) * (size - 1))


def chosen(row: np.ndarray, count: int, live: np.ndarray | None = None) -> np.ndarray:
    """The definition: sorted by falling magnitude, then rising index; NaN above all."""
    bits = row.view(f"u{row.dtype.itemsize}").astype(object)
    keys = [int(b) % 2 ** (8 * row.dtype.itemsize - 1) for b in bits]
    candidates = np.arange(row.size) if live is None else np.flatnonzero(live)
    order = sorted(candidates.tolist(), key=lambda i: (-keys[i], i))
    marks = np.zeros(row.size, bool)
    marks[order[:count]] = True
    return marks


def assert_selects(
    rows: np.ndarray, counts: np.ndarray, live: np.ndarray | None = None
) -> None:
    marks = np.asarray(_select(rows, counts.astype(np.uint32), live))
    for i, count in enumerate(counts):
        alive = None if live is None else live[i]
        np.testing.assert_array_equal(marks[i], chosen(rows[i], int(count), alive))
        available = rows.shape[1] if live is None else live[i].sum()
        assert marks[i].sum() == min(count, available)


fractions = st.one_of(
    st.floats(0, 1, width=32),
    st.floats(0, float(np.finfo(np.float32).smallest_normal), width=32),
    st.integers(0, 2**24).map(lambda i: i * 2.0**-24),
    st.integers(0, 149).map(lambda i: 2.0**-i),
)


@given(fractions)
def test_the_count_is_exact(sparsity: float) -> None:
    expected = [exact_count(n, sparsity) for n in SIZES]
    assert _counts(jnp.float32(sparsity)).tolist() == expected
    # A number known beforehand takes another way to the same count.
    assert [int(kept_count(n, sparsity)) for n in SIZES[:4]] == expected[:4]


@pytest.mark.parametrize("sparsity", [*SPARSITIES, -0.0, TINY, BELOW_ONE])
def test_the_count_is_exact_at_the_ends(sparsity: float) -> None:
    expected = [exact_count(n, sparsity) for n in SIZES]
    found = _counts(jnp.float32(sparsity))
    assert found.dtype == np.uint32
    assert found.tolist() == expected
    assert all(1 <= k <= n for k, n in zip(expected, SIZES, strict=True))


def test_the_count_is_that_of_the_quantile() -> None:
    x = np.random.default_rng(0).standard_normal(101)
    for sparsity in (0.0, 0.25, 0.3125, 0.5, 0.875, 1.0):
        kept = np.abs(x) >= np.quantile(np.abs(x), sparsity)
        assert int(kept_count(101, sparsity)) == kept.sum()


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_a_sparsity_of_any_precision_is_taken_at_its_value(dtype: jnp.dtype) -> None:
    sparsity = jnp.asarray(0.3, dtype)
    assert int(kept_count(1000, sparsity)) == exact_count(1000, float(sparsity))


@pytest.mark.parametrize("size", [0, -1, 2**32])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=rf"`size` must lie in .*, got {size}"):
        kept_count(size, 0.5)


def gradients() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    normal = rng.standard_normal(WIDTH).astype(np.float32)
    subnormal = rng.integers(-(2**23) + 1, 2**23, WIDTH) * 2.0**-149
    return {
        "random": normal,
        "all zero": np.zeros(WIDTH, np.float32),
        "zeros of both signs": np.where(normal > 0, 0.0, -0.0).astype(np.float32),
        "all equal": np.full(WIDTH, -2.5, np.float32),
        "90 % zero": np.where(rng.random(WIDTH) < 0.9, 0, normal).astype(np.float32),
        "subnormal": subnormal.astype(np.float32),
        "few distinct": rng.integers(-3, 4, WIDTH).astype(np.float32),
        "infinite and NaN": np.where(
            rng.random(WIDTH) < 0.1, rng.choice([np.nan, np.inf, -np.inf], WIDTH), 1
        ).astype(np.float32),
    }


@pytest.mark.parametrize("case", gradients())
def test_exactly_k_are_kept(case: str) -> None:
    rows = np.repeat(gradients()[case][None], len(SPARSITIES), axis=0)
    counts = np.array([exact_count(WIDTH, s) for s in SPARSITIES])
    assert_selects(rows, counts)


def test_rows_are_independent() -> None:
    rows = np.stack([*gradients().values()] + [gradients()["random"]] * 2)
    assert_selects(rows, np.array([0, 1, 500, 999, 1000, 3, 17, 100, 0, 1000]))


def test_only_live_entries_are_marked() -> None:
    rng = np.random.default_rng(2)
    rows = np.stack(list(gradients().values()))
    live = rng.random(rows.shape) < np.linspace(0, 1, len(rows))[:, None]
    live[0] = False
    assert_selects(rows, np.full(len(rows), 300), live)


@pytest.mark.parametrize(
    "dtype", [np.float16, jnp.bfloat16, np.float64], ids=lambda d: d.__name__
)
@pytest.mark.parametrize("has_dead", [False, True])
def test_other_precisions(dtype: type, has_dead: bool) -> None:
    rng = np.random.default_rng(3)
    rows = rng.standard_normal((4, 100)).astype(dtype)
    rows[0, 10:20], rows[1, ::3], rows[2, 5:] = 1, np.inf, 0
    with jax.enable_x64(dtype is np.float64):
        counts = np.array([7, 20, 50, 100])
        assert_selects(rows, counts, rng.random((4, 100)) < 0.5 if has_dead else None)


# Few distinct values, so that ties are the rule.
tied = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 2.0**-149, -(2.0**-148), np.inf])


@given(
    hnp.arrays(np.float32, (2, 20), elements=st.one_of(tied, st.floats(width=32))),
    hnp.arrays(np.int64, 2, elements=st.integers(0, 20)),
    hnp.arrays(np.bool_, (2, 20)),
)
def test_any_rows(rows: np.ndarray, counts: np.ndarray, live: np.ndarray) -> None:
    assert_selects(rows, counts, live)


def assert_selects_each(arrays: list[np.ndarray], counts: list[int]) -> None:
    marks = _select_each(arrays, [np.uint32(count) for count in counts])
    for x, count, found in zip(arrays, counts, marks, strict=True):
        expected = chosen(x.ravel(), count).reshape(x.shape)
        np.testing.assert_array_equal(found, expected)


def test_arrays_have_counts_of_their_own() -> None:
    rng = np.random.default_rng(4)
    shapes = [(), (1,), (7, 11), (1000,), (2, 3, 5), (1,)]
    arrays = [np.asarray(rng.standard_normal(s), np.float32) for s in shapes]
    assert_selects_each(arrays, [1, 0, 33, 999, 30, 1])
    # Ties in one, and a NaN in another, change nothing in the rest.
    arrays[2][...], arrays[3][500] = -1, np.nan
    assert_selects_each(arrays, [0, 1, 33, 1, 0, 1])
    arrays[3][...], arrays[4][...] = 0, 1
    assert_selects_each(arrays, [1, 1, 77, 512, 8, 0])


def test_an_empty_array_among_others_is_no_trouble() -> None:
    arrays = [np.zeros((0, 3), np.float32), np.ones(4, np.float32)]
    assert_selects_each(arrays, [0, 2])
    assert select_largest_of_each([], []) == []


def test_no_rows_give_no_marks() -> None:
    assert _select(jnp.zeros((0, 8)), jnp.zeros(0, jnp.uint32)).shape == (0, 8)
