"""The cost model: its bytes are those sent, its formula is the one written down."""

import numpy as np
import pytest

from sfpo_jax import compression
from sfpo_jax.collectives import Codec, Link, choose_method, estimate, methods

FREE = Codec(((0, 0.0),))
NAMES = ("dense", "bf16", "int8", "sign", "sparse_sign")


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(
    ("name", "bits"),
    [("dense", 32), ("bf16", 16), ("int8", 8.125), ("sign", 1.015625)],
)
def test_two_passes_of_all_but_a_rank_s_own_part(
    name: str, bits: float, ranks: int
) -> None:
    entries = 1 << 20
    sent = methods()[name].sent_bytes(entries, ranks)
    assert sent == pytest.approx(2 * (ranks - 1) / ranks * bits / 8 * entries)


def test_a_compressor_says_what_its_payload_takes() -> None:
    method = methods(density=0.03, block_size=512)["sparse_sign"]
    payload = compression.sparse_sign(0.03, 512).payload_bytes(10_000)
    assert method.sent_bytes(10_000, 2) == payload


SHAPES = [(1000, 500), (10, 10, 30), (500,), (4, 4)]
LOW_RANK = methods(rank=4, shapes=SHAPES)["low_rank"]


@pytest.mark.parametrize("ranks", [2, 8])
def test_factors_of_low_rank_send_what_the_shapes_say(ranks: int) -> None:
    entries = 500_000 + 3_000 + 500 + 16
    # 4 (1000 + 500) and 4 (100 + 30) numbers; the vector and the small matrix whole.
    sent = 4 * (6000 + 520 + 500 + 16)
    share = 2 * (ranks - 1) / ranks
    assert LOW_RANK.sent_bytes(entries, ranks) == pytest.approx(share * sent)
    assert LOW_RANK.codec(1e9).seconds(10**6) > 0
    # P, Q and the scalar follow one another, each there and back around a ring.
    assert LOW_RANK.messages(ranks) == 3 * 2 * (ranks - 1)


def test_factors_of_low_rank_go_by_all_reduce() -> None:
    link = Link(latency=0.0, bandwidth=2e6, exchange=1e6)
    found = estimate(LOW_RANK, 503_516, 2, link, FREE)
    assert found.network == pytest.approx(LOW_RANK.sent_bytes(503_516, 2) / 2e6)


def test_factors_of_low_rank_of_all_buckets_travel_together() -> None:
    link, among = Link(1e-3, 1e8), {"low_rank": LOW_RANK}
    one, two = (choose_method(x, 2, link, 1e11, among) for x in (9000, [4000, 5000]))
    assert two.estimates == one.estimates


def test_factors_of_low_rank_must_be_asked_for() -> None:
    assert tuple(methods()) == tuple(methods(shapes=SHAPES)) == NAMES
    assert tuple(methods(rank=4, shapes=SHAPES)) == (*NAMES, "low_rank")
    labels = [m.label for m in methods(rank=4, shapes=SHAPES).values()]
    assert labels[0] == "dense" and labels[-1] == "low_rank(4)"
    assert len(set(labels)) == len(labels)
    with pytest.raises(ValueError, match="`shapes` must be given with `rank` 4"):
        methods(rank=4)


def test_masking_is_counted_where_signs_are_masked() -> None:
    plain, masked = methods(), methods(is_masked=True)
    differing = [name for name in NAMES if plain[name].label != masked[name].label]
    assert differing == ["sign"]
    assert masked["sign"].label == plain["sign"].label + ", masked"
    seconds = [x["sign"].codec(1e9).seconds(10**6) for x in (plain, masked)]
    # 28 bytes an entry fused, and 16 of the threshold and the mask.
    assert seconds == pytest.approx([50e-6 + 0.028, 50e-6 + 0.044])


@pytest.mark.parametrize("name", NAMES)
def test_the_formula(name: str) -> None:
    method, ranks, entries = methods()[name], 4, 300_000
    link = Link(latency=3e-4, bandwidth=2e8, exchange=1e8)
    codec = Codec(((0, 0.01), (1_000_000, 0.03)))
    found = estimate(method, entries, ranks, link, codec)
    # A ring passes N - 1 messages each way; arrays of two dtypes travel apart, and one
    # scalar says that all is finite.
    passes = {"dense": 1, "bf16": 2}.get(name, 3)
    rate = 2e8 if name == "dense" else 1e8
    network = 3e-4 * passes * 2 * 3 + method.sent_bytes(entries, ranks) / rate
    assert found.network == pytest.approx(network)
    assert found.codec == pytest.approx(0.01 + 0.3 * 0.02)
    assert found.seconds == found.network + found.codec


def test_a_codec_joins_its_points() -> None:
    codec = Codec(((10, 1.0), (20, 3.0), (40, 4.0)))
    sizes = [10, 15, 20, 30, 40, 80]
    expected = [1.0, 2.0, 3.0, 3.5, 4.0, 6.0]
    np.testing.assert_allclose([codec.seconds(n) for n in sizes], expected)
    # Of two sizes the larger was faster: noise, not a time that falls below zero.
    assert Codec(((10, 3.0), (20, 1.0))).seconds(1000) == 3.0


def test_the_slower_the_link_the_fewer_the_bytes() -> None:
    memory = 2e12
    picks = [
        choose_method(16_000_000, 8, Link(1e-5, bandwidth), memory)
        for bandwidth in (1e12, 25e9, 1.25e9)
    ]
    assert [choice.method for choice in picks] == ["dense", "sign", "sparse_sign"]
    for choice in picks:
        seconds = [x.seconds for x in choice.estimates]
        assert seconds == sorted(seconds)
        assert {x.method for x in choice.estimates} == set(NAMES)


def test_small_buckets_are_dense_where_large_are_not() -> None:
    link, codecs = Link(5e-5, 12.5e9), 2e12
    small, large = (choose_method(n, 2, link, codecs) for n in (10_000, 50_000_000))
    assert (small.method, large.method) == ("dense", "sign")


def test_what_is_sent_for_several_steps_counts_once_for_all() -> None:
    link, codecs = Link(1e-4, 12.5e6), {"sign": Codec(((0, 1e-3),))}
    once, often = (
        choose_method(1_000_000, 2, link, codecs, methods(sync_every=every))
        for every in (1, 8)
    )
    assert often.estimates[0].seconds == pytest.approx(once.estimates[0].seconds / 8)
    # What is exact is sent in each step.
    assert {m.every for m in methods(sync_every=8).values()} == {1, 8}
    assert methods(sync_every=8)["dense"].every == 1


def test_buckets_add_up() -> None:
    link, codecs = Link(1e-3, 1e8), 1e11
    one, two = (choose_method(sizes, 2, link, codecs) for sizes in (1000, [1000, 1000]))
    assert two.entries == (1000, 1000)
    assert two.estimates[0].seconds == pytest.approx(2 * one.estimates[0].seconds)


def test_equals_go_to_the_more_exact() -> None:
    codecs = {name: FREE for name in NAMES}
    assert choose_method(1000, 1, Link(1e-5, 1e9), codecs).method == "dense"


def test_the_reasons_name_all_methods() -> None:
    choice = choose_method(1_000_000, 2, Link(1e-4, 12.5e6), {"dense": FREE})
    assert str(choice) == (
        "dense: 1,000,000 entries over 2 ranks at 12.5 MB/s take 320 ms (network 320 "
        "ms, codec 0 us); "
    ).rstrip("; ")
    text = str(choose_method(1_000_000, 2, Link(1e-4, 12.5e6), 1e11))
    assert all(name in text for name in NAMES) and "\n" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 2, Link(0, 1), 1e9), "`entries` must be at least 1, got 0"),
        (([], 2, Link(0, 1), 1e9), "`entries`"),
        ((1, 0, Link(0, 1), 1e9), "`ranks` must be at least 1, got 0"),
        ((1, 2, Link(0, 1), {}), "`codecs` has none of the methods"),
    ],
)
def test_what_cannot_be_chosen_from(arguments: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        choose_method(*arguments)
