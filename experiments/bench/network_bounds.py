"""The promises that `experiments.bench.network` holds its measurements against."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from experiments.bench.network_cells import CONTENDERS, Row

SLOW, FAST, FREE = "100 Mbit/s", "1 Gbit/s", "not limited"
SHARE_LINK, RATIO_LINK = "dense 35 % of a step", "dense 3.8 times slower"
SHARE, RATIO = 0.35, 3.8  # what these links are chosen by
_BYTES = 0.05


class Bound(NamedTuple):
    """A promise, and what was found."""

    promise: str
    found: float
    limit: float
    is_met: bool

    def __str__(self) -> str:
        word = "met" if self.is_met else "**missed**"
        return f"{self.promise}: {self.found:.3g} (bound {self.limit:.3g}), {word}"


def check(rows: Sequence[Row]) -> list[Bound]:
    """All promises of which the rows say something."""
    by = {(r.hosts, r.link, r.contender): r for r in rows}
    return [
        *_against_dense(by),
        *_chosen_links(by),
        *_auto(by),
        *_bytes_sent(rows),
    ]


Found = dict[tuple[int, str, str], Row]


def _most(promise: str, found: float, limit: float) -> Bound:
    return Bound(promise, found, limit, found <= limit)


def _least(promise: str, found: float, limit: float) -> Bound:
    return Bound(promise, found, limit, found >= limit)


def _against_dense(by: Found) -> list[Bound]:
    """Communication and bytes of one bit over those of dense float32, 2 hosts."""
    bounds = []
    links = ((SLOW, 1 / 20), (FAST, 1 / 8))
    for (link, limit), name in itertools.product(links, ("onebit", "unmasked")):
        dense, onebit = by.get((2, link, "dense")), by.get((2, link, name))
        if dense is None or onebit is None:
            continue
        ratio = onebit.communication / dense.communication
        title = f"2 hosts, {link}, {CONTENDERS[name].title} over dense float32"
        bounds.append(_most(f"{title}: communication time", ratio, limit))
        if link == SLOW:
            bounds.append(_most(f"{title}: bytes", onebit.sent / dense.sent, 1 / 28))
    return bounds


def _chosen_links(by: Found) -> list[Bound]:
    """At the two bandwidths that are found by how dense training fares."""
    bounds = []
    dense, onebit = (by.get((2, SHARE_LINK, name)) for name in ("dense", "onebit"))
    if dense is not None and onebit is not None:
        title = f"2 hosts, dense communicates for {dense.share:.0%} of its step"
        bounds.append(_most(f"{title}: share of SFPO one bit", onebit.share, 0.05))
    dense, onebit = (by.get((2, RATIO_LINK, name)) for name in ("dense", "onebit"))
    if dense is not None and onebit is not None:
        slower = dense.step / (dense.step - dense.communication)
        title = f"2 hosts, dense is {slower:.2f} times slower than computing alone"
        gain = dense.step / onebit.step
        bounds.append(_least(f"{title}: SFPO one bit is faster", gain, 3.4))
    return bounds


def _auto(by: Found) -> list[Bound]:
    """Throughput of auto over that of the best dense, nothing held back."""
    bounds = []
    for (hosts, link, name), row in by.items():
        if name != "auto" or link != FREE:
            continue
        dense = [by.get((hosts, link, x)) for x in ("dense", "bf16")]
        best = max((x.samples for x in dense if x is not None), default=None)
        if best is not None:
            title = f"{hosts} hosts, {link}: auto ({row.chosen}) over the best dense"
            bounds.append(_least(title, row.samples / best, 0.97))
    return bounds


def _bytes_sent(rows: Sequence[Row]) -> list[Bound]:
    """Of each contender the worst link: what was counted, against what was to be sent.

    PyTorch has no `step.wire_bytes`; its plain and fp16 bytes follow the formula.
    """
    bounds = []
    for hosts in sorted({row.hosts for row in rows}):
        for name, contender in CONTENDERS.items():
            mine = [r for r in rows if r.hosts == hosts and r.contender == name]
            off = [abs(r.payload / r.wire - 1) for r in mine if r.wire]
            title = f"{hosts} hosts, {contender.title}: interface"
            if off:
                bounds.append(_most(f"{title} against wire_bytes", max(off), _BYTES))
            off = [abs(r.payload / r.formula - 1) for r in mine if r.formula]
            if off:
                bounds.append(_most(f"{title} against the formula", max(off), _BYTES))
    return bounds
