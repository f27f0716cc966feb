"""The hash's bits: those of its equations, and even."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sfpo_jax.kernels import make_seed, random_bits, random_units
from tests import oracle_states


@pytest.mark.parametrize("words", [(0,), (7, 2**32 - 1)])
def test_it_follows_its_equations(words: tuple[int, ...]) -> None:
    seed = make_seed(*(jnp.uint32(word) for word in words))
    expected = oracle_states.random_bits(words, (3, 5, 7))
    np.testing.assert_array_equal(random_bits(seed, (3, 5, 7)), expected)
    units = random_units(seed, (3, 5, 7), jnp.dtype(jnp.float32))
    expected = oracle_states.random_units(words, (3, 5, 7))
    np.testing.assert_array_equal(units, expected)


def test_bits_are_even_and_seeds_are_strangers() -> None:
    n = 1 << 16
    draw = jax.jit(jax.vmap(lambda step: random_bits(make_seed(step), (n,))))
    bits = np.asarray(draw(jnp.arange(8, dtype=jnp.int32)))
    ones = np.unpackbits(bits.view(np.uint8).reshape(8, n, 4), axis=-1)
    # Five standard errors of a fair coin thrown n times.
    limit = 5 * 0.5 / np.sqrt(n)
    assert np.abs(ones.mean(axis=1) - 0.5).max() < limit
    neighbours = (ones[:, 1:] ^ ones[:, :-1]).mean(axis=1)
    assert np.abs(neighbours - 0.5).max() < limit
    steps = (ones[1:] ^ ones[:-1]).mean(axis=1)
    assert np.abs(steps - 0.5).max() < limit


def test_a_scalar_has_bits_too() -> None:
    expected = oracle_states.random_bits([1], (1,))[0]
    assert int(random_bits(make_seed(jnp.uint32(1)), ())) == expected
