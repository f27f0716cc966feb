"""Quantities with units, read and written: bytes, bandwidths, durations.

GB is 1e9 bytes and GiB is 2**30, as on a data sheet; a capital B is a byte, a small b a
bit. A number without a unit is refused, since 40 of what would have to be guessed, and
so is a unit in another spelling ("Gb" for "GB" is a factor of eight).
"""

import difflib
import math
import re
from decimal import Decimal

_NUMBER = re.compile(r"\s*([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,2})?)\s*(.*?)\s*")

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}

_BYTES = {f"{p}B": Decimal(f) for p, f in (_DECIMAL | _BINARY).items()}
_BANDWIDTHS = {f"{unit}/s": size for unit, size in _BYTES.items()} | {
    f"{p}{bit}/s": Decimal(f) / 8 for p, f in _DECIMAL.items() for bit in ("bit", "b")
}
_DURATIONS = {
    "ns": Decimal("1e-9"),
    "us": Decimal("1e-6"),
    "ms": Decimal("1e-3"),
    "s": Decimal(1),
    "min": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}

# The micro sign and the Greek letter that looks like it.
_MICRO = {0xB5: "u", 0x3BC: "u"}


class UnitError(ValueError):
    """A quantity that cannot be read; the message names the value and the remedy."""


def _nearest(unit: str, units: dict[str, Decimal]) -> str | None:
    """The known unit that `unit` most likely means, None when none is like it."""
    # "Gbps" and "GBps" are how people say it; the letter after G keeps its meaning.
    if unit.endswith("ps") and f"{unit[:-2]}/s" in units:
        return f"{unit[:-2]}/s"
    wanted = unit.lower().translate(_MICRO)
    by_letters: dict[str, str] = {}
    for known in units:
        by_letters.setdefault(known.lower(), known)
    # "hours" is h and "GBytes" is GB, though other units share more letters with them.
    starts = [known for known in by_letters if wanted.startswith(known)]
    close = difflib.get_close_matches(wanted, by_letters, n=1, cutoff=0.4)
    best = max(starts, key=len, default=close[0] if close else None)
    return by_letters[best] if best else None


def _parse(
    value: object, units: dict[str, Decimal], name: str, kind: str, example: str
) -> Decimal:
    """Reads `value`; every message is one line with the name, value and remedy."""
    remedy = f"write {kind} with its unit, for example '{example}'"
    if not isinstance(value, (str, int, float)) or isinstance(value, bool):
        raise UnitError(f"`{name}` must be text, got {value!r}: {remedy}.")
    match = _NUMBER.fullmatch(str(value))
    if match is None:
        raise UnitError(f"`{name}` is not a quantity, got {value!r}: {remedy}.")
    number, unit = match.groups()
    if not unit:
        raise UnitError(f"`{name}` has no unit, got {value!r}: {remedy}.")
    if unit not in units:
        nearest = _nearest(unit, units)
        known = f"did you mean '{nearest}'?" if nearest else f"{remedy}."
        raise UnitError(
            f"`{name}` has the unknown unit '{unit}', got {value!r}: {known}"
        )
    result = Decimal(number) * units[unit]
    if result < 0:
        raise UnitError(f"`{name}` must not be negative, got {value!r}: {remedy}.")
    if math.isinf(float(result)):
        raise UnitError(f"`{name}` is too large, got {value!r}: {remedy}.")
    return result


def parse_bytes(value: object, *, name: str = "value") -> int:
    """Reads a size.

    Args:
      value: text, a number and one of B, KB, MB, GB, TB (powers of 1000), KiB, MiB,
        GiB, TiB (powers of 1024); space between them is allowed.
      name: the argument's name, for the error.

    Returns:
      Whole bytes, rounded to the nearest.

    Raises:
      UnitError: no unit, an unknown unit (the nearest known one is suggested), a
        negative number, or no number at all. Bits are no size: "40Gb" is refused.

    Example:
      >>> parse_bytes("40GB"), parse_bytes("1.5 KiB")
      (40000000000, 1536)
      >>> parse_bytes("40", name="budget")
      Traceback (most recent call last):
      ...
      sfpo_jax.units.UnitError: `budget` has no unit, got '40':
      write a size with its unit, for example '40GB'.
    """
    return round(_parse(value, _BYTES, name, "a size", "40GB"))


def parse_bandwidth(value: object, *, name: str = "value") -> float:
    """Reads a bandwidth.

    Args:
      value: text, a number and a unit of bytes per second (B/s, KB/s, MB/s, GB/s, TB/s,
        KiB/s, ...) or of bits per second (bit/s, Kbit/s, Mbit/s, Gbit/s, Tbit/s, or the
        same with a small b: Gb/s).
      name: the argument's name, for the error.

    Returns:
      Bytes per second.

    Raises:
      UnitError: as in `parse_bytes`.

    Example:
      >>> parse_bandwidth("50GB/s"), parse_bandwidth("100Gb/s")
      (50000000000.0, 12500000000.0)
      >>> parse_bandwidth("50GBps")
      Traceback (most recent call last):
      ...
      sfpo_jax.units.UnitError: `value` has the unknown unit 'GBps', got '50GBps':
      did you mean 'GB/s'?
    """
    return float(_parse(value, _BANDWIDTHS, name, "a bandwidth", "50GB/s"))


def parse_duration(value: object, *, name: str = "value") -> float:
    """Reads a duration.

    Args:
      value: text, a number and one of ns, us, ms, s, min, h, d.
      name: the argument's name, for the error.

    Returns:
      Seconds.

    Raises:
      UnitError: as in `parse_bytes`.

    Example:
      >>> parse_duration("250ms"), parse_duration("1.5 h")
      (0.25, 5400.0)
    """
    return float(_parse(value, _DURATIONS, name, "a duration", "10s"))


def _format(amount: float, suffix: str, digits: int) -> str:
    """`amount` with the largest decimal prefix that leaves at least one whole unit."""
    if not 0 <= amount < float("inf"):
        raise ValueError(f"`amount` must be finite and not negative, got {amount!r}.")
    # Rounded first, so that 999,999 is 1 MB and not 1000 KB.
    rounded = Decimal(f"{amount:.{digits - 1}e}")
    prefix = max(
        (p for p, factor in _DECIMAL.items() if rounded >= factor),
        key=_DECIMAL.__getitem__,
        default="",
    )
    scaled = (rounded / _DECIMAL[prefix]).normalize()
    return f"{scaled:f} {prefix}{suffix}"


def format_bytes(amount: float, *, digits: int = 4) -> str:
    """Writes bytes so that `parse_bytes` reads them back, to `digits` digits.

    Args:
      amount: bytes, finite and not negative.
      digits: significant digits, at least 1.

    Raises:
      ValueError: `amount` is negative or not finite.

    Example:
      >>> format_bytes(40e9), format_bytes(1536), format_bytes(0)
      ('40 GB', '1.536 KB', '0 B')
    """
    return _format(amount, "B", digits)


def format_bandwidth(amount: float, *, digits: int = 4) -> str:
    """Writes bytes per second so that `parse_bandwidth` reads them back.

    Args:
      amount: bytes per second, finite and not negative.
      digits: significant digits, at least 1.

    Raises:
      ValueError: `amount` is negative or not finite.

    Example:
      >>> format_bandwidth(12.5e9)
      '12.5 GB/s'
    """
    return _format(amount, "B/s", digits)
