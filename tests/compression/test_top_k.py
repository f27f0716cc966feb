"""The largest entries in bfloat16: what stands on the wire, ties, unused slots."""

import jax.numpy as jnp
import numpy as np
import pytest

from sfpo_jax import compression
from tests.compression.harness import compiled, sent

TOP = compression.top_k(0.25, block_size=16)


def test_the_wire_holds_values_and_indices() -> None:
    x = np.array([1, -8, 2, 3, 1, 4, -6, 0, 0, 5, 1, 1, 1, 1, 1, 1, 7], np.float32)
    payload = compiled(TOP).compress(jnp.asarray(x))
    assert payload.values.dtype == jnp.bfloat16
    assert payload.indices.dtype == np.uint16
    # The second block has one entry and leaves three slots unused.
    np.testing.assert_array_equal(payload.indices, [[1, 5, 6, 9], [0, 16, 16, 16]])
    values = payload.values.astype(jnp.float32)
    np.testing.assert_array_equal(values, [[-8, 4, -6, 5], [7, 0, 0, 0]])


def test_unused_slots_hold_zero() -> None:
    x = np.array([0] * 15 + [5], np.float32)
    payload = compiled(TOP).compress(jnp.asarray(x))
    np.testing.assert_array_equal(payload.indices, [[15, 16, 16, 16]])
    np.testing.assert_array_equal(payload.values.astype(jnp.float32), [[5, 0, 0, 0]])


def test_ties_go_to_the_lower_index() -> None:
    x = np.array([1, -1] * 8, np.float32)
    np.testing.assert_array_equal(sent(TOP, x), np.where(np.arange(16) < 4, x, 0))


def test_zeros_are_never_sent() -> None:
    x = np.array([0.0, -0.0, -3.0] + [-0.0] * 13, np.float32)
    np.testing.assert_array_equal(sent(TOP, x), np.where(x == -3, x, 0))


def test_kept_values_are_rounded_and_stay_finite() -> None:
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, -3.4e38, 1e-3] + [0] * 12, np.float32)
    # Half to even: down, then up; the third would round to infinity.
    known = [1, 1 + 2**-6, -float(jnp.finfo(jnp.bfloat16).max)]
    received = sent(TOP, x)
    np.testing.assert_array_equal(received[:3], known)
    np.testing.assert_allclose(received[3], 1e-3, rtol=2**-8)


def test_density_one_keeps_everything() -> None:
    x = np.arange(-8, 8, dtype=np.float32)
    np.testing.assert_array_equal(sent(compression.top_k(1.0, 16), x), x)


def test_the_cost_is_four_bytes_an_entry_kept() -> None:
    assert compression.top_k(0.01).payload_bytes(2048) == 4 * 20
    assert compression.top_k(1e-6).payload_bytes(2049) == 2 * 4


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5, float("nan")])
def test_a_density_out_of_range_is_refused(density: float) -> None:
    with pytest.raises(ValueError, match=rf"`density` must lie in .* got {density}"):
        compression.top_k(density)


@pytest.mark.parametrize("block_size", [0, 4, 2**16])
def test_a_block_wider_than_an_index_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=rf"`block_size` must .* got {block_size}\."):
        compression.top_k(0.1, block_size)
    assert compression.top_k(0.1, 2**16 - 8).block_size == 65_528
