"""Signs of the largest entries: the three formats, their sizes, what is never sent."""

from collections.abc import Callable
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfpo_jax import compression
from sfpo_jax.compression._sparse_sign import smallest_format
from sfpo_jax.compression._support import slots
from tests.compression.harness import sent

DENSITIES = (0.001, 0.01, 0.03, 0.05, 0.1, 0.15, 0.18, 0.2, 0.3, 0.5, 0.6, 0.75, 0.99)

# One of each format, and blocks whose width no power of two divides.
CODES = {
    "sub-block": (0.1, 1000),
    "sub-block, one entry": (0.01, 64),
    "bitmap": (0.3, 72),
    "dense": (0.75, 64),
}
each_code = pytest.mark.parametrize("name", CODES)


@cache
def round_trip(name: str) -> Callable[[np.ndarray, np.ndarray], tuple[jax.Array, ...]]:
    density, width = CODES[name]
    code = smallest_format(density, width)
    assert code.name.startswith(name.split(",")[0])

    @jax.jit
    def there_and_back(chosen: jax.Array, negative: jax.Array) -> tuple[jax.Array, ...]:
        packed = code.encode(chosen, negative)
        assert packed.dtype == jnp.uint8
        assert packed.shape == (chosen.shape[0], code.row_bytes)
        return code.decode(packed)

    return there_and_back


def assert_survives(name: str, chosen: np.ndarray, negative: np.ndarray) -> None:
    found, minus = map(np.asarray, round_trip(name)(chosen, negative))
    np.testing.assert_array_equal(found, chosen)
    np.testing.assert_array_equal(minus & found, negative & chosen)


@each_code
def test_supports_of_every_shape_survive(name: str) -> None:
    density, width = CODES[name]
    count = slots(density, width)
    places = [
        [],
        [0],
        [width - 1],
        range(count),
        range(width - count, width),
        range((width - count) // 2, (width + count) // 2 - 1),
        [*range(count // 2), *range(width - count + count // 2, width)],
        np.linspace(0, width - 1, count).astype(int),
    ]
    chosen = np.zeros((len(places), width), bool)
    for row, place in zip(chosen, places, strict=True):
        row[np.asarray(place, int)] = True
    for negative in (chosen, ~chosen, np.arange(chosen.size).reshape(chosen.shape) % 2):
        assert_survives(name, chosen, negative > 0)


@each_code
@given(st.data())
def test_any_support_survives(name: str, data: st.DataObject) -> None:
    density, width = CODES[name]
    count = slots(density, width)
    chosen = np.zeros((8, width), bool)
    places = st.sets(st.integers(0, width - 1), max_size=count)
    chosen[0, list(data.draw(places))] = True
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    for row in chosen[1:]:
        row[rng.choice(width, rng.integers(count + 1), replace=False)] = True
    assert_survives(name, chosen, rng.random(chosen.shape) < 0.5)


def table_bits(count: int, width: int) -> dict[str, float]:
    """Bits of a block in each format, by the table of the module."""
    sub_blocks = [
        count * low + (count + width / 2**low) + count for low in range(1, 12)
    ]
    return {
        "sub-block": min(sub_blocks),
        "bitmap": width + count,
        "dense": 1.6 * width,
    }


@pytest.mark.parametrize("width", [8, 64, 104, 2048])
@pytest.mark.parametrize("density", DENSITIES)
def test_the_smallest_format_is_chosen(density: float, width: int) -> None:
    code = smallest_format(density, width)
    bits = table_bits(slots(density, width), width)
    # Up to three parts are filled to whole bytes.
    assert min(bits.values()) <= 8 * code.row_bytes <= min(bits.values()) + 24
    assert bits[code.name.split(" of ")[0]] <= min(bits.values()) + 24
    block = compression.sparse_sign(density, width)
    assert block.payload_bytes(width) == code.row_bytes + 4


@pytest.mark.parametrize(
    ("density", "name", "bits"),
    [
        (0.01, "sub-block", 0.12),
        (0.1, "sub-block", 0.66),
        (0.15, "sub-block", 0.88),
        (0.3, "bitmap", 1.33),
        (0.5, "bitmap", 1.53),
        (0.75, "dense", 1.63),
    ],
)
def test_the_cost_with_the_scale(density: float, name: str, bits: float) -> None:
    assert smallest_format(density, 2048).name.startswith(name)
    compressor = compression.sparse_sign(density)
    assert 8 * compressor.payload_bytes(2**20) / 2**20 <= bits
    # Under 18 % it is cheaper than a sign for every entry.
    dense = compression.sign().payload_bytes(2**20)
    assert (compressor.payload_bytes(2**20) < dense) == (density < 0.18)


SMALL = compression.sparse_sign(0.25, block_size=16)


def test_the_support_has_the_mean_of_itself() -> None:
    x = np.array([1, -8, 2, 3, 1, 4, -6, 0, 0, 5, 1, 1, 1, 1, 1, 1], np.float32)
    expected = np.zeros(16)
    expected[[1, 5, 6, 9]] = [-5.75, 5.75, -5.75, 5.75]
    np.testing.assert_array_equal(sent(SMALL, x), expected)


def test_ties_go_to_the_lower_index() -> None:
    x = np.array([1, -1] * 8, np.float32)
    np.testing.assert_array_equal(sent(SMALL, x), np.where(np.arange(16) < 4, x, 0))


def test_zeros_are_never_sent() -> None:
    x = np.array([0.0, -0.0, -3.0, 0.0, -0.0] + [0.0] * 11, np.float32)
    np.testing.assert_array_equal(sent(SMALL, x), np.where(x == -3, x, 0))


def test_a_short_block_has_a_density_of_its_own() -> None:
    x = np.arange(1, 17 + 9, dtype=np.float32)
    # round(0.25 * 9) = 2 of the last nine.
    np.testing.assert_array_equal(np.flatnonzero(sent(SMALL, x)[16:]), [7, 8])
    # A block of one sends it, whatever the density.
    assert sent(SMALL, x[:1]) == x[:1]


def test_all_entries_are_plain_signs() -> None:
    assert compression.sparse_sign(1.0, 64).name == compression.sign(64).name


@pytest.mark.parametrize("density", [0.0, -0.1, 1.5, float("nan")])
def test_a_density_out_of_range_is_refused(density: float) -> None:
    with pytest.raises(ValueError, match=rf"`density` must lie in .* got {density}"):
        compression.sparse_sign(density)


@pytest.mark.parametrize("block_size", [0, 4, -8])
def test_a_bad_block_size_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=rf"`block_size` must .* got {block_size}\."):
        compression.sparse_sign(0.1, block_size)
