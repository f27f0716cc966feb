"""State that comes back in a wider dtype than it went in with."""

import jax
import jax.numpy as jnp

from sfpo_jax.auditing._leaves import Pair
from sfpo_jax.auditing._program import Audited, name_some
from sfpo_jax.auditing._report import Finding

_BYTES = ("int8", "uint8")  # what moments of one byte are kept in


def find_growth(audited: Audited) -> list[Finding]:
    """One finding for each line that widens, whatever its size.

    Even a scalar that grows makes the next step another program, compiled anew.
    """
    grown: dict[tuple[str, str, str], list[Pair]] = {}
    for pair in audited.pairs:
        dtype = _main_dtype(pair)
        if dtype is not None and pair.after.dtype.itemsize > dtype.itemsize:
            place = pair.after.place or audited.definition
            key = place, dtype.name, pair.after.dtype.name
            grown.setdefault(key, []).append(pair)
    findings = []
    for (place, before, after), pairs in grown.items():
        pairs.sort(key=lambda pair: -_growth(pair))
        names = name_some([_name(pair) for pair in pairs])
        findings.append(
            Finding(
                "growth",
                sum(map(_growth, pairs)),
                place,
                f"{names}: goes in as {before} and comes back as {after}; the next "
                "step is compiled anew, and keeps it so",
                "quantize what is returned, with its scales, as it came in"
                if before in _BYTES
                else f"cast what is returned: .astype(jnp.{before})",
            )
        )
    return findings


def _main_dtype(pair: Pair) -> jnp.dtype | None:
    """The dtype that holds most of what goes in; None for keys and the like."""
    largest = max(pair.before, key=lambda leaf: leaf.bytes)
    dtypes = largest.dtype, pair.after.dtype
    if any(jnp.issubdtype(dtype, jax.dtypes.extended) for dtype in dtypes):
        return None
    return largest.dtype


def _growth(pair: Pair) -> int:
    return max(0, pair.after.bytes - sum(leaf.bytes for leaf in pair.before))


def _name(pair: Pair) -> str:
    """Of the array, or of the node that one array comes back for."""
    first, *others = pair.before
    return f"{first.name} and {len(others)} beside" if others else first.name
