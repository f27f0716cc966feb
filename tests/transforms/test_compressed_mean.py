"""Error-feedback averaging in front of other optimizers, through every compressor."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sfpo_jax as sfpo
from tests.oracle import Codec, TwoPhaseMean
from tests.ranks import Ranks, assert_alike, assert_rows_alike

RANKS, STEPS = 4, 5
SHAPES = {"a": (2051,), "b": (2, 3), "c": ()}
COMPRESSORS = {
    "sign": sfpo.compression.sign(),
    "sparse_sign": sfpo.compression.sparse_sign(0.3),
    "top_k": sfpo.compression.top_k(0.1),
    "int8": sfpo.compression.int8(),
    "bfloat16": sfpo.compression.bfloat16(),
    "identity": sfpo.compression.identity(),
}
ORACLES = {"sign": Codec(), "sparse_sign": Codec(0.3)}


def gradients(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(RANKS, *s)) for k, s in SHAPES.items()}


@pytest.fixture(scope="module", params=COMPRESSORS)
def trained(request: pytest.FixtureRequest) -> tuple[str, Any, list[Any]]:
    """Name, state and the updates of each step of two optimizers on the same mean.

    The tree has every leaf twice: SGD trains one, Adam the other.
    """
    tx = optax.chain(
        sfpo.compressed_mean(COMPRESSORS[request.param], "data"),
        optax.partition(
            {"sgd": optax.sgd(1.0), "adam": optax.adam(0.1)},
            {"sgd": "sgd", "adam": "adam"},
        ),
    )
    # Optax itself needs the promotion that the tests forbid elsewhere.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        zeros = {k: jnp.zeros(s) for k, s in SHAPES.items()}
        run = Ranks(tx, {"sgd": zeros, "adam": zeros}, RANKS)
        updates = []
        for step in range(STEPS):
            grads = gradients(step)
            found = run.step({"sgd": grads, "adam": grads})
            assert_rows_alike(found)
            assert_alike(run.params)
            updates.append(jax.tree.map(lambda u: np.asarray(u)[0], found))
    return request.param, jax.tree.map(np.asarray, run.state[0]), updates


def means(updates: list[Any]) -> list[dict[str, np.ndarray]]:
    """What SGD with a rate of 1 saw, a step."""
    return [{k: -u for k, u in step["sgd"].items()} for step in updates]


def test_nothing_is_lost(trained: tuple[str, Any, list[Any]]) -> None:
    # Mean gradients = means given out + mean worker error + server error.
    _, state, updates = trained
    given = {
        k: sum(np.mean(gradients(step)[k], axis=0) for step in range(STEPS))
        for k in SHAPES
    }
    kept = {k: np.mean(e, axis=0) for k, e in state.worker_error.tree["sgd"].items()}
    # The server errors of both halves lie in one bucket; only their sum is compared.
    server = sum(float(np.sum(x)) for x in jax.tree.leaves(state.server_error))
    missing = {
        k: given[k] - kept[k] - sum(m[k] for m in means(updates)) for k in SHAPES
    }
    total = 2 * sum(float(np.sum(x)) for x in missing.values())
    # At most 1e-15 of the largest term in each of 5,000 sums.
    np.testing.assert_allclose(total, server, rtol=0, atol=1e-10)


def codec(name: str) -> Any:
    """(x, live) -> what the receiver knows of x; not all have a twin in the oracle."""
    if name in ORACLES:
        return ORACLES[name]
    compressor = COMPRESSORS[name]

    @jax.jit
    def there_and_back(x: jax.Array) -> jax.Array:
        return compressor.decompress(compressor.compress(x), x.size)

    return lambda x, live: np.asarray(there_and_back(x.ravel())).reshape(x.shape)


def test_it_follows_the_equations(trained: tuple[str, Any, list[Any]]) -> None:
    name, state, updates = trained
    zeros = [np.zeros(s) for s in SHAPES.values()]
    everything = [np.ones(s, bool) for s in SHAPES.values()]
    oracle = TwoPhaseMean(zeros, RANKS, codec(name))
    with jax.enable_x64(True):
        for step, mean in enumerate(means(updates)):
            grads = gradients(step)
            sent = [[grads[k][i] for k in SHAPES] for i in range(RANKS)]
            for k, expected in zip(SHAPES, oracle(sent, everything), strict=True):
                np.testing.assert_allclose(mean[k], expected, rtol=1e-12, atol=1e-12)
    held = state.worker_error.tree["sgd"]
    for i, errors in enumerate(oracle.worker):
        for k, expected in zip(SHAPES, errors, strict=True):
            np.testing.assert_allclose(held[k][i], expected, rtol=0, atol=1e-12)


def test_identity_is_the_exact_mean(trained: tuple[str, Any, list[Any]]) -> None:
    name, state, updates = trained
    if name == "identity":
        for step, mean in enumerate(means(updates)):
            for k, g in gradients(step).items():
                np.testing.assert_allclose(mean[k], g.mean(axis=0), atol=1e-15)
        assert not any(x.any() for x in jax.tree.leaves(state))


def test_adam_after_it_is_adam_on_the_mean(
    trained: tuple[str, Any, list[Any]],
) -> None:
    _, _, updates = trained
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        adam = optax.adam(0.1)
        update = jax.jit(adam.update)
        state = adam.init({k: jnp.zeros(s) for k, s in SHAPES.items()})
        for mean, found in zip(means(updates), updates, strict=True):
            expected, state = update(jax.tree.map(jnp.asarray, mean), state)
            for k in SHAPES:
                np.testing.assert_allclose(found["adam"][k], expected[k], rtol=1e-9)


def test_without_feedback_there_is_no_state() -> None:
    tx = sfpo.compressed_mean(sfpo.compression.sign(), None, error_feedback=False)
    grads = jnp.array([1.0, -3.0, 0.5])
    state = tx.init(grads)
    assert not jax.tree.leaves(state)
    for _ in range(2):
        updates, state = jax.jit(tx.update)(grads, state)
        np.testing.assert_array_equal(updates, np.array([1.5, -1.5, 1.5]))
