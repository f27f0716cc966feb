"""A gradient that is not finite, on any rank: all ranks skip, and no state changes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sfpo_jax as sfpo
from tests.ranks import Ranks, assert_alike, assert_rows_alike, copies

RANKS = 8
SHAPES = {"half": (1500,), "single": (40, 50)}
DTYPES: dict[str, Any] = {"half": np.float16, "single": np.float32}

# What is wrong, and in which leaf. A product of float16 numbers overflows to infinity;
# a float32 whose square overflows would poison Adam's variance as an infinity does.
BAD = {
    "nan": ("single", np.float32(np.nan)),
    "+inf": ("single", np.float32(np.inf)),
    "-inf": ("single", np.float32(-np.inf)),
    "float16 overflow": ("half", np.float16(np.inf)),
    "float32 square overflow": ("single", np.float32(1e25)),
}


def gradients(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        k: rng.normal(size=(RANKS, *s)).astype(DTYPES[k]) for k, s in SHAPES.items()
    }


def spoiled(kind: str, ranks: str) -> dict[str, np.ndarray]:
    leaf, value = BAD[kind]
    grads = gradients(99)
    where = slice(5, 6) if ranks == "one" else slice(None)
    grads[leaf].reshape(RANKS, -1)[where, -3] = value
    return grads


def parameters() -> dict[str, jax.Array]:
    return {k: jnp.ones(s, DTYPES[k]) for k, s in SHAPES.items()}


@pytest.fixture(scope="module")
def chain() -> tuple[Ranks, dict[str, Any]]:
    """The run, and its states in either phase."""
    tx = optax.chain(
        sfpo.sparsify(0.5, error_feedback=True, axis_name="data"),
        sfpo.onebit_adam(0.01, weight_decay=0.1, warmup_steps=2, axis_name="data"),
    )
    run = Ranks(tx, parameters(), RANKS)
    states = {}
    for step, phase in enumerate(["warmup", "", "", "compressed"]):
        run.step(gradients(step))
        states[phase] = run.state, run.params
    for phase, (state, _) in states.items():
        residuals = (state[0].residual, state[1].worker_error)
        nonzero = [np.asarray(x).any() for x in jax.tree.leaves(residuals)]
        assert phase != "compressed" or all(nonzero)
    return run, states


@pytest.mark.parametrize("phase", ["warmup", "compressed"])
@pytest.mark.parametrize("ranks", ["one", "all"])
@pytest.mark.parametrize("kind", BAD)
def test_all_ranks_skip(
    chain: tuple[Ranks, dict[str, Any]], kind: str, ranks: str, phase: str
) -> None:
    run, states = chain
    run.state, run.params = states[phase]
    before = copies((run.state, run.params))
    updates = run.step(spoiled(kind, ranks))
    assert copies((run.state, run.params)) == before
    for leaf in jax.tree.leaves(updates):
        assert not np.asarray(leaf).any()
    assert run.traces == 1


@pytest.mark.parametrize("phase", ["warmup", "compressed"])
def test_the_largest_float16_is_finite(
    chain: tuple[Ranks, dict[str, Any]], phase: str
) -> None:
    run, states = chain
    run.state, run.params = states[phase]
    count = int(run.state[1].count)
    grads = gradients(98)
    grads["half"][:] = np.finfo(np.float16).max
    updates = run.step(grads)
    assert int(run.state[1].count) == int(run.state[0].count) == count + 1
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((updates, run.state)))
    assert_rows_alike(updates)
    assert_alike(run.params)


def test_training_goes_on_as_if_the_step_had_not_been(
    chain: tuple[Ranks, dict[str, Any]],
) -> None:
    run, states = chain
    after = []
    for kind in (None, "nan"):
        run.state, run.params = states["compressed"]
        if kind is not None:
            run.step(spoiled(kind, "one"))
        run.step(gradients(97))
        after.append(copies((run.state, run.params)))
    assert after[0] == after[1]


def test_compressed_mean_gives_nan_to_all_and_keeps_its_state() -> None:
    tx = sfpo.compressed_mean(sfpo.compression.sign(), "data")
    run = Ranks(tx, parameters(), RANKS)
    run.step(gradients(0))
    state, before = run.state, copies(run.state)
    for kind in BAD:
        for ranks in ("one", "all"):
            run.state = state
            means = run.step(spoiled(kind, ranks))
            assert copies(run.state) == before, (kind, ranks)
            assert all(np.isnan(x).all() for x in jax.tree.leaves(means))
    run.state = state
    means = run.step(gradients(1))
    assert_rows_alike(means)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((means, run.state)))
    assert copies(run.state) != before
