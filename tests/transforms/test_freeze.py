"""When the variance freezes: at the given step, or when its norm has settled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sfpo_jax as sfpo
from sfpo_jax.transforms._freeze import freeze_rule

B2, LAG, TOTAL = 0.9, 10, 500
LATEST = TOTAL // 5


def expected_freeze(norms: Any) -> int:
    """The first step whose norm is within 4 % of that LAG steps before."""
    for step in range(LAG + 1, LATEST):
        now, before = norms[step - 1], norms[step - 1 - LAG]
        if max(now, before) > 0 and min(now, before) / max(now, before) >= 0.96:
            return step
    return LATEST


@pytest.fixture(scope="module")
def frozen_at() -> Callable[[Any], int]:
    """(norm after each step) -> the step of the freeze."""
    rule = freeze_rule("auto", TOTAL, B2)

    @jax.jit
    def run(norms: Any) -> Any:
        def body(state: Any, now: Any) -> Any:
            count, norm = now
            # Nothing is observed any more after the freeze.
            seen = rule.observe(state, count, norm)
            is_frozen = count > state.step
            return jax.tree.map(lambda a, b: jnp.where(is_frozen, a, b), state, seen), 0

        steps = jnp.arange(1, LATEST + 1, dtype=jnp.int32)
        return jax.lax.scan(body, rule.init(), (steps, norms))[0].step

    return lambda norms: int(run(jnp.asarray(norms, jnp.float32)))


STEP = np.arange(1, LATEST + 1)
SEQUENCES = {
    "constant": np.ones(LATEST),
    # Grows 0.41 % a step, 4.2 % in ten; then 0.40 %, 3.9 % (1 / 1.04 = 0.96).
    "grows too fast": 1.0042**STEP,
    "grows slowly enough": 1.0039**STEP,
    "falls too fast": 1.0042**-STEP,
    "settles": 1 + 10 * np.exp(-STEP / 7),
    "grows, then stays": np.minimum(1.1**STEP, 1.1**40),
    "zero": np.zeros(LATEST),
    "zero, then constant": np.where(STEP > 30, 2.0, 0.0),
    "tiny": np.full(LATEST, 1e-30),
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_it_freezes_when_the_norm_has_settled(
    frozen_at: Callable[[Any], int], name: str
) -> None:
    norms = SEQUENCES[name]
    assert frozen_at(norms) == expected_freeze(norms)


def test_the_sequences_are_known(frozen_at: Callable[[Any], int]) -> None:
    # Spelt out, so that the rule above cannot be wrong in the same way.
    found = {name: expected_freeze(norms) for name, norms in SEQUENCES.items()}
    assert found["constant"] == found["tiny"] == found["grows slowly enough"] == 11
    assert found["grows too fast"] == found["falls too fast"] == found["zero"] == 100
    assert found["zero, then constant"] == 41
    assert found["grows, then stays"] == 50


@pytest.mark.parametrize(
    ("total", "b2", "latest"),
    [(2, 0.9, 1), (7, 0.9, 1), (10, 0.999, 2), (999, 0.999, 199), (40, 0.0, 8)],
)
def test_it_freezes_at_a_fifth_of_the_run_at_the_latest(
    total: int, b2: float, latest: int
) -> None:
    rule = freeze_rule("auto", total, b2)
    state = rule.init()
    assert int(state.step) == np.iinfo(np.int32).max
    observe = jax.jit(rule.observe)
    # Norms that double never settle.
    for count in range(1, latest + 1):
        assert int(state.step) > latest
        norm = jnp.float32(1.5**count)
        state = observe(state, jnp.int32(count), norm)
    assert int(state.step) == latest


def test_one_norm_decides_for_the_whole_tree() -> None:
    # |g| of `big` stays, and v / (1 - b2^t) with it; that of `small` grows for ever.
    tx: Any = sfpo.onebit_adam(0.1, b2=B2, warmup_steps="auto", total_steps=TOTAL)
    params = {"big": jnp.full(16, 10.0), "small": jnp.full(2, 0.01)}
    state, update = tx.init(params), jax.jit(tx.update)
    for step in range(15):
        grads = {"big": params["big"], "small": params["small"] * 1.1**step}
        _, state = update(grads, state)
    assert int(state.freeze.step) == LAG + 1
    assert int(state.count) == 15


def test_a_given_step_is_kept() -> None:
    tx: Any = sfpo.scale_by_onebit_adam(warmup_steps=3)
    state, update = tx.init(jnp.zeros(4)), jax.jit(tx.update)
    nu = []
    for step in range(6):
        _, state = update(jnp.full(4, 1.0 + step), state)
        assert int(state.freeze.step) == 3
        nu.append(np.asarray(state.nu))
    assert (nu[1] != nu[2]).all()
    np.testing.assert_array_equal(nu[2], nu[3])
    np.testing.assert_array_equal(nu[2], nu[5])
