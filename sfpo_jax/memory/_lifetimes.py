"""What lives when: a plan's memory over the sequence of the program's instructions."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from sfpo_jax.memory._ledger import ACTIVATIONS, TEMPORARIES
from sfpo_jax.memory._origins import Origin
from sfpo_jax.memory._timeline import Timeline, Value


class LifetimesError(RuntimeError):
    """Lifetimes cannot be drawn, or the picture not be written."""


@dataclasses.dataclass(frozen=True)
class Lifetimes:
    """The memory of one device at each instruction of a program, in bytes.

    Arguments and outputs are held from the start to the end, whether or not a donated
    one is still read. A position is a place in the sequence in which the compiler put
    the instructions, not a time; the body of a loop stands there once, as one turn of
    it, before the loop itself.

    Attributes:
      held: entry of the ledger -> int64[positions].
      peak: position of the fullest moment, where activations are those of the ledger.
      running: the operation there, or the last with a name before it.
      reserved_bytes: the plan's total, which is taken all the time; what it exceeds
        the fullest moment by are holes between the temporaries.
      phases: (position, what runs from there on): "forward", "backward", "warm-up
        update", "compressed update" or "rest".
      values: the largest temporaries with birth and death, in the order of birth.
    """

    held: dict[str, np.ndarray]
    peak: int
    running: Origin
    reserved_bytes: int
    phases: tuple[tuple[int, str], ...]
    values: tuple[Value, ...]

    @property
    def total(self) -> np.ndarray:
        """All entries together, int64[positions]."""
        return np.sum(list(self.held.values()), axis=0)

    @property
    def peak_bytes(self) -> int:
        """What is held at the fullest moment."""
        return int(self.total[self.peak])

    @property
    def holes(self) -> int:
        """Bytes that no temporary ever takes at the fullest moment."""
        return self.reserved_bytes - self.peak_bytes


def make_lifetimes(ledger: Mapping[str, int], timeline: Timeline) -> Lifetimes:
    """Puts what is held all the time under what comes and goes."""
    starts = [moment.position for moment in timeline.moments]
    lengths = np.diff([*starts, timeline.length])
    held = {
        name: np.full(timeline.length, size, np.int64) for name, size in ledger.items()
    }
    columns = np.asarray(timeline.moments, np.int64)
    held[ACTIVATIONS] = np.repeat(columns[:, 1], lengths)
    held[TEMPORARIES] = np.repeat(columns[:, 2], lengths)
    return Lifetimes(
        held,
        timeline.peak,
        timeline.running,
        sum(ledger.values()),
        timeline.phases,
        timeline.values,
    )
