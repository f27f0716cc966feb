"""The exact mean over an axis: its values, its types, how many transfers it makes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from sfpo_jax.collectives import _mean, axis_mean

RANKS = 8
SHAPES = [(), (3,), (0, 2), (5, 7), (1, 1), (100,)]
DTYPES = [
    jnp.float32,
    jnp.bfloat16,
    jnp.float32,
    jnp.float32,
    jnp.bfloat16,
    jnp.float16,
]


def leaves() -> list[np.ndarray]:
    """Eighths under four: their sum over eight ranks is exact in each of the types."""
    rng = np.random.default_rng(0)
    return [
        (rng.integers(-31, 32, (RANKS, *shape)) / 8).astype(dtype)
        for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]


def over_ranks(mesh: Mesh) -> Any:
    def local(own: list[jax.Array]) -> list[jax.Array]:
        return axis_mean([x[0] for x in own], "data")

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P()))


def test_the_mean_is_exact_and_alike_on_all_ranks(mesh8: Mesh) -> None:
    own = leaves()
    # With the sums exact, the only rounding left is that of the type.
    means = over_ranks(mesh8)(own)
    for x, mean in zip(own, means, strict=True):
        assert (mean.dtype, mean.shape) == (x.dtype, x.shape[1:])
        expected = x.astype(np.float64).mean(0).astype(x.dtype)
        shards = [np.asarray(shard.data) for shard in mean.addressable_shards]
        assert len(shards) == RANKS
        for shard in shards:
            np.testing.assert_array_equal(shard, expected)


@pytest.mark.parametrize(
    ("joined_entries", "count"),
    [
        # All travel in float32.
        (1000, 1),
        # 1 + 3 + 0, 35, 1, 100.
        (35, 4),
        # A leaf is never cut: 1, 3 + 0, 35, 1, 100.
        (3, 5),
    ],
)
def test_leaves_share_a_transfer(
    mesh8: Mesh, monkeypatch: pytest.MonkeyPatch, joined_entries: int, count: int
) -> None:
    monkeypatch.setattr(_mean, "_JOINED_ENTRIES", joined_entries)
    text = over_ranks(mesh8).lower(leaves()).as_text()
    assert text.count("stablehlo.all_reduce") == count


def test_one_worker_is_its_own_mean() -> None:
    own = [jnp.ones(3), jnp.zeros((), jnp.bfloat16)]
    assert all(a is b for a, b in zip(axis_mean(own, None), own, strict=True))


@pytest.mark.parametrize("first", [[], [jnp.bfloat16]], ids=["alone", "after another"])
def test_an_empty_leaf_is_no_trouble(mesh8: Mesh, first: list[Any]) -> None:
    own = [jnp.ones((RANKS, 2), dtype) for dtype in first]
    means = over_ranks(mesh8)([*own, jnp.zeros((RANKS, 0, 3))])
    assert [(m.dtype, m.shape) for m in means[-1:]] == [(jnp.float32, (0, 3))]
    assert [m.tolist() for m in means[:-1]] == [[1, 1]] * len(first)


def test_no_leaves_make_no_transfer(mesh8: Mesh) -> None:
    assert over_ranks(mesh8)([]) == []
