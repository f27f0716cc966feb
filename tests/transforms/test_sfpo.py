"""The recommended chain in one call, and sparsity that waits for the freeze."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sfpo_jax as sfpo
from tests.oracle import kept_count
from tests.ranks import Ranks, assert_alike, assert_rows_alike, copies

SHAPES = {"w": (40, 30), "b": (30,)}


def gradients(rng: np.random.Generator, ranks: int) -> dict[str, np.ndarray]:
    return {
        k: rng.normal(size=(ranks, *s)).astype(np.float32) for k, s in SHAPES.items()
    }


def test_it_is_the_chain() -> None:
    rng = np.random.default_rng(0)
    params = {k: jnp.ones(s) for k, s in SHAPES.items()}
    whole = sfpo.sfpo(
        0.01,
        20,
        warmup_steps=3,
        base_sparsity=0.8,
        final_sparsity=0.2,
        axis_name="data",
        min_size=100,
        weight_decay=0.1,
    )
    schedule = sfpo.cosine_sparsity(0.8, 20, final=0.2, begin=3)
    parts = optax.chain(
        sfpo.sparsify(schedule, min_size=100, error_feedback=True, axis_name="data"),
        sfpo.onebit_adam(
            0.01,
            weight_decay=0.1,
            warmup_steps=3,
            axis_name="data",
            compressor=sfpo.compression.sign(relaxation=1.5),
            refresh_every=16,
        ),
    )
    runs = [Ranks(tx, params, 2) for tx in (whole, parts)]
    for step in range(8):
        grads = gradients(rng, 2)
        if step in (1, 6):  # a skipped step, in either phase
            grads["b"][0, 0] = np.nan
        updates = [run.step(grads) for run in runs]
        assert_rows_alike(updates)
        assert copies(updates[0]) == copies(updates[1])
        assert copies(runs[0].state) == copies(runs[1].state)
        assert_alike(runs[0].params)
    assert int(runs[0].state.onebit_adam.count) == 6


@pytest.mark.parametrize("warmup_steps", [4, "auto"])
def test_the_sparsity_begins_at_the_freeze(warmup_steps: Any) -> None:
    # Without compression and with b1 = 0 the first moment is what sparsify let pass.
    total = 100
    tx: Any = sfpo.sfpo(
        0.01,
        total,
        warmup_steps=warmup_steps,
        base_sparsity=0.9,
        final_sparsity=0.5,
        b1=0.0,
        b2=0.8,
        compressor=sfpo.compression.identity(),
        sparsity_feedback=False,
        refresh_every=3,
    )
    params = jnp.ones(2000)
    state, update = tx.init(params), jax.jit(tx.update)
    schedule = sfpo.cosine_sparsity(0.9, total, final=0.5)
    # All gradients are of one norm, so the variance settles as soon as it may: after
    # 1 / (1 - b2) = 5 steps there is one to compare with.
    freeze = 4 if warmup_steps == 4 else 6
    grads = np.random.default_rng(1).choice([-1, 1], 2000).astype(np.float32)
    for step in range(freeze + 4):
        _, state = update(jnp.asarray(grads), state)
        passed = int(np.count_nonzero(state.onebit_adam.mu))
        share = float(schedule(step))
        # Steps that make the variance see all of the gradient.
        is_dense = step < freeze or (step - freeze) % 3 == 2
        assert passed == (2000 if is_dense else kept_count(2000, share)), step
    assert int(state.onebit_adam.freeze.step) == freeze


def test_the_warmup_is_12_percent_by_default() -> None:
    for total, steps in ((1000, 120), (10, 1), (1, 1)):
        state: Any = sfpo.sfpo(0.1, total).init(jnp.zeros(1))
        assert int(state.onebit_adam.freeze.step) == steps


def test_only_large_or_chosen_leaves_are_sparsified() -> None:
    tx: Any = sfpo.sfpo(
        0.01,
        10,
        warmup_steps=1,
        base_sparsity=0.9,
        final_sparsity=0.9,
        b1=0.0,
        compressor=sfpo.compression.identity(),
        sparsity_mask={"head": False, "body": True, "bias": True},
    )
    rng = np.random.default_rng(2)
    sizes = {"head": 1500, "body": 1500, "bias": 1023}
    grads = {k: jnp.asarray(rng.normal(size=n), jnp.float32) for k, n in sizes.items()}
    state, update = tx.init(grads), jax.jit(tx.update)
    for _ in range(2):
        _, state = update(grads, state)
    passed = {k: int(np.count_nonzero(m)) for k, m in state.onebit_adam.mu.items()}
    body = kept_count(1500, 0.9)
    assert passed == {"head": 1500, "body": body, "bias": 1023}
