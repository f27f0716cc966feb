"""Entries in another precision: the rounding of bfloat16, and nothing at all."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sfpo_jax import compression
from tests.compression import oracles
from tests.compression.harness import compiled, sent

BFLOAT16 = compression.bfloat16()
IDENTITY = compression.identity()

# Subnormal numbers may be flushed to zero on the way.
finite = st.floats(width=32, allow_nan=False, allow_infinity=False).filter(
    lambda x: x == 0 or abs(x) >= 2.0**-126
)


@given(hnp.arrays(np.float32, 16, elements=finite))
def test_bfloat16_is_the_nearest(x: np.ndarray) -> None:
    np.testing.assert_array_equal(sent(BFLOAT16, x), oracles.bfloat16(x))


def test_bfloat16_saturates() -> None:
    largest = np.finfo(np.float32).max
    x = np.array([largest, -largest, 3.3895e38, 3.38e38], np.float32)
    received = sent(BFLOAT16, x)
    limit = np.float32(2.0**128 - 2.0**120)
    np.testing.assert_array_equal(received[:3], [limit, -limit, limit])
    assert received[3] < limit


@given(hnp.arrays(np.float32, 16, elements=st.floats(width=32, allow_nan=False)))
def test_identity_keeps_every_bit(x: np.ndarray) -> None:
    np.testing.assert_array_equal(sent(IDENTITY, x).view(np.uint32), x.view(np.uint32))


def test_the_cost_is_the_entries() -> None:
    for n in (0, 1, 1023, 1024):
        assert BFLOAT16.payload_bytes(n) == 2 * n
        assert IDENTITY.payload_bytes(n) == 4 * n
    payload = compiled(BFLOAT16).compress(jnp.ones(3))
    assert payload.values.dtype == jnp.bfloat16
