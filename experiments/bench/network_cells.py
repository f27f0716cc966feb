"""What `experiments.bench.network` measured, and what follows from it.

A cell is one contender over one link: `rounds` has, of each turn, the seconds, bytes
and packets of its steps. The first step of a turn stands apart: it is the dense one of
the one-bit contenders, and starts the caches of the others.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sfpo_jax.collectives import methods

Cell = Mapping[str, Any]

# Ethernet, IPv4 and TCP with timestamps, of each packet.
HEADER = 14 + 20 + 32
DENSE_STEPS = 0.12 + 0.88 / 16  # of a run of SFPO: warm-up, and one in 16 afterwards


class Contender(NamedTuple):
    """One way to train.

    Attributes:
      title: in tables.
      alone: the contender that computes the same and sends nothing.
      method: whose formula its bytes follow; None: there is none.
      has_warmup: whether the first step of a turn is a dense one.
      cycle: steps of which one sends for all; a step is then the mean of them.
    """

    title: str
    alone: str
    method: str | None = None
    has_warmup: bool = False
    cycle: int = 1


JAX = {
    "alone": Contender("JAX, no communication", "alone"),
    "onebit_alone": Contender("SFPO, no communication", "alone"),
    "dense": Contender("JAX dense float32", "alone", "dense"),
    "bf16": Contender("JAX dense bfloat16", "alone", "bf16"),
    "onebit": Contender("SFPO one bit", "alone", "sign", True),
    "unmasked": Contender("1-bit Adam, no mask", "alone", "sign", True),
    "zero_one": Contender("0/1 Adam, one in 4 sends", "alone", "sign", True, 4),
    "sparse": Contender("sparse one bit", "alone", "sparse_sign", True),
    "low_rank": Contender("JAX, factors of rank 1", "alone"),
    "auto": Contender("SFPO auto", "alone"),
}
TORCH = {
    "torch_alone": Contender("PyTorch, no communication", "torch_alone"),
    "torch_ddp": Contender("PyTorch DDP", "torch_alone", "dense"),
    "torch_fp16": Contender("PyTorch DDP, fp16 hook", "torch_alone", "bf16"),
    "torch_powersgd1": Contender("PyTorch DDP, PowerSGD rank 1", "torch_alone"),
    "torch_powersgd2": Contender("PyTorch DDP, PowerSGD rank 2", "torch_alone"),
}
CONTENDERS = JAX | TORCH


class Row(NamedTuple):
    """One contender over one link; times in seconds, bytes of one host and step."""

    hosts: int
    link: str
    contender: str
    step: float  # median
    samples: float  # a second, of all hosts
    communication: float  # median over rounds of step - alone of the same round
    own: float | None  # likewise, against the same optimizer alone
    mean_communication: float  # over a run, with the dense steps of SFPO
    sent: float  # that the interface counted
    payload: float  # likewise, less the headers and the barriers
    mean_sent: float  # over a run
    wire: float | None  # of `step.wire_bytes`
    formula: float | None  # 2 (N - 1) / N x what the method says
    chosen: str | None  # what `auto` took

    @property
    def share(self) -> float:
        """Of the step that is communication."""
        return max(self.communication, 0.0) / self.step


def make_rows(cells: Sequence[Cell], batch: int, parameters: int) -> list[Row]:
    """A row for each cell of which the contender without communication was measured."""
    found = {(c["hosts"], c["link"], c["contender"]): c for c in cells}
    rows = []
    for cell in cells:
        place = (cell["hosts"], cell["link"])
        alone = found.get((*place, CONTENDERS[cell["contender"]].alone))
        own = found.get((*place, "onebit_alone"))
        if alone is not None:
            rows.append(_row(cell, alone, own, batch, parameters))
    return rows


def _row(cell: Cell, alone: Cell, own: Cell | None, batch: int, parameters: int) -> Row:
    name, hosts = cell["contender"], cell["hosts"]
    of = actual(cell)
    step = statistics.median(_each(cell, "seconds"))
    spent = difference(cell, alone)
    sent, mean_spent = statistics.median(_each(cell, "bytes")), spent
    # What computing alone sends are the barriers around a step.
    own_bytes = sent - statistics.median(_each(alone, "bytes"))
    packets = statistics.median(_each(cell, "packets"))
    packets -= statistics.median(_each(alone, "packets"))
    mean_sent = sent
    if of.has_warmup:
        rest = 1 - DENSE_STEPS
        first = statistics.median(_first(cell, "bytes"))
        slow = statistics.median(_first(cell, "seconds")) - (step - spent)
        mean_spent = DENSE_STEPS * slow + rest * spent
        mean_sent = DENSE_STEPS * first + rest * sent
    is_onebit = of == CONTENDERS["onebit"] and own is not None
    formula = None
    if of.method is not None:
        formula = methods()[of.method].sent_bytes(parameters, hosts) / of.cycle
    return Row(
        hosts=hosts,
        link=cell["link"],
        contender=name,
        step=step,
        samples=hosts * batch / step,
        communication=spent,
        own=difference(cell, own) if is_onebit and own else None,
        mean_communication=mean_spent,
        sent=sent,
        payload=own_bytes - HEADER * packets,
        mean_sent=mean_sent,
        wire=cell["wire"],
        formula=formula,
        chosen=cell.get("chosen"),
    )


def actual(cell: Cell) -> Contender:
    """The contender, for `auto` that which it chose."""
    return CONTENDERS.get(cell.get("chosen") or "", CONTENDERS[cell["contender"]])


def difference(cell: Cell, alone: Cell) -> float:
    """Median over the rounds of a step's seconds beyond those of `alone`."""
    pairs = zip(cell["rounds"], alone["rounds"], strict=False)
    return statistics.median(
        statistics.median(_settled(cell, mine, "seconds"))
        - statistics.median(_settled(alone, its, "seconds"))
        for mine, its in pairs
    )


def _each(cell: Cell, name: str) -> list[float]:
    return [x for turn in cell["rounds"] for x in _settled(cell, turn, name)]


def _settled(cell: Cell, turn: Mapping[str, Any], name: str) -> list[float]:
    """A number of each step after the first, of each cycle the mean."""
    cycle, values = actual(cell).cycle, turn[name][1:]
    starts = range(0, len(values), cycle)
    return [statistics.fmean(values[i : i + cycle]) for i in starts]


def _first(cell: Cell, name: str) -> list[float]:
    return [turn[name][0] for turn in cell["rounds"]]


def join_hosts(answers: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any]:
    """One turn from those of all hosts: the slowest's time, the mean of what they sent.

    Example:
      >>> join_hosts([{"seconds": [1.0, 2.0]}, {"seconds": [3.0, 1.0]}])
      {'seconds': [3.0, 2.0]}
    """
    joins: dict[str, Callable[[Any], float]] = {"seconds": max}
    return {
        name: [
            joins.get(name, statistics.fmean)(values)
            for values in zip(*(answer[name] for answer in answers), strict=True)
        ]
        for name in answers[0]
    }


def bandwidth_for(target: float, points: Sequence[tuple[float, float]]) -> float:
    """Where communication takes `target` seconds, between two measurements.

    Args:
      target: seconds.
      points: (bits a second, seconds) of two links; between them it is a + c / b.

    Raises:
      ValueError: a slower link that is not slower, or one that no bandwidth reaches.

    Example:
      >>> round(bandwidth_for(0.5, [(1e8, 1.0), (1e9, 0.1)]) / 1e6)
      200
    """
    (b0, t0), (b1, t1) = sorted(points)
    slope = (t0 - t1) / (1 / b0 - 1 / b1)
    fixed = t0 - slope / b0
    if slope <= 0 or target <= fixed:
        raise ValueError(
            f"`target` {target:.3g} s is reached at no bandwidth: {t0:.3g} s at "
            f"{b0:.3g} bit/s and {t1:.3g} s at {b1:.3g} bit/s were measured."
        )
    return slope / (target - fixed)
