"""All compressors against one list of promises; a new one is a row of the table."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sfpo_jax import compression
from sfpo_jax.compression import Compressor
from tests.compression import oracles
from tests.compression.harness import compiled
from tests.compression.oracles import Block


class Row(NamedTuple):
    """A compressor and what a receiver is told of one of its blocks."""

    compressor: Compressor
    known: Block


TABLE = [
    Row(compression.sign(), oracles.signs()),
    # Densities at which each of the three formats is the smallest.
    Row(compression.sparse_sign(0.1), oracles.signs(0.1)),
    Row(compression.sparse_sign(0.3), oracles.signs(0.3)),
    Row(compression.sparse_sign(0.75), oracles.signs(0.75)),
    Row(compression.top_k(0.01), oracles.top_k(0.01)),
    Row(compression.int8(), oracles.int8),
    Row(compression.bfloat16(), oracles.bfloat16),
    Row(compression.identity(), oracles.identity),
]
SIZES = (0, 1, 7, 8, 9, 1023, 2048, 2049, 5000)
each_row = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.compressor.name)


def odd_numerators(n: int, rng: np.random.Generator) -> np.ndarray:
    """Odd 1024ths: sums are exact in float32, magnitudes tie, no 127th is a half."""
    return (2 * rng.integers(-512, 512, n) + 1) / 1024


ARRAYS: Mapping[str, Callable[[int, np.random.Generator], np.ndarray]] = {
    "odd numerators": odd_numerators,
    "normal": lambda n, rng: rng.standard_normal(n),
    "heavy-tailed": lambda n, rng: np.exp(5 * rng.standard_normal(n)),
    "zero": lambda n, rng: np.zeros(n),
    "zeros of both signs": lambda n, rng: rng.choice([0.0, -0.0], n),
    "equal": lambda n, rng: np.full(n, -3.0),
    "one entry": lambda n, rng: np.where(np.arange(n) == n // 2, -7.0, 0.0),
    "90 % zero": lambda n, rng: odd_numerators(n, rng) * (rng.random(n) < 0.1),
    "a zero block": lambda n, rng: odd_numerators(n, rng) * (np.arange(n) // 2048 != 1),
    "subnormal": lambda n, rng: rng.integers(-(2**23) + 1, 2**23, n) * 2.0**-149,
    "huge": lambda n, rng: odd_numerators(n, rng) * 2.0**113,
}
each_array = pytest.mark.parametrize("kind", ARRAYS)


class Sent(NamedTuple):
    """An array, its payload, and what the receiver makes of it."""

    x: np.ndarray
    payload: Any
    received: np.ndarray


@cache
def send(compressor: Compressor, kind: str) -> list[Sent]:
    rng = np.random.default_rng(0)
    codec = compiled(compressor)
    sent = []
    for n in SIZES:
        x = ARRAYS[kind](n, rng).astype(np.float32)
        payload = codec.compress(jnp.asarray(x))
        received = np.asarray(codec.decompress(payload, n))
        sent.append(Sent(x, payload, received))
    return sent


def blocks(x: np.ndarray, compressor: Compressor) -> list[np.ndarray]:
    size = compressor.block_size
    return [x[i : i + size] for i in range(0, x.size, size)]


@each_row
def test_payload_bytes_are_the_real_bytes(row: Row) -> None:
    for sent in send(row.compressor, "normal"):
        real = sum(leaf.nbytes for leaf in jax.tree.leaves(sent.payload))
        assert row.compressor.payload_bytes(sent.x.size) == real
    # Large ones by shape alone.
    for n in (100_003, 1_000_000):
        shapes = jax.eval_shape(row.compressor.compress, jnp.zeros(n))
        real = sum(s.size * s.dtype.itemsize for s in jax.tree.leaves(shapes))
        assert row.compressor.payload_bytes(n) == real


@each_row
def test_every_leaf_is_led_by_the_block_axis(row: Row) -> None:
    for x, payload, _ in send(row.compressor, "normal"):
        count = -(-x.size // row.compressor.block_size)
        assert {leaf.shape[0] for leaf in jax.tree.leaves(payload)} == {count}


@each_row
def test_types_do_not_depend_on_the_size(row: Row) -> None:
    def types(sent: Sent) -> Any:
        return jax.tree.map(lambda leaf: leaf.dtype, sent.payload)

    every = send(row.compressor, "normal")
    assert all(types(sent) == types(every[0]) for sent in every)
    assert {sent.received.dtype for sent in every} == {np.dtype(np.float32)}
    assert [sent.received.shape for sent in every] == [(n,) for n in SIZES]


@each_row
@pytest.mark.parametrize("kind", ["odd numerators", "90 % zero", "one entry", "huge"])
def test_padding_enters_no_scale(row: Row, kind: str) -> None:
    known = oracles.by_block(row.compressor.block_size, row.known)
    for x, _, received in send(row.compressor, kind):
        # Sums are exact here: what is left is a division, and a product by the scale.
        np.testing.assert_allclose(received, known(x), rtol=2**-22, atol=0)


@each_row
@each_array
def test_residual_and_message_make_the_whole(row: Row, kind: str) -> None:
    for x, _, received in send(row.compressor, kind):
        whole = received + (x - received)
        for part, was in zip(
            blocks(whole, row.compressor), blocks(x, row.compressor), strict=True
        ):
            two_ulp = 2 * np.spacing(np.max(np.abs(was)))
            assert np.max(np.abs(part - was)) <= two_ulp


@each_row
@each_array
def test_the_residual_is_smaller_than_the_block(row: Row, kind: str) -> None:
    for x, _, received in send(row.compressor, kind):
        for was, got in zip(
            blocks(x.astype(np.float64), row.compressor),
            blocks(received.astype(np.float64), row.compressor),
            strict=True,
        ):
            # A block under the smallest normal number may be sent as zero.
            is_sent = np.max(np.abs(was)) >= 2.0**-126
            before, after = np.sum(was**2), np.sum((was - got) ** 2)
            assert after < before if is_sent else after <= before


@each_row
def test_zero_comes_back_as_zero(row: Row) -> None:
    for kind in ("zero", "zeros of both signs"):
        for sent in send(row.compressor, kind):
            assert not sent.received.any()
    zero = slice(2048, 4096)
    received = send(row.compressor, "a zero block")[-1].received
    assert not received[zero].any()
    assert received[:2048].any()
    assert received[4096:].any()


entries = st.floats(-(2.0**100), 2.0**100, width=32)


@each_row
@settings(max_examples=25)
@given(
    hnp.arrays(np.float32, (4, 64), elements=entries, fill=entries),
    hnp.arrays(np.bool_, (4, 64)),
    st.sampled_from([1.0, -(2.0**127), np.inf, np.nan]),
)
def test_dead_entries_are_not_there(
    row: Row, rows: np.ndarray, live: np.ndarray, junk: float
) -> None:
    codec, alive = compiled(row.compressor), jnp.asarray(live)
    payload = codec.encode(jnp.where(alive, rows, 0), alive)
    received = np.asarray(codec.decode(payload, alive))
    assert not received[~live].any()
    # Whatever stands in their places, the others' bits are the same.
    other = codec.encode(jnp.where(alive, rows, np.float32(junk)), alive)
    np.testing.assert_array_equal(codec.decode(other, alive), received)
    # A payload cut between blocks is decoded piecewise.
    for part in (slice(0, 1), slice(1, 4)):
        cut = jax.tree.map(lambda leaf, part=part: leaf[part], payload)
        np.testing.assert_array_equal(codec.decode(cut, alive[part]), received[part])
    was = np.where(live, rows, 0).astype(np.float64)
    before, after = np.sum(was**2, 1), np.sum((was - received) ** 2, 1)
    assert (after <= before).all()


@each_row
def test_only_flat_arrays_are_taken(row: Row) -> None:
    with pytest.raises(ValueError, match=r"`x` must have one axis, got shape \(2, 3\)"):
        row.compressor.compress(jnp.zeros((2, 3)))


@each_row
def test_the_name_is_one_of_its_own(row: Row) -> None:
    assert [r.compressor.name for r in TABLE].count(row.compressor.name) == 1


@each_row
@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16, np.float64])
def test_other_precisions_are_taken(row: Row, dtype: Any) -> None:
    with jax.enable_x64(dtype is np.float64):
        x = jax.ShapeDtypeStruct((5000,), dtype)
        payload = jax.eval_shape(row.compressor.compress, x)
        received = jax.eval_shape(lambda p: row.compressor.decompress(p, 5000), payload)
    assert received.shape == x.shape
    assert jnp.issubdtype(received.dtype, jnp.floating)
