"""One contender: an optimizer that trains a task, and what was measured meanwhile."""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from experiments.data.batches import Batch
from experiments.vit_task import Task
from sfpo_jax import make_train_step
from sfpo_jax.training import Train

Record = dict[str, Any]


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
    """Making the parameters, compiling, and the first step."""
    seconds: float
    """All of it, the tests included."""
    skipped: int
    """Steps whose gradient was not finite."""

    @property
    def bits_per_parameter(self) -> float:
        """Wire bits of the last phase, for each parameter and step."""
        return 8 * self.wire_bytes[-1] / self.parameters


def run_contender(
    contender: Contender,
    task: Task,
    mesh: Mesh,
    batches: Iterator[Batch],
    tests: Sequence[Batch],
    train: Train,
    *,
    microbatches: int = 1,
    on_record: Callable[[Record], None] = lambda record: None,
) -> Result:
    """Trains from the seed's parameters and measures.

    Args:
      contender: the optimizer.
      task: parameters, loss and test.
      mesh: the devices.
      batches: training batches that divide over devices and microbatches.
      tests: the whole test set, in batches that divide over the devices.
      train: steps, seed, and how often to test and to record.
      microbatches: parts of a device's batch.
      on_record: called with each record as it is made: `contender`, `step` (steps
        done) and either the training metrics or `test_accuracy` and `test_loss`.

    Returns:
      The result, with all records.
    """
    began = time.perf_counter()
    key = None
    if task.has_key:
        # Not the key the parameters come from.
        key = jax.random.fold_in(jax.random.key(train.seed), 1)
    step = make_train_step(
        task.loss_fn,
        contender.tx,
        mesh,
        has_key=task.has_key,
        microbatches=microbatches,
    )
    state = step.init(task.init(train.seed), key)
    first = next(batches)
    wire_bytes = [
        sum(step.wire_bytes(state, first, phase).values()) for phase in contender.phases
    ]
    tests = [step.shard_batch(batch) for batch in tests]
    log = _Log(contender, wire_bytes, train, on_record)
    tested = (float("nan"), float("nan"))
    for done, batch in enumerate(itertools.chain([first], batches), start=1):
        state, metrics = step(state, batch)
        log.step(done, metrics, state.opt_state)
        if done % train.evaluate_every == 0 or done == train.steps:
            log.flush()
            tested = _test(task, state.params, tests)
            log.tested(done, *tested)
        if done == train.steps:
            break
    tail = max(1, train.steps // 20)
    return Result(
        name=contender.name,
        records=log.records,
        test_accuracy=tested[0],
        test_loss=tested[1],
        train_loss=statistics.fmean(log.losses[-tail:]),
        wire_bytes=wire_bytes,
        parameters=task.parameters,
        freeze=log.freeze,
        sparsity=log.sparsity,
        step_seconds=_median(log.durations[len(log.durations) // 2 :]),
        start_seconds=log.first_done - began,
        seconds=time.perf_counter() - began,
        skipped=int(state.skipped),
    )


def _test(task: Task, params: Any, tests: Sequence[Batch]) -> tuple[float, float]:
    """(accuracy, mean loss) over the test set."""
    sums = np.zeros(3)
    for batch in tests:
        # One at a time: independent programs with collectives, all in flight on eight
        # devices of one CPU, wait for each other's threads for ever.
        sums += [float(part) for part in task.test(params, batch)]
    correct, loss, images = sums.tolist()
    return correct / images, loss / images


def _median(durations: Sequence[float]) -> float:
    return statistics.median(durations) if durations else float("nan")


class _Log:
    """Records of a run, made a step late so that one step is always in flight."""

    def __init__(
        self,
        contender: Contender,
        wire_bytes: list[int],
        train: Train,
        on_record: Callable[[Record], None],
    ) -> None:
        self.records: list[Record] = []
        self.losses: list[float] = []
        self.durations: list[float] = []
        self.freeze: int | None = None
        self.first_done = 0.0
        self._contender = contender
        self._wire_bytes = wire_bytes
        self._steps, self._every = train.steps, train.log_every
        self._on_record = on_record
        self._pending: list[tuple[int, Record]] = []
        # When the step before was done; None after a test, whose time is not a step's.
        self._clock: float | None = None
        self.sparsity = self._sparsity()

    def step(self, done: int, metrics: Record, opt_state: Any) -> None:
        """Takes the metrics of a step and waits for those of the step before."""
        self._pending.append((done, metrics))
        if self.freeze is None and (done % self._every == 0 or done == self._steps):
            self._look_for_freeze(done, opt_state)
        if len(self._pending) > 1:
            self._resolve()

    def flush(self) -> None:
        """Waits for everything in flight."""
        while self._pending:
            self._resolve()
        self._clock = None

    def tested(self, done: int, accuracy: float, loss: float) -> None:
        """Takes the outcome of a test."""
        self._emit({"step": done, "test_accuracy": accuracy, "test_loss": loss})

    def _resolve(self) -> None:
        done, metrics = self._pending.pop(0)
        self.losses.append(float(metrics["loss"]))
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
                "train_loss": statistics.fmean(self.losses[-self._every :]),
                "grad_norm": float(metrics["grad_norm"]),
                "sparsity": float(self.sparsity[done - 1]),
                "wire_bytes": self._wire_bytes[-1 if is_compressed else 0],
                "step_ms": 1e3 * _median(self.durations[-self._every :]),
                "skipped": int(metrics["skipped"]),
            }
        )

    def _emit(self, record: Record) -> None:
        self.records.append({"contender": self._contender.name, **record})
        self._on_record(self.records[-1])

    def _look_for_freeze(self, done: int, opt_state: Any) -> None:
        """1-bit Adam decides for itself when to freeze its variance, if told to."""
        found = optax.tree.get(opt_state, "freeze")
        if found is not None and int(found.step) <= done:
            self.freeze = int(found.step)
            self.sparsity = self._sparsity()

    def _sparsity(self) -> np.ndarray:
        if self._contender.sparsity is None:
            return np.zeros(self._steps, np.float32)
        return self._contender.sparsity(self.freeze)
