"""Block-wise bytes: the code, its bounds, and that they go where the array goes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec

from sfpo_jax.kernels import (
    Quantized,
    block_size,
    dequantize,
    is_worth_quantizing,
    make_seed,
    quantize,
)
from tests import oracle_states

# Compiled as wholes: one after another the operations take four times as long.
ENCODE, DECODE = jax.jit(quantize, static_argnums=1), jax.jit(dequantize)
# A divisor, one of its own, a ragged rest, a short row.
SHAPES = [(8, 512), (5, 1025), (3, 2, 257), (300,), (64, 20)]


def sample(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Blocks of very different sizes, some of them zero."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape) * 10.0 ** rng.integers(-12, 6, (*shape[:-1], 1))
    return np.where(rng.random(shape) < 0.1, 0.0, x)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_follows_the_equations(shape: tuple[int, ...], signed: bool) -> None:
    x = sample(shape) if signed else sample(shape) ** 2
    chance = None if signed else oracle_states.random_units([3], shape)
    with jax.enable_x64(True):
        seed = None if signed else make_seed(jnp.int32(3))
        found = ENCODE(jnp.asarray(x), signed, seed=seed)
        expected = oracle_states.quantize(x, signed, chance)
        assert found.values.dtype == (jnp.int8 if signed else jnp.uint8)
        assert found.values.shape == shape
        np.testing.assert_array_equal(found.values, expected.values)
        np.testing.assert_allclose(found.scales, expected.scales, rtol=1e-12)
        back = oracle_states.dequantize(expected, signed)
        np.testing.assert_allclose(DECODE(found), back, rtol=1e-12)


@pytest.mark.parametrize("n", [1, 16, 20, 31, 64, 255, 256, 257, 300, 512, 1000, 1025])
def test_the_block(n: int) -> None:
    block = block_size(n)
    assert block == oracle_states.block_size(n) and block <= 256
    assert n % block == 0 or block == 256


def test_small_arrays_and_short_rows_stay() -> None:
    assert is_worth_quantizing((64, 64)) and is_worth_quantizing((4096,))
    assert not is_worth_quantizing((4095,)) and not is_worth_quantizing(())
    assert not is_worth_quantizing((512, 15)) and is_worth_quantizing((512, 16))


@given(
    shape=st.sampled_from(SHAPES[:3]),
    seed=st.integers(0, 2**16),
    exponent=st.integers(-30, 30),
)
def test_signed_values_are_off_by_half_a_unit(
    shape: tuple[int, ...], seed: int, exponent: int
) -> None:
    x = (sample(shape, seed) * 10.0**exponent).astype(np.float32)
    kept = ENCODE(jnp.asarray(x), True)
    back = np.asarray(DECODE(kept))
    x = np.where(np.abs(x) < 2.0**-126, 0, x)  # as back ends may
    root = np.copysign(np.sqrt(np.abs(x)), x)
    error = np.abs(np.asarray(kept.values) * spread(kept) - root)
    assert (error <= 0.5001 * spread(kept)).all()
    assert not back[x == 0].any()


def spread(kept: Quantized) -> np.ndarray:
    """The scale of each entry."""
    scales = np.repeat(np.asarray(kept.scales), kept.block_size, axis=-1)
    return scales[..., : kept.values.shape[-1]]


@given(
    shape=st.sampled_from(SHAPES[:3]),
    seed=st.integers(0, 2**16),
    is_random=st.booleans(),
)
def test_a_variance_above_zero_stays_above_zero(
    shape: tuple[int, ...], seed: int, is_random: bool
) -> None:
    rng = np.random.default_rng(seed)
    v = np.exp(8 * rng.normal(size=shape)).astype(np.float32)
    v[rng.random(shape) < 0.2] = 0.0
    chance = make_seed(jnp.uint32(seed)) if is_random else None
    kept = ENCODE(jnp.asarray(v), False, seed=chance)
    assert ((np.asarray(DECODE(kept)) > 0) == (v > 0)).all()
    units = spread(kept)
    error = np.abs(np.asarray(kept.values) * units - np.sqrt(np.sqrt(v)))
    assert (error <= 1.001 * units).all()


def test_rounding_at_random_is_right_in_the_mean() -> None:
    root = np.random.default_rng(0).uniform(0.01, 1.0, (1, 512))
    v = jnp.asarray(root**4, jnp.float32)

    @jax.jit
    @jax.vmap
    def roots(step: jax.Array) -> jax.Array:
        kept = quantize(v, False, seed=make_seed(step))
        return kept.values.astype(jnp.float32) * jnp.repeat(kept.scales, 256, axis=-1)

    drawn = np.asarray(roots(jnp.arange(1000, dtype=jnp.int32)))
    unit = drawn.max() / 255
    error = drawn.mean(axis=0) - root
    # The standard error of one draw of two neighbours is at most half a unit.
    assert np.abs(error).max() < 5 * 0.5 * unit / np.sqrt(1000)


@pytest.mark.parametrize("change", [0.1, 5.0])
def test_a_variance_follows_gradients_that_change(change: float) -> None:
    rng = np.random.default_rng(0)
    spread = jnp.asarray(np.exp(rng.normal(size=1024)), jnp.float32)
    noise = jnp.asarray(rng.normal(size=(1000, 1024)), jnp.float32)
    factor = jnp.where(jnp.arange(1024) % 2 == 0, 1.0, change)

    @jax.jit
    def run(noise: jax.Array) -> tuple[jax.Array, jax.Array]:
        def body(carry: Any, given: Any) -> Any:
            exact, kept = carry
            step, z = given
            g = z * spread * jnp.where(step < 500, 1.0, factor)
            exact = 0.99 * exact + 0.01 * g * g
            v = 0.99 * dequantize(kept) + 0.01 * g * g
            return (exact, quantize(v, False, seed=make_seed(step))), None

        zeros = jnp.zeros(1024)
        start = (zeros, quantize(zeros, False))
        end, _ = lax.scan(body, start, (jnp.arange(1000), noise))
        return end[0], dequantize(end[1])

    exact, found = map(np.asarray, run(noise))
    octaves = np.log2(found / exact) / 2  # of the denominator
    # Rounded to nearest, the spread is 1.3 octaves where gradients shrink, all upwards.
    assert abs(np.median(octaves)) < 0.05
    assert np.sqrt(np.mean(octaves**2)) < 0.3


def test_blocks_of_zeros_are_zero_and_of_tiny_numbers_are_not() -> None:
    x = np.zeros((2, 256), np.float32)
    x[1] = 2e-38
    x[1, 0] = 2e-30
    for signed in (True, False):
        kept = ENCODE(jnp.asarray(x), signed)
        assert not np.asarray(kept.values)[0].any()
        assert not np.asarray(kept.scales)[0].any()
        back = np.asarray(DECODE(kept))[1]
        assert abs(back[0] / x[1, 0] - 1) < 1e-5
        assert (back > 0).all() == (not signed)


def test_it_is_stacked_sliced_and_written_as_the_array_is() -> None:
    x = jnp.asarray(sample((3, 20, 300)), jnp.float32)
    stacked = jax.jit(jax.vmap(quantize))(x)

    @jax.jit
    def change(stack: Quantized, layer: jax.Array) -> Quantized:
        one = jax.tree.map(
            lambda a: lax.dynamic_index_in_dim(a, layer, keepdims=False), stack
        )
        new = quantize(2 * dequantize(one))
        return jax.tree.map(
            lambda a, b: lax.dynamic_update_index_in_dim(a, b, layer, 0), stack, new
        )

    changed = change(stacked, jnp.int32(1))
    expected = ENCODE(x.at[1].multiply(2.0), True)
    assert changed.block_size == stacked.block_size == expected.block_size
    np.testing.assert_array_equal(changed.values, expected.values)
    np.testing.assert_allclose(changed.scales, expected.scales, rtol=1e-6)


def test_it_prints_and_holds_what_jax_puts_into_it() -> None:
    kept = quantize(jnp.ones((8, 512)))
    assert repr(kept) == "Quantized(int8[8, 512], blocks of 256)"
    shapes = jax.eval_shape(quantize, jnp.ones((8, 512)))
    assert repr(shapes) == repr(kept)
    spec = PartitionSpec("data")
    assert repr(spec) in repr(jax.tree.map(lambda _: spec, kept))
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(kept)]
    assert paths == [".values", ".scales"]
