"""One contender: an optimizer that trains a task, and what was measured meanwhile."""

import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from experiments.data.batches import Batch
from experiments.vit_task import Task
from sfpo_jax import make_train_step
from sfpo_jax.parallel import TrainState, TrainStep
from sfpo_jax.training import (
    Checkpoints,
    DataIterator,
    Monitor,
    Record,
    Stop,
    Train,
    evaluate,
    fit,
)


@dataclasses.dataclass(frozen=True)
class Contender:
    """An optimizer under a name."""

    name: str
    tx: optax.GradientTransformation
    phases: tuple[str | None, ...] = (None,)
    """Phases whose wire bytes differ, in the order they are run through."""
    sparsity: Callable[[int | None], np.ndarray] | None = None
    """First compressed step, None before it -> share of entries masked in each step,
    float32[steps]; None: nothing is masked."""


@dataclasses.dataclass(frozen=True)
class Result:
    """What a contender reached and what it cost."""

    name: str
    records: list[Record]
    test_accuracy: float
    test_loss: float
    train_loss: float
    """Mean over the last twentieth of the steps."""
    wire_bytes: list[int]
    """Bytes one device sends in a step, over all axes, phase by phase."""
    parameters: int
    freeze: int | None
    """First compressed step; None where nothing freezes."""
    sparsity: np.ndarray
    """Share of entries masked in each step, float32[steps]."""
    step_seconds: float
    """Median over the second half of the steps, NaN for a single step."""
    start_seconds: float
    """Making the parameters, compiling, and the first step; of the last start."""
    seconds: float
    """All of it, the tests included; of every start up to its last checkpoint."""
    skipped: int
    """Steps whose gradient was not finite."""

    @property
    def bits_per_parameter(self) -> float:
        """Wire bits of the last phase, for each parameter and step."""
        return 8 * self.wire_bytes[-1] / self.parameters


class Store(Protocol):
    """Where a contender's run is kept, so that it can go on."""

    @property
    def checkpoints(self) -> Checkpoints:
        """Its checkpoints."""
        ...

    def rewind(self, done: int, tested: int) -> list[Record]:
        """Drops the records after step `done`, those of tests after step `tested`.

        Returns:
          The records that stay.
        """
        ...


class RunStopped(Exception):
    """A run was asked to end before its last step, and can go on where it is."""


def run_contender(
    contender: Contender,
    task: Task,
    mesh: Mesh,
    batches: DataIterator,
    tests: Sequence[Batch],
    train: Train,
    *,
    microbatches: int = 1,
    on_record: Callable[[Record], None] = lambda record: None,
    store: Store | None = None,
    stop: Stop | None = None,
) -> Result:
    """Trains from the seed's parameters, or from the last checkpoint, and measures.

    Args:
      contender: the optimizer.
      task: parameters, loss and test.
      mesh: the devices.
      batches: training batches that divide over devices and microbatches.
      tests: the whole test set, in batches that divide over the devices.
      train: steps, seed, and how often to test, to record and to save.
      microbatches: parts of a device's batch.
      on_record: called with each record as it is made: `contender`, `step` (steps
        done) and either the training metrics or `test_accuracy` and `test_loss`.
      store: keeps checkpoints, and goes on from the last; None keeps nothing.
      stop: ends the run early when it is requested.

    Returns:
      The result, with all records.

    Raises:
      RunStopped: `stop` was requested; with a store, the run is saved.
    """
    began = time.perf_counter()
    step = make_train_step(
        task.loss_fn,
        contender.tx,
        mesh,
        has_key=task.has_key,
        microbatches=microbatches,
    )
    # Not the key the parameters come from.
    key = jax.random.fold_in(jax.random.key(train.seed), 1) if task.has_key else None
    state = step.init(task.init(train.seed), key)
    wire_bytes = _wire_bytes(contender, step, state, batches, stop)
    tests = [step.shard_batch(batch) for batch in tests]
    log = _Log(contender, wire_bytes, train, on_record, store)

    def test(params: Any) -> dict[str, float] | None:
        sums = evaluate(task.test, params, tests, stop)
        if sums is None:
            return None
        correct, loss, images = sums.tolist()
        return {"test_accuracy": correct / images, "test_loss": loss / images}

    done = fit(
        step,
        state,
        batches,
        train,
        evaluate=test,
        monitor=log,
        checkpoints=store.checkpoints if store else None,
        stop=stop,
    )
    if not done.is_finished:
        raise RunStopped(f"{contender.name} stopped after step {done.done}")
    return Result(
        name=contender.name,
        records=log.records,
        test_accuracy=log.tested["test_accuracy"],
        test_loss=log.tested["test_loss"],
        train_loss=statistics.fmean(list(log.losses)[-max(1, train.steps // 20) :]),
        wire_bytes=wire_bytes,
        parameters=task.parameters,
        freeze=log.freeze,
        sparsity=log.sparsity,
        step_seconds=_median(log.durations),
        # A run that had only its last test to make has no first step.
        start_seconds=(log.first_done or time.perf_counter()) - began,
        seconds=log.seconds_before + time.perf_counter() - began,
        skipped=int(done.state.skipped),
    )


def _wire_bytes(
    contender: Contender,
    step: TrainStep,
    state: TrainState,
    batches: DataIterator,
    stop: Stop | None,
) -> list[int]:
    """Bytes of a step in each phase; takes no batch away."""
    place = batches.get_state()
    first = next(batches)
    batches.set_state(place)
    found = []
    for phase in contender.phases:
        # Each compiles, which can take minutes, and there is nothing to save yet.
        if stop and stop.requested:
            raise RunStopped(f"{contender.name} stopped before its first step")
        found.append(sum(step.wire_bytes(state, first, phase).values()))
    return found


def _median(durations: Sequence[float]) -> float:
    return statistics.median(durations) if durations else float("nan")


class _Log(Monitor):
    """Records of a run, and what they are made of."""

    def __init__(
        self,
        contender: Contender,
        wire_bytes: list[int],
        train: Train,
        on_record: Callable[[Record], None],
        store: Store | None,
    ) -> None:
        self.tested: dict[str, float] = {}
        self.freeze: int | None = None
        self.first_done = 0.0
        self.seconds_before = 0.0
        self._contender = contender
        self._wire_bytes = wire_bytes
        self._steps, self._every = train.steps, train.log_every
        self._on_record = on_record
        self._store = store
        # As many as are looked at again: they go into every checkpoint.
        self.losses = deque[float](maxlen=max(self._every, train.steps // 20))
        self.durations = deque[float](maxlen=min(1000, max(1, train.steps // 2)))
        self.records: list[Record] = []
        self._began = time.perf_counter()
        # When the step before was done; None after a pause, whose time is not a step's.
        self._clock: float | None = None
        self.sparsity = self._sparsity()

    def dispatched(self, done: int, state: TrainState) -> None:
        """1-bit Adam decides for itself when to freeze its variance, if told to."""
        is_due = done % self._every == 0 or done == self._steps
        if self.freeze is not None or not is_due:
            return
        found = optax.tree.get(state.opt_state, "freeze")
        if found is not None and int(found.step) <= done:
            self.freeze = int(found.step)
            self.sparsity = self._sparsity()

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
        is_compressed = self.freeze is not None and done > self.freeze
        self._emit(
            {
                "step": done,
                "train_loss": statistics.fmean(list(self.losses)[-self._every :]),
                "grad_norm": metrics["grad_norm"],
                "sparsity": float(self.sparsity[done - 1]),
                "wire_bytes": self._wire_bytes[-1 if is_compressed else 0],
                "step_ms": 1e3 * _median(list(self.durations)[-self._every :]),
                "skipped": int(metrics["skipped"]),
            }
        )

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
        self.sparsity = self._sparsity()

    def _emit(self, record: Record) -> None:
        self.records.append({"contender": self._contender.name, **record})
        self._on_record(self.records[-1])

    def _sparsity(self) -> np.ndarray:
        if self._contender.sparsity is None:
            return np.zeros(self._steps, np.float32)
        return self._contender.sparsity(self.freeze)
