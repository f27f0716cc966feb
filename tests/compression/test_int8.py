"""Eight bits an entry: the unit of a block, rounding, the smallest blocks."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sfpo_jax import compression
from tests.compression.harness import compiled, sent

INT8 = compression.int8(block_size=16)
# Below it the reciprocal of the unit, or the unit itself, is no normal number.
SMALLEST_UNIT = 4 * float(np.finfo(np.float32).smallest_normal)

magnitudes = st.one_of(
    st.floats(-1, 1, width=32),
    st.floats(-float(np.finfo(np.float32).max), float(np.finfo(np.float32).max)),
    st.integers(-127, 127).map(float),
)


def test_the_wire_holds_whole_units() -> None:
    x = np.array([127, -126, 0.4, -0.6, 2.5, 3.5, -0.0] + [0] * 9 + [-254], np.float32)
    payload = compiled(INT8).compress(jnp.asarray(x))
    assert payload.values.dtype == np.int8
    np.testing.assert_array_equal(payload.scales, [1, 2])
    # Halves go to the even unit.
    np.testing.assert_array_equal(payload.values[0, :7], [127, -126, 0, -1, 2, 4, 0])
    assert payload.values[1, 0] == -127
    assert not payload.values[1, 1:].any()


@given(hnp.arrays(np.float32, 16, elements=magnitudes.map(np.float32)))
def test_no_entry_is_off_by_more_than_half_a_unit(x: np.ndarray) -> None:
    unit = np.max(np.abs(x)).astype(np.float64) / 127
    error = np.abs(sent(INT8, x) - x.astype(np.float64))
    if unit < 0.99 * SMALLEST_UNIT:
        np.testing.assert_array_equal(error, np.abs(x))
    elif unit > 1.01 * SMALLEST_UNIT:
        # The unit and its reciprocal are rounded: 127 times 3 half ulp.
        assert np.max(error) <= unit * (0.5 + 127 * 3 * 2.0**-24)


@pytest.mark.parametrize("factor", [1.0, 2.0**-20, 2.0**-126, 2.0**-149])
def test_blocks_too_small_for_a_unit_are_zero(factor: float) -> None:
    x = np.linspace(-1, 1, 16).astype(np.float32) * np.float32(127 * SMALLEST_UNIT)
    received = sent(INT8, x * np.float32(factor))
    assert np.isfinite(received).all()
    assert received.any() == (factor == 1.0)


def test_the_cost_is_a_byte_and_the_scales() -> None:
    assert INT8.payload_bytes(16) == 16 + 4
    assert INT8.payload_bytes(17) == 2 * (16 + 4)
    # A single short block is sent as it is.
    assert INT8.payload_bytes(3) == 3 + 4
    assert compression.int8().payload_bytes(2**20) == 2**20 + 4 * 2**12


@pytest.mark.parametrize("block_size", [0, -1, 2**24 + 1])
def test_a_bad_block_size_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=rf"`block_size` must .* got {block_size}\."):
        compression.int8(block_size)
