"""The second moment of rows and columns."""

import jax.numpy as jnp
import numpy as np

from sfpo_jax.transforms._factored import (
    expand,
    is_worth_factoring,
    update_factored,
    zeros_factored,
)

FLOAT32 = jnp.dtype(jnp.float32)


def test_the_means_of_rows_and_columns_are_kept() -> None:
    rng = np.random.default_rng(0)
    node, full = zeros_factored((2, 3, 4, 5), FLOAT32), np.zeros((2, 3, 4, 5))
    for _ in range(3):
        g = rng.normal(size=full.shape)
        node = update_factored(node, jnp.asarray(g, jnp.float32), 0.9)
        full = 0.9 * full + 0.1 * g * g
    found = np.asarray(expand(node))
    assert found.shape == full.shape
    for axis in (-1, -2):
        np.testing.assert_allclose(found.mean(axis), full.mean(axis), rtol=1e-5)


def test_it_is_exact_where_the_squares_have_rank_one() -> None:
    rng = np.random.default_rng(1)
    g = np.exp(rng.normal(size=(6, 1)) + rng.normal(size=(1, 7)))
    node = update_factored(zeros_factored((6, 7), FLOAT32), jnp.float32(g), 0.0)
    np.testing.assert_allclose(expand(node), g * g, rtol=1e-5)


def test_what_never_had_a_gradient_is_zero_and_small_ones_are_not() -> None:
    g = jnp.full((4, 4), 1e-15).at[1].set(0.0).at[:, 2].set(0.0)
    node = zeros_factored((4, 4), FLOAT32)
    assert not np.asarray(expand(node)).any()
    found = np.asarray(expand(update_factored(node, g, 0.5)))
    assert ((found > 0) == (np.asarray(g) > 0)).all()


def test_matrices_are_factored() -> None:
    assert is_worth_factoring((64, 64)) and is_worth_factoring((3, 3, 32, 64))
    assert not is_worth_factoring((8192,)) and not is_worth_factoring((63, 65))
