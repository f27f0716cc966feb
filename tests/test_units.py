"""Units: what is read, what is refused and how, and that writing and reading agree."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sfpo_jax.units import (
    UnitError,
    format_bandwidth,
    format_bytes,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
)

PARSERS = {"bytes": parse_bytes, "bandwidth": parse_bandwidth, "time": parse_duration}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0B", 0),
        ("1B", 1),
        ("40GB", 40_000_000_000),
        (" 40 GB ", 40_000_000_000),
        ("1.5MB", 1_500_000),
        ("2e3KB", 2_000_000),
        ("+1TB", 10**12),
        (".5KiB", 512),
        ("1MiB", 2**20),
        ("80GiB", 80 * 2**30),
        ("2TiB", 2 * 2**40),
        # Exact where a float64 product is not: 0.1 + 0.2 style digits.
        ("0.3GB", 300_000_000),
        ("1.1KB", 1100),
        # Rounded to whole bytes.
        ("1.1KiB", 1126),
    ],
)
def test_bytes_are_read(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50GB/s", 50e9),
        ("1KiB/s", 1024.0),
        ("100Mbit/s", 12.5e6),
        ("100Gb/s", 12.5e9),
        ("100Gbit/s", 12.5e9),
        ("8bit/s", 1.0),
        ("8b/s", 1.0),
        ("0GB/s", 0.0),
    ],
)
def test_bandwidths_are_read(text: str, expected: float) -> None:
    assert parse_bandwidth(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("10s", 10.0),
        ("250ms", 0.25),
        ("5us", 5e-6),
        ("1ns", 1e-9),
        ("3min", 180.0),
        ("1.5h", 5400.0),
        ("2d", 172_800.0),
    ],
)
def test_durations_are_read(text: str, expected: float) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize(
    ("kind", "text", "nearest"),
    [
        ("bytes", "40Gb", "GB"),
        ("bytes", "40gb", "GB"),
        ("bytes", "40G", "GB"),
        ("bytes", "40kB", "KB"),
        ("bytes", "40 gib", "GiB"),
        ("bytes", "40 bytes", "B"),
        ("bandwidth", "50GB", "GB/s"),
        ("bandwidth", "50GBps", "GB/s"),
        ("bandwidth", "50Gbps", "Gb/s"),
        ("bandwidth", "50 mbit/s", "Mbit/s"),
        ("time", "5 sec", "s"),
        ("time", "5 hours", "h"),
        ("time", "5 minutes", "min"),
        ("time", "5 µs", "us"),
    ],
)
def test_an_unknown_unit_names_the_nearest(kind: str, text: str, nearest: str) -> None:
    with pytest.raises(UnitError) as error:
        PARSERS[kind](text, name="quantity")
    assert f"did you mean '{nearest}'?" in str(error.value)
    assert "`quantity`" in str(error.value)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("kind", PARSERS)
@pytest.mark.parametrize(
    ("value", "fact"),
    [
        ("40", "has no unit"),
        (40, "has no unit"),
        (0, "has no unit"),
        (4e9, "has no unit"),
        ("", "is not a quantity"),
        ("GB", "is not a quantity"),
        ("nanGB", "is not a quantity"),
        ("infGB", "is not a quantity"),
        ("1_000GB", "unknown unit"),
        ("1e999GB", "unknown unit"),
        ("1,5GB", "unknown unit"),
        (float("nan"), "is not a quantity"),
        (True, "must be text"),
        (None, "must be text"),
        ([1], "must be text"),
    ],
)
def test_what_cannot_be_read_is_refused(kind: str, value: object, fact: str) -> None:
    with pytest.raises(UnitError, match=fact) as error:
        PARSERS[kind](value, name="quantity")
    message = str(error.value)
    assert "\n" not in message
    assert "`quantity`" in message
    assert repr(value) in message
    assert "for example" in message or "did you mean" in message


@pytest.mark.parametrize(
    ("parse", "unit"), [(parse_bytes, "GB"), (parse_bandwidth, "GB/s")]
)
def test_negative_and_endless_quantities_are_refused(
    parse: Callable[[object], float], unit: str
) -> None:
    with pytest.raises(UnitError, match="must not be negative"):
        parse(f"-1{unit}")
    with pytest.raises(UnitError, match="is too large"):
        parse("9" * 400 + unit)


def test_a_unit_error_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        parse_bytes("40")


@given(st.integers(0, 2**70))
def test_whole_bytes_survive(amount: int) -> None:
    assert parse_bytes(f"{amount}B") == amount
    assert parse_bytes(f"{amount}KiB") == amount * 1024


@given(st.integers(0, 10**18), st.integers(1, 12))
def test_formatted_bytes_are_read_back(amount: int, digits: int) -> None:
    text = format_bytes(amount, digits=digits)
    # Half a unit of the last digit, and half a byte from the rounding when reading.
    slack = amount * 0.5 * 10.0 ** (1 - digits) + 0.5
    assert abs(parse_bytes(text) - amount) <= slack
    assert format_bytes(parse_bytes(text), digits=digits) == text


@given(st.floats(0, 1e18, allow_subnormal=False))
def test_formatted_bandwidths_are_read_back(amount: float) -> None:
    read = parse_bandwidth(format_bandwidth(amount, digits=17))
    assert read == pytest.approx(amount, rel=1e-15, abs=0)


@given(st.integers(1, 10**6), st.sampled_from(["K", "M", "G", "T"]))
def test_bits_are_an_eighth_of_bytes(number: int, prefix: str) -> None:
    in_bytes = parse_bandwidth(f"{number}{prefix}B/s")
    assert parse_bandwidth(f"{number}{prefix}bit/s") * 8 == in_bytes
    assert parse_bandwidth(f"{number}{prefix}b/s") * 8 == in_bytes


@pytest.mark.parametrize(
    ("amount", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 KB"),
        (999_960, "1 MB"),
        (40e9, "40 GB"),
        (6.45e9, "6.45 GB"),
        (3e16, "30000 TB"),
    ],
)
def test_bytes_are_written(amount: float, text: str) -> None:
    assert format_bytes(amount) == text


@pytest.mark.parametrize("amount", [-1.0, float("inf"), float("nan")])
def test_what_is_no_amount_is_not_written(amount: float) -> None:
    with pytest.raises(ValueError, match="`amount` must be finite"):
        format_bytes(amount)
