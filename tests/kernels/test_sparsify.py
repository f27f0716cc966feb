"""Leaves cut in two: all of a leaf is in one half, at its place, with its bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sfpo_jax.kernels import (
    Sparsified,
    Thresholds,
    native_platforms,
    sparsify_leaves,
)
from sfpo_jax.kernels import _sparsify as kernel
from tests.kernels.test_threshold import kept

SHAPES = [(3, 7), (), (1000,), (0, 3), (5, 13_108)]
COUNTS = [4, 1, 1000, 0, 30_000]

needs_native = pytest.mark.skipif(
    "cpu" not in native_platforms(), reason="there is no native library here"
)


@jax.jit
def cut(leaves: Any, residual: Any, counts: Any, is_on: Any, is_new: Any) -> Sparsified:
    return sparsify_leaves(
        leaves, counts, residual=residual, is_on=is_on, is_new=is_new
    )


def dyadic(seed: int) -> list[np.ndarray]:
    """Few distinct values, so that ties are the rule, and exact in sums."""
    rng = np.random.default_rng(seed)
    return [rng.integers(-60, 60, shape).astype(np.float32) / 16 for shape in SHAPES]


def counts() -> list[np.uint32]:
    return [np.uint32(count) for count in COUNTS]


def assert_bits(found: Any, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    assert np.asarray(found).tobytes() == expected.astype(np.float32).tobytes()


@pytest.mark.parametrize("has_residual", [True, False])
def test_the_halves_are_the_whole(has_residual: bool) -> None:
    leaves, residual = dyadic(0), dyadic(1) if has_residual else []
    leaves[4][0, :100] = np.nan
    leaves[4][1, :100] = -0.0
    total = [x + r for x, r in zip(leaves, residual or dyadic(1), strict=True)]
    total = total if has_residual else leaves
    found = cut(leaves, residual, counts(), True, True)
    for i, (s, count) in enumerate(zip(total, COUNTS, strict=True)):
        mask = kept(s.ravel(), count).reshape(s.shape)
        assert_bits(found.kept[i], np.where(mask, s, 0))
        if has_residual:
            assert_bits(found.residual[i], np.where(mask, 0, s))
    assert found.counts.tolist() == COUNTS
    assert len(found.residual) == len(residual)


@pytest.mark.parametrize(("is_on", "is_new"), [(False, True), (True, False)])
def test_a_step_may_leave_the_residual(is_on: bool, is_new: bool) -> None:
    leaves, residual = dyadic(2), dyadic(3)
    found = cut(leaves, residual, counts(), is_on, is_new)
    expected = cut(leaves, residual, counts(), True, True).kept if is_on else leaves
    for i, x in enumerate(expected):
        assert_bits(found.kept[i], np.asarray(x))
        assert_bits(found.residual[i], residual[i])
    sizes = [x.size for x in leaves]
    assert found.counts.tolist() == (COUNTS if is_on else sizes)


@needs_native
def test_as_its_twin() -> None:
    rng = np.random.default_rng(4)
    leaves = [rng.integers(0, 2**32, s, np.uint32).view(np.float32) for s in SHAPES]
    leaves[0][0] = [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-45]
    leaves[4].ravel()[::5] = 2.0
    keys, ends = [0x3F800000, 0xFFFFFFFF, 0, 0, 0x40000000], [9, 3, 77, 0, 40_001]
    found = Thresholds(jnp.asarray(keys, jnp.uint32), jnp.asarray(ends, jnp.uint32))
    on = jnp.asarray(True)
    arguments = on, on, found, [jnp.asarray(x) for x in leaves], []
    native, twin = (jax.jit(f)(*arguments) for f in (kernel._native, kernel._twin))
    assert native.counts.tolist() == twin.counts.tolist()
    for a, b in zip(native.kept, twin.kept, strict=True):
        assert_bits(a, np.asarray(b))


def test_the_residual_is_overwritten_in_place() -> None:
    leaves, residual = dyadic(5), [jnp.asarray(x) for x in dyadic(6)]
    program = jax.jit(cut, donate_argnums=1)
    memory = program.lower(leaves, residual, counts(), True, True).compile()
    found = memory.memory_analysis()
    assert found is not None
    assert found.alias_size_in_bytes >= residual[4].nbytes


def test_shards_cut_without_a_word_to_each_other(mesh8: jax.sharding.Mesh) -> None:
    x = np.random.default_rng(7).standard_normal((8, 999)).astype(np.float32)

    def local(x: jax.Array, r: jax.Array, is_on: jax.Array) -> Sparsified:
        return sparsify_leaves([x], [100], residual=[r], is_on=is_on, is_new=is_on)

    run = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh8,
            # Alike on all ranks are the switch and one of the summands.
            in_specs=(P("data"), P(), P()),
            out_specs=P("data"),
        )
    )
    arguments = x, np.ones((1, 999), np.float32), True
    text = run.lower(*arguments).compile().as_text()
    assert text is not None
    for word in ("all-reduce", "all-gather", "all-to-all", "collective", "scatter"):
        assert word not in text
    found = run(*arguments)
    for row, sent in zip(x + np.float32(1), np.asarray(found.kept[0]), strict=True):
        assert_bits(sent, np.where(kept(row, 100), row, 0))


@needs_native
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.zeros(4, np.float16)}, "`x` 0 has a wrong dtype"),
        ({"residual": np.zeros(3, np.float32)}, "has 3 entries, needs 4"),
        ({"end": np.zeros(2, np.uint32)}, "one number a leaf"),
        ({"threshold": np.zeros(2, np.uint32)}, "`x` 1|`residual` 0"),
    ],
)
def test_a_wrong_call_is_an_exception(change: dict[str, Any], message: str) -> None:
    given = {
        "threshold": np.zeros(1, np.uint32),
        "end": np.zeros(1, np.uint32),
        "x": np.zeros(4, np.float32),
        "residual": np.zeros(4, np.float32),
        **change,
    }
    like = jax.ShapeDtypeStruct((4,), np.float32)
    results = [jax.ShapeDtypeStruct((1,), np.uint32), like, like]
    call = jax.ffi.ffi_call("sfpo_sparsify", results)
    with pytest.raises(jax.errors.JaxRuntimeError, match=message):
        call(np.bool_(True), np.bool_(True), *given.values(), has_residual=True)
