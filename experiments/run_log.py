"""The records of a run as it goes, and what a resume needs to make the next."""

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import optax

from sfpo_jax.parallel import TrainState
from sfpo_jax.training import (
    Checkpoints,
    Monitor,
    Record,
    Train,
    Vitals,
    memory_share,
)

# What differs from run to run, in a record.
TIMED = ("step_ms", "input_ms", "memory_share")


class Course(NamedTuple):
    """What each step of a run does."""

    phase: np.ndarray  # int8[steps], place among the contender's phases
    sparsity: np.ndarray  # float32[steps], share of the entries masked


class Store(Protocol):
    """Where a contender's run is kept, so that it can go on."""

    @property
    def checkpoints(self) -> Checkpoints:
        """Its checkpoints."""
        ...

    @property
    def weights(self) -> Path:
        """Where its trained weights go, for other programs."""
        ...

    def rewind(self, done: int, tested: int) -> list[Record]:
        """Drops the records after step `done`, those of tests after step `tested`.

        Returns:
          The records that stay.
        """
        ...


def median(durations: Sequence[float]) -> float:
    """NaN for none."""
    return statistics.median(durations) if durations else float("nan")


class RunLog(Monitor):
    """Records of a run, and what they are made of.

    Args:
      name: of the contender.
      wire_bytes: bytes of a step, phase by phase.
      course: first compressed step, None before it -> what each step does; None: all
        steps are alike.
      train: `steps` and `log_every` are meant.
      on_record: called with each record.
      store: where the records of an earlier start are; None where nothing is kept.
    """

    def __init__(
        self,
        name: str,
        wire_bytes: list[int],
        course: Callable[[int | None], Course] | None,
        train: Train,
        on_record: Callable[[Record], None],
        store: Store | None,
    ) -> None:
        self.tested: dict[str, float] = {}
        self.freeze: int | None = None
        self.first_done = 0.0
        self.seconds_before = 0.0
        self._name = name
        self._wire_bytes = wire_bytes
        self._make_course = course
        self._steps, self._every = train.steps, train.log_every
        self._on_record = on_record
        self._store = store
        # As many as are looked at again: they go into every checkpoint.
        self.waits = deque[float](maxlen=self._every)
        self._vitals: Vitals | None = None
        self._measured: dict[int, Any] = {}  # by step, until it is done
        self.losses = deque[float](maxlen=max(self._every, train.steps // 20))
        self.durations = deque[float](maxlen=min(1000, max(1, train.steps // 2)))
        self.records: list[Record] = []
        self._began = time.perf_counter()
        # When the step before was done; None after a pause, whose time is not a step's.
        self._clock: float | None = None
        self.course = self._course()

    def watch(self, params: Any) -> None:
        """Takes the parameters at first, before any resume."""
        self._vitals = Vitals(params)

    def fetched(self, seconds: float) -> None:
        """Takes the time that a step waited for its batch."""
        self.waits.append(seconds)

    def dispatched(self, done: int, state: TrainState) -> None:
        """1-bit Adam decides for itself when to freeze its variance, if told to."""
        is_due = done % self._every == 0 or done == self._steps
        if self._vitals is not None and done % self._every == 0:
            # Read when the step is done: it must not be waited for now.
            measured = self._vitals.measure(state.params, state.opt_state)
            self._measured[done] = measured
        if self.freeze is not None or not is_due:
            return
        # The layered step has a state for each stack, all with the same freeze.
        found = optax.tree.get_all_with_path(state.opt_state, "freeze")
        if found and (step := int(np.ravel(found[0][1].step)[0])) <= done:
            self.freeze = step
            self.course = self._course()

    def stepped(self, done: int, metrics: dict[str, float]) -> None:
        """Takes the metrics of a step, in order."""
        self.losses.append(metrics["loss"])
        now = time.perf_counter()
        if self._clock is not None:
            self.durations.append(now - self._clock)
        self._clock = now
        self.first_done = self.first_done or now
        if done % self._every:
            return
        phase, last = int(self.course.phase[done - 1]), len(self._wire_bytes) - 1
        self._emit(
            {
                "step": done,
                "train_loss": statistics.fmean(list(self.losses)[-self._every :]),
                "grad_norm": metrics["grad_norm"],
                "sparsity": float(self.course.sparsity[done - 1]),
                "wire_bytes": self._wire_bytes[phase],
                "step_ms": 1e3 * median(list(self.durations)[-self._every :]),
                "input_ms": 1e3 * median(self.waits),
                "skipped": int(metrics["skipped"]),
                "is_compressed": 0 < phase == last,
                **self._health(done),
            }
        )

    def _health(self, done: int) -> Record:
        """What `tuning.diagnose` looks at, of step `done`."""
        if self._vitals is None:
            return {}
        # The step after it is on its way, and may have been measured as well.
        found = self._vitals.read(self._measured.pop(done))
        share = memory_share()
        return found if share is None else found | {"memory_share": share}

    def paused(self) -> None:
        """Nothing is in flight."""
        self._clock = None

    def evaluated(self, done: int, metrics: dict[str, float]) -> None:
        """Takes the outcome of a test."""
        self.tested = metrics
        self._emit({"step": done, **metrics})

    def get_state(self) -> Record:
        """What the next start needs besides the records, which lie in their file."""
        return {
            "losses": list(self.losses),
            "durations": [round(seconds, 6) for seconds in self.durations],
            "freeze": self.freeze,
            "tested": self.tested,
            "seconds": self.seconds_before + time.perf_counter() - self._began,
        }

    def started(self, done: int, tested: int, saved: Record | None) -> None:
        """Begins, or goes on after step `done`."""
        self.records = self._store.rewind(done, tested) if self._store else []
        if saved is None:
            return
        self.losses.extend(saved["losses"])
        self.durations.extend(saved["durations"])
        self.freeze, self.tested = saved["freeze"], saved["tested"]
        self.seconds_before = saved["seconds"]
        self.course = self._course()

    def _emit(self, record: Record) -> None:
        self.records.append({"contender": self._name, **record})
        self._on_record(self.records[-1])

    def _course(self) -> Course:
        if self._make_course is None:
            steps = self._steps
            return Course(np.zeros(steps, np.int8), np.zeros(steps, np.float32))
        return self._make_course(self.freeze)
