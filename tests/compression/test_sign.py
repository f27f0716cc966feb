"""One bit an entry: which bit, which scale, what stands on the wire."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sfpo_jax import compression
from tests.compression.harness import compiled, sent

SIGN = compression.sign(block_size=16)
TINY = np.finfo(np.float32).smallest_subnormal

entries = st.floats(-(2.0**60), 2.0**60, width=32)


def test_the_wire_holds_sign_bits_and_scales() -> None:
    x = np.array([1, -2, 3, -4, 5, -6, 7, 8, -9] + [0] * 7 + [-5, 1], np.float32)
    payload = compiled(SIGN).compress(jnp.asarray(x))
    # The second block has two entries; its scale is their mean, not that of sixteen.
    np.testing.assert_array_equal(payload.scales, [45 / 16, 3])
    np.testing.assert_array_equal(payload.signs, [[0b00101010, 1], [1, 0]])
    assert payload.signs.dtype == np.uint8
    assert payload.scales.dtype == np.float32


def test_a_sign_is_the_highest_bit() -> None:
    x = np.array([0.0, -0.0, TINY, -TINY, 1.0, -1.0, 0.0, 8.0], np.float32)
    negative = np.array([0, 1, 0, 1, 0, 1, 0, 0], bool)
    scale = np.float32(10 / 8)
    np.testing.assert_array_equal(sent(SIGN, x), np.where(negative, -scale, scale))


@given(hnp.arrays(np.float32, 16, elements=entries), st.floats(0.5, 2.0))
def test_no_other_scale_is_closer(x: np.ndarray, factor: float) -> None:
    message = sent(SIGN, x).astype(np.float64)
    error = np.sum((x - message) ** 2)
    other = np.sum((x - factor * message) ** 2)
    # At the minimum the error is flat: a rounded scale changes it by a rounded square.
    assert error <= other + 2.0**-40 * np.sum(x.astype(np.float64) ** 2)


@given(
    hnp.arrays(np.float32, 16, elements=entries),
    st.sampled_from([0.25, 1.5, 1.9375]),
)
def test_a_relaxed_scale_is_contractive_on_every_block(
    x: np.ndarray, relaxation: float
) -> None:
    relaxed = compression.sign(block_size=16, relaxation=relaxation)
    message = sent(relaxed, x).astype(np.float64)
    plain = sent(SIGN, x).astype(np.float64)
    np.testing.assert_allclose(message, relaxation * plain, rtol=1e-6)
    norm = np.sum(x.astype(np.float64) ** 2)
    gain = relaxation * (2 - relaxation) * np.sum(plain**2)
    left = np.sum((x - message) ** 2)
    assert left <= norm - gain + 2.0**-20 * norm


@pytest.mark.parametrize("relaxation", [0.0, 2.0, -1.0, float("nan")])
def test_a_scale_that_could_diverge_is_refused(relaxation: float) -> None:
    for make in (compression.sign, lambda **k: compression.sparse_sign(0.5, **k)):
        with pytest.raises(ValueError, match=r"`relaxation` must lie in \(0, 2\)"):
            make(relaxation=relaxation)


def test_dead_entries_do_not_count() -> None:
    rows = np.full((4, 16), 4, np.float32)
    live = np.zeros((4, 16), bool)
    live[0, :1] = live[1, 3:6] = live[2] = True
    payload = compiled(SIGN).encode(jnp.asarray(rows), jnp.asarray(live))
    np.testing.assert_array_equal(payload.scales, [4, 4, 4, 0])


@pytest.mark.parametrize("block_size", [-8, 0, 4, 12, 2**24 + 8])
def test_a_bad_block_size_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=rf"`block_size` must .* got {block_size}\."):
        compression.sign(block_size)


def test_the_cost_is_one_bit_and_the_scales() -> None:
    assert compression.sign(2048).payload_bytes(2**20) == 2**17 + 4 * 2**9
    assert compression.sign(8).payload_bytes(9) == 2 * (1 + 4)
    assert compression.sign().payload_bytes(0) == 0
