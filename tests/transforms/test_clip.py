"""Clipping: one norm for all ranks, sqrt(mean |g_i|^2), and never in half precision."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import sfpo_jax as sfpo
from sfpo_jax.transforms import global_norm
from tests.ranks import Ranks, data_mesh

RANKS = 4


def gradients() -> dict[str, np.ndarray]:
    """Exact in float32: small integers, of one sign on half of the ranks."""
    rng = np.random.default_rng(0)
    return {
        "w": rng.integers(-8, 8, (RANKS, 3, 5)).astype(np.float32),
        "b": rng.integers(-8, 8, (RANKS, 2)).astype(np.float32),
    }


def norms(grads: dict[str, np.ndarray]) -> np.ndarray:
    """|g_i| of each rank."""
    squares = [np.square(g).reshape(RANKS, -1).sum(axis=1) for g in grads.values()]
    return np.sqrt(sum(squares[1:], squares[0]))


@pytest.mark.parametrize("check_vma", [False, True])
def test_all_ranks_scale_alike(check_vma: bool) -> None:
    grads = gradients()
    norm = np.sqrt(np.mean(norms(grads) ** 2))
    max_norm = float(norm) / 4
    run = Ranks(
        sfpo.clip_by_global_norm(max_norm, axis_name="data"),
        {k: jnp.zeros(g.shape[1:]) for k, g in grads.items()},
        RANKS,
        check_vma=check_vma,
        reduces=False,
    )
    clipped = run.step(grads)
    for k, g in grads.items():
        np.testing.assert_allclose(clipped[k], g / 4, rtol=1e-6)
    # Under the threshold nothing is touched, and one rank's norm may be above it.
    small = {k: g * np.float32(2.0**-3) for k, g in grads.items()}
    assert norms(small).max() < max_norm
    for k, g in run.step(small).items():
        np.testing.assert_array_equal(g, small[k])
    lone = {k: np.where(np.arange(RANKS) == 2, small[k].T, 0).T for k in small}
    factor = np.float32(1.5 * max_norm / norms(lone).max())
    lone = {k: g * factor for k, g in lone.items()}
    assert norms(lone).max() > max_norm > np.sqrt(np.mean(norms(lone) ** 2))
    for k, g in run.step(lone).items():
        np.testing.assert_array_equal(g, lone[k])
    assert run.traces == 1


def test_the_norm_is_within_sqrt_n_of_that_of_the_mean() -> None:
    mesh = data_mesh(RANKS)
    own = PartitionSpec("data")
    norm_of = jax.jit(
        jax.shard_map(
            lambda g: global_norm(g, "data"),
            mesh=mesh,
            in_specs=own,
            out_specs=PartitionSpec(),
        )
    )

    def of_mean(g: Any) -> float:
        return float(np.linalg.norm(g.mean(axis=0)))

    same = np.tile(np.arange(6, dtype=np.float32), (RANKS, 1))
    np.testing.assert_allclose(norm_of(same), of_mean(same), rtol=1e-6)
    unrelated = np.eye(RANKS, 6, dtype=np.float32)
    norm = float(norm_of(unrelated))
    np.testing.assert_allclose(norm, np.sqrt(RANKS) * of_mean(unrelated), rtol=1e-6)


def test_one_worker_is_clipped_by_its_own_norm() -> None:
    tx: Any = sfpo.clip_by_global_norm(2.5)
    update = jax.jit(lambda g: tx.update(g, tx.init(g))[0])
    half = np.full(10_000, 300.0, np.float16)  # its square is no float16
    grads = {"half": half, "int": np.arange(3), "empty": np.zeros((0, 2), np.float32)}
    clipped = update(grads)
    assert clipped["half"].dtype == jnp.float16
    np.testing.assert_allclose(clipped["half"], half * np.float16(2.5 / 3e4), rtol=1e-3)
    np.testing.assert_array_equal(clipped["int"], grads["int"])
    assert clipped["empty"].shape == (0, 2)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_passes(bad: float) -> None:
    tx: Any = sfpo.clip_by_global_norm(1.0)
    grads = jnp.array([3.0, bad, 4.0])
    np.testing.assert_array_equal(tx.update(grads, tx.init(grads))[0], grads)


def test_zero_gradients_stay_zero() -> None:
    tx: Any = sfpo.clip_by_global_norm(1.0)
    zeros = jnp.zeros(3)
    np.testing.assert_array_equal(tx.update(zeros, tx.init(zeros))[0], zeros)
