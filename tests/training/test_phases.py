"""The phases that reports give a run's steps are those its optimizer goes through."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from sfpo_jax.training import (
    Communication,
    Compression,
    Memory,
    Optimizer,
    Sparsity,
    make_optimizer,
    phases_of,
    step_phases,
)

STEPS, FREEZE = 40, 6


@pytest.mark.parametrize("double_every", ["none", 7])
@pytest.mark.parametrize("refresh_every", ["none", 5])
def test_ranks_that_take_steps_of_their_own(
    double_every: Any, refresh_every: Any
) -> None:
    chosen = Compression(
        sync_every=4,
        double_every=double_every,
        refresh_every=refresh_every,
        warmup=FREEZE / STEPS,
    )
    communication = Communication(compression=chosen)
    tx: Any = make_optimizer(
        Optimizer(schedule="constant", warmup=0.0, weight_decay=0.0),
        Sparsity(schedule="none"),
        communication,
        Memory(),
        steps=STEPS,
        axis_name=None,
    )
    grads = jnp.ones(16)
    state, update, names = tx.init(grads), jax.jit(tx.update), []
    for step in range(STEPS):
        updated = int(state.updated)
        moved, state = update(grads, state, grads)
        if step < FREEZE:
            names.append("warmup")
        elif state.since > 0:
            names.append("local")
        else:
            names.append("compressed" if updated == state.updated else "refresh")
        assert bool(moved.any()) == (names[-1] != "local")
    assert names == step_phases(communication, STEPS, FREEZE)
    assert set(names) == set(phases_of(communication))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"sparsity": Sparsity()}, "`sparsity.schedule` must be none"),
        ({"memory": Memory(mu_dtype="int8")}, "`memory.mu_dtype` must be float32"),
    ],
)
def test_what_does_not_go_with_them_is_named(changes: Any, key: str) -> None:
    chosen = Compression(sync_every=4)
    given = {"sparsity": Sparsity(schedule="none"), "memory": Memory()} | changes
    with pytest.raises(ValueError, match=key):
        make_optimizer(
            Optimizer(),
            given["sparsity"],
            Communication(compression=chosen),
            given["memory"],
            steps=STEPS,
            axis_name=None,
        )
