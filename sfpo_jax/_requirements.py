"""The package's own declared requirements, read without a further dependency."""

import re
from typing import NamedTuple

_NEEDED = re.compile(r"\s*([A-Za-z0-9._-]+)(?:\[[^\]]*\])?(.*)")
_BOUND = re.compile(r"([<>]=?)\s*([0-9][^,\s)]*)")


class Requirement(NamedTuple):
    """One dependency as the package declares it."""

    name: str  # distribution
    bounds: str  # ">=0.10.2,<0.13", empty for any version
    extra: str  # "" when always needed


def parse_requirement(text: str) -> Requirement:
    """Splits a `Requires-Dist` line of the package's metadata.

    Example:
      >>> parse_requirement("jax<0.13,>=0.10.2")
      Requirement(name='jax', bounds='>=0.10.2,<0.13', extra='')
      >>> parse_requirement('pyright[nodejs]>=1.1; extra == "test"')
      Requirement(name='pyright', bounds='>=1.1', extra='test')
    """
    needed, _, condition = text.partition(";")
    match = _NEEDED.match(needed)
    if match is None:
        raise ValueError(f"`text` is no requirement, got {text!r}.")
    # The lower bound first, as people write it.
    bounds = sorted((a + b for a, b in _BOUND.findall(match[2])), reverse=True)
    extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", condition)
    return Requirement(match[1], ",".join(bounds), extra[1] if extra else "")


def satisfies(version: str, bounds: str) -> bool:
    """Whether a version lies within bounds made of >=, >, <= and <.

    A pre-release counts as its release: 0.13.0rc1 is not below 0.13.

    Example:
      >>> satisfies("0.12.0.1", ">=0.10.2,<0.13"), satisfies("0.13.0rc1", "<0.13")
      (True, False)
    """
    mine = _release(version)
    return all(
        _holds(mine, sign, _release(text)) for sign, text in _BOUND.findall(bounds)
    )


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version up to the first letter, without closing zeros."""
    plain = re.split(r"[^0-9.]", version, maxsplit=1)[0]
    return tuple(map(int, re.sub(r"(\.0+)+$", "", plain.strip(".")).split(".")))


def _holds(mine: tuple[int, ...], sign: str, bound: tuple[int, ...]) -> bool:
    if mine == bound:
        return "=" in sign
    return mine > bound if ">" in sign else mine < bound
