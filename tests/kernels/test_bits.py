"""Booleans to bytes: the order of bits, the filling of the last byte, the way back."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfpo_jax.kernels import pack_bits, packed_size, unpack_bits

SHAPES = [(0,), (1,), (7,), (8,), (9,), (3, 64), (2, 3, 17), (0, 5), (4, 0)]

pack = jax.jit(pack_bits)
unpack = jax.jit(unpack_bits, static_argnums=1)


@pytest.mark.parametrize(
    ("bits", "size"),
    [(0, 0), (1, 1), (7, 1), (8, 1), (9, 2), (64, 8), (65, 9), (2**33 + 1, 2**30 + 1)],
)
def test_a_byte_holds_eight(bits: int, size: int) -> None:
    assert packed_size(bits) == size


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packing_is_numpys_little_endian(shape: tuple[int, ...]) -> None:
    flags = np.random.default_rng(0).random(shape) < 0.5
    packed = pack(flags)
    assert packed.dtype == np.uint8
    np.testing.assert_array_equal(packed, np.packbits(flags, -1, bitorder="little"))
    found = unpack(packed, shape[-1])
    assert found.dtype == np.bool_
    np.testing.assert_array_equal(found, flags)


@given(st.data(), st.sampled_from([1, 8, 13]))
def test_bits_survive(data: st.DataObject, count: int) -> None:
    words = data.draw(st.lists(st.integers(0, 2**count - 1), min_size=4, max_size=4))
    flags = np.array([[w >> i & 1 for i in range(count)] for w in words], bool)
    packed = np.asarray(pack(flags))
    # Read as one little-endian number, a row is the number it was made from.
    assert [int.from_bytes(row.tobytes(), "little") for row in packed] == words
    np.testing.assert_array_equal(unpack(packed, count), flags)


def test_bits_beyond_the_count_are_not_read() -> None:
    np.testing.assert_array_equal(unpack(np.array([[0xFF]], np.uint8), 3), [[True] * 3])
