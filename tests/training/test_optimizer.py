"""Each algorithm's name makes the optimizer it says."""

from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sfpo_jax as sfpo
from sfpo_jax.training import (
    Communication,
    Compression,
    Memory,
    Optimizer,
    Sparsity,
    make_dense_optimizer,
    make_learning_rate,
    make_optimizer,
    sparsity_curve,
    warmup_steps,
)

STEPS = 10
# Adam's first step has the size of the rate, whatever the gradient.
OPTIMIZER = Optimizer(learning_rate=0.1, warmup=0.0, schedule="constant")
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 2048).reshape(32, 64), "b": jnp.zeros(64)}
GRADS = {"w": jnp.linspace(2.0, 1.0, 2048).reshape(32, 64), "b": jnp.ones(64)}


@pytest.fixture(autouse=True)
def standard_promotion() -> Iterator[None]:
    """Optax's own AdamW does not run under the strict rules of the other tests."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def run(
    algorithm: str,
    *,
    sparsity: Sparsity | None = None,
    memory: Memory | None = None,
    **compression: Any,
) -> tuple[Any, Any]:
    """What `train` makes of the optimizer of these sections."""
    tx = make_optimizer(
        OPTIMIZER,
        sparsity or Sparsity(),
        Communication(Compression(algorithm, **compression)),  # pyright: ignore[reportArgumentType]
        memory or Memory(),
        steps=STEPS,
        axis_name=None,
    )
    return train(tx)


def train(tx: optax.GradientTransformation) -> tuple[Any, Any]:
    """(parameters, optimizer state) after three steps of one worker."""
    params: Any = PARAMS
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(3):
        updates, state = update(GRADS, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def moment(state: Any, name: str) -> Any:
    found: Any = optax.tree.get(state, name)
    return found["w"]


def difference(a: Any, b: Any) -> float:
    return max(float(jnp.abs(a[k] - b[k]).max()) for k in PARAMS)


def test_none_is_the_dense_reference() -> None:
    params, _ = train(make_dense_optimizer(OPTIMIZER, STEPS))
    assert difference(run("none")[0], params) == 0.0


@pytest.mark.parametrize("algorithm", ["bf16", "int8"])
def test_compressed_gradients_stay_close_to_the_reference(algorithm: str) -> None:
    assert 0.0 < difference(run(algorithm)[0], run("none")[0]) < 1e-2


def test_factors_of_low_rank_follow_the_reference_where_they_can() -> None:
    # The gradient of the matrix, a plane over its rows and columns, is of rank 2.
    plain = run("none")[0]
    params, state = run("low_rank")
    assert 0.0 < difference(params, plain) < 1e-4
    assert [x.shape for x in jax.tree.leaves(state[0].basis)] == [(64, 2)]
    _, state = run("low_rank", rank=1, error_feedback=False)
    assert [x.shape for x in jax.tree.leaves(state[0])] == [(64, 1)]


@pytest.mark.parametrize("algorithm", ["1bit_adam", "sparse_1bit"])
def test_the_warm_up_of_one_bit_is_the_reference(algorithm: str) -> None:
    inside = run(algorithm, warmup=0.3)[0]
    assert difference(inside, run("none")[0]) < 1e-6


def test_masking_begins_at_the_freeze_or_at_the_start() -> None:
    sparse = {"base": 0.5, "schedule": "constant"}
    _, waiting = run("1bit_adam", sparsity=Sparsity(**sparse), warmup=1.0)
    early = Sparsity(**sparse, begin="start", error_feedback=False)
    masked, _ = run("1bit_adam", sparsity=early, warmup=1.0)
    assert int(waiting.onebit_adam.freeze.step) == STEPS
    # Half of the entries of the matrix never moved but for their decay.
    still = jnp.abs(masked["w"] - PARAMS["w"]) < 0.05
    assert 0.45 < float(still.mean()) < 0.55
    assert difference(run("1bit_adam", warmup=1.0)[0], run("none")[0]) < 1e-6


def test_vectors_are_not_decayed() -> None:
    tx = make_dense_optimizer(OPTIMIZER, STEPS)
    params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
    zeros = {"w": jnp.zeros((2, 2)), "b": jnp.zeros(2)}
    updates: Any
    updates, _ = tx.update(zeros, tx.init(params), params)
    assert float(jnp.abs(updates["w"]).max()) > 0
    assert float(jnp.abs(updates["b"]).max()) == 0


def test_the_norm_is_clipped() -> None:
    clipped = Optimizer(
        learning_rate=1.0, warmup=0.0, schedule="constant", eps=1.0, clip_norm=0.5
    )
    for algorithm in ("none", "1bit_adam"):
        tx = make_optimizer(
            clipped,
            Sparsity(),
            Communication(Compression(algorithm)),
            Memory(),
            steps=STEPS,
            axis_name=None,
        )
        params: Any = {"b": jnp.zeros(4)}
        updates: Any
        updates, _ = tx.update({"b": jnp.full(4, 9.0)}, tx.init(params), params)
        # Every clipped entry is 0.25, so Adam with eps = 1 moves by 0.25 / 1.25.
        np.testing.assert_allclose(updates["b"], -0.2, rtol=1e-5)


@pytest.mark.parametrize("algorithm", ["1bit_adam", "sparse_1bit"])
def test_narrow_states(algorithm: str) -> None:
    memory = Memory(mu_dtype="bfloat16", nu_dtype="bfloat16", error_dtype="bfloat16")
    _, state = run(algorithm, memory=memory)
    assert moment(state, "mu").dtype == moment(state, "nu").dtype == jnp.bfloat16


def test_a_packed_moment_has_no_dense_steps() -> None:
    with pytest.raises(ValueError, match=r"refresh_every` must be none.*packed.*16"):
        run("1bit_adam", memory=Memory(mu_dtype="packed"))
    _, state = run("1bit_adam", memory=Memory(mu_dtype="packed"), refresh_every="none")
    moments = jax.tree.leaves(optax.tree.get(state, "mu"))
    assert any(leaf.dtype == jnp.uint8 for leaf in moments)


def test_refreshing_steps_move_the_variance() -> None:
    tx: Any = make_optimizer(
        OPTIMIZER,
        Sparsity(),
        Communication(Compression(warmup=0.2, refresh_every=3)),
        Memory(),
        steps=STEPS,
        axis_name=None,
    )
    state, update = tx.init(PARAMS), jax.jit(tx.update)
    changed = []
    for _ in range(8):
        before = np.asarray(moment(state, "nu"))
        _, state = update(GRADS, state, PARAMS)
        changed.append(bool((before != moment(state, "nu")).any()))
    assert changed == [True, True, False, False, True, False, False, True]


@pytest.mark.parametrize("algorithm", ["none", "bf16", "int8", "low_rank"])
def test_adamw_has_no_packed_moment(algorithm: str) -> None:
    expected = f"`memory.mu_dtype` must be.*{algorithm}.*1bit_adam"
    with pytest.raises(ValueError, match=expected):
        run(algorithm, memory=Memory(mu_dtype="packed"))


def entry_types(algorithm: str, memory: Memory) -> dict[str, Any]:
    """Names of the dtypes in which a large matrix has its states."""
    params = {"w": jnp.ones((64, 64))}
    tx = make_optimizer(
        OPTIMIZER,
        Sparsity(),
        Communication(Compression(algorithm)),  # pyright: ignore[reportArgumentType]
        memory,
        steps=STEPS,
        axis_name=None,
    )
    state: Any = jax.eval_shape(tx.init, params)
    found = {}
    for name in ("mu", "nu", "worker_error"):
        held = optax.tree.get(state, name, default=None)
        if held is not None:
            found[name] = {x.dtype.name for x in jax.tree.leaves(held)}
    return found


@pytest.mark.parametrize(
    "algorithm", ["none", "bf16", "1bit_adam", "sparse_1bit", "low_rank"]
)
def test_states_of_one_byte(algorithm: str) -> None:
    int8 = Memory(mu_dtype="int8", nu_dtype="int8", error_dtype="int8")
    expected = {"mu": {"int8", "float32"}, "nu": {"uint8", "float32"}}
    if algorithm != "none":
        expected["worker_error"] = {"int8", "float32"}
    assert entry_types(algorithm, int8) == expected


def test_adamw_of_narrow_moments_follows_the_reference() -> None:
    plain = run("none")[0]
    # The matrix is too small for bytes, so that these moments are floats.
    assert difference(run("none", memory=Memory(mu_dtype="int8"))[0], plain) < 1e-6
    for memory in (Memory(nu_dtype="factored"), Memory(nu_dtype="bfloat16")):
        assert difference(run("none", memory=memory)[0], plain) < 1e-2
    bf16 = Memory(nu_dtype="bfloat16")
    assert entry_types("none", bf16) == {"mu": {"float32"}, "nu": {"bfloat16"}}


def rate_at(optimizer: Optimizer, *steps: int) -> list[float]:
    rate = make_learning_rate(optimizer, 100)
    return [float(np.asarray(rate(step))) for step in steps]


@pytest.mark.parametrize("schedule", ["cosine", "linear"])
def test_the_rate_rises_and_falls(schedule: Literal["cosine", "linear"]) -> None:
    optimizer = Optimizer(learning_rate=2.0, warmup=0.2, schedule=schedule)
    found = rate_at(optimizer, 0, 19, 20, 60, 100)
    assert found == pytest.approx([0.1, 2.0, 2.0, 1.0, 0.0])


def test_the_rate_may_stay() -> None:
    optimizer = Optimizer(learning_rate=2.0, warmup=0.0, schedule="constant")
    assert rate_at(optimizer, 0, 99) == pytest.approx([2.0, 2.0])


def test_the_curve_of_reports_is_the_schedule_of_the_optimizer() -> None:
    communication = Communication(Compression(warmup=0.2))
    assert warmup_steps(communication, 100) == 20
    curve = sparsity_curve(Sparsity(), communication, 100, 20)
    schedule = sfpo.cosine_sparsity(0.7, 100, final=0.3, begin=20)
    # XLA's vectorised cosine may differ from its scalar one by an ulp. Every 16th step
    # from the freeze on is dense.
    dense = (35, 51, 67, 83, 99)
    one_by_one = [0.0 if t in dense else float(schedule(t)) for t in range(100)]
    np.testing.assert_allclose(curve, one_by_one, rtol=3e-7)
    assert not sparsity_curve(Sparsity(), communication, 100, None).any()
    assert not sparsity_curve(Sparsity(schedule="none"), communication, 9, 2).any()
    sparse_wire = Communication(Compression("sparse_1bit"))
    assert not sparsity_curve(Sparsity(), sparse_wire, 9, 2).any()
    auto = Communication(Compression(warmup="auto"))
    assert warmup_steps(auto, 100) == "auto"
