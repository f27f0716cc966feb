"""The update in two halves against the update in one."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sfpo_jax as sfpo
from sfpo_jax.transforms import Phase, StagedTransformation, compresses_next

WARMUP, EVERY, STEPS = 3, 4, 9

TRANSFORMATIONS = {
    "onebit_adam": lambda: sfpo.onebit_adam(
        1e-2, weight_decay=0.1, warmup_steps=WARMUP, refresh_every=EVERY
    ),
    "packed": lambda: sfpo.onebit_adam(1e-2, warmup_steps=WARMUP, mu_dtype="packed"),
    "sparse signs": lambda: sfpo.onebit_adam(
        1e-2, warmup_steps=WARMUP, compressor=sfpo.compression.sparse_sign(0.3)
    ),
    "sfpo": lambda: sfpo.sfpo(
        1e-2,
        STEPS,
        warmup_steps=WARMUP,
        refresh_every=EVERY,
        base_sparsity=0.7,
        final_sparsity=0.3,
        min_size=16,
    ),
}


def gradients(step: int, dtype: Any = np.float32) -> Any:
    rng = np.random.default_rng(step)
    return {
        "w": rng.normal(size=(64, 80)).astype(dtype),
        "b": rng.normal(size=80).astype(dtype),
        "n": np.ones(3, np.int32),
    }


@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_both_halves_make_one_update(name: str) -> None:
    # Which entries are the largest may hang on the last bit, and two programs round
    # differently.
    is_wide = name == "sparse signs"
    with jax.enable_x64(is_wide):
        dtype = np.float64 if is_wide else np.float32
        phases = phases_of_equal_halves(TRANSFORMATIONS[name](), dtype)
    assert phases[:WARMUP] == ["warmup"] * WARMUP
    refreshes = phases[WARMUP:].count("warmup")
    assert refreshes == (
        (STEPS - WARMUP) // EVERY if name in ("onebit_adam", "sfpo") else 0
    )


def phases_of_equal_halves(tx: Any, dtype: Any) -> list[Phase]:
    params = jax.tree.map(jnp.asarray, gradients(100, dtype))

    @jax.jit
    def whole(grads: Any, state: Any) -> Any:
        return tx.update(grads, state, params)

    @jax.jit(static_argnames="phase")
    def halves(grads: Any, state: Any, phase: Phase) -> Any:
        way, state = tx.send(grads, state, phase)
        return tx.receive(way, state, params, phase)

    state = tx.init(params)
    phases: list[Phase] = []
    for step in range(STEPS):
        compressed = compresses_next(state)
        assert compressed is not None
        phases.append("compressed" if bool(compressed) else "warmup")
        grads = gradients(step, dtype)
        expected = whole(grads, state)
        found = halves(grads, state, phases[-1])
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
            found,
            expected,
        )
        state = expected[1]
    return phases


def test_copies_and_pickles_are_whole() -> None:
    functions: Any = (str, len, abs, min, max)
    tx = StagedTransformation(*functions)
    for made in (copy.copy(tx), copy.deepcopy(tx), pickle.loads(pickle.dumps(tx))):
        assert type(made) is StagedTransformation and made == tx
        assert (made.apply, made.send, made.receive) == (abs, min, max)
    whole = TRANSFORMATIONS["sfpo"]()
    assert copy.copy(whole).send is whole.send


def test_all_units_take_a_dense_step_while_one_needs_it() -> None:
    tx = TRANSFORMATIONS["onebit_adam"]()
    params = jnp.ones(8)
    state = tx.init(params)
    for _ in range(WARMUP):
        _, state = tx.update(params, state, params)
    behind = tx.init(params)
    assert bool(compresses_next([state, {"a": state}]))
    assert not bool(compresses_next([state, {"a": behind}]))
    assert compresses_next((params, {})) is None
