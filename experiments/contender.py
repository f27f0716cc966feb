"""One contender: an optimizer that trains a task, and what was measured meanwhile."""

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from experiments.layout import GradientRelease, make_trainee
from experiments.profiling.recorder import Recorder
from experiments.run_log import Course, RunLog, Store, median
from experiments.task import Task
from sfpo_jax import RecomputePlan
from sfpo_jax.collectives import wire_bytes
from sfpo_jax.parallel import Step, TrainState, current_hosts
from sfpo_jax.training import (
    DataIterator,
    Monitor,
    Record,
    Stop,
    Train,
    evaluate,
    fit,
)

# Phases in which whole gradients are averaged.
DENSE_PHASES = ("warmup", "refresh")


@dataclasses.dataclass(frozen=True)
class Contender:
    """An optimizer under a name."""

    name: str
    tx: optax.GradientTransformation
    phases: tuple[str | None, ...] = (None,)
    """Phases whose wire bytes differ, the first one first, a compressed one last."""
    course: Callable[[int | None], Course] | None = None
    """First compressed step, None before it -> what each step does; None: all steps
    are alike."""
    release: GradientRelease | None = None
    """Train by the layered step; None: by the plain one."""
    shard_axes: tuple[str, ...] = ()
    """Axes along which the plain step reduces exactly and shares the states."""
    max_norm: float | None = None
    """What the step clips to, where the chain sees layers, or parts of tensors."""
    budget: str | None = None
    """What a device may hold; the plain step plans what it computes again."""
    staleness: int = 0
    """Steps that an update of the plain step comes late."""


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
    """Bytes of gradients, or what stands for them, that one device sends in a step,
    phase by phase, those of a step that compresses last; activations along `op` are
    not counted."""
    parameters: int
    freeze: int | None
    """First compressed step; None where nothing freezes."""
    sparsity: np.ndarray
    """Share of entries masked in each step, float32[steps]."""
    phases: list[str | None]
    """Names of the phases, in that order."""
    phase: np.ndarray
    """Place of each step's phase among them, int8[steps]."""
    step_seconds: float
    """Median over the second half of the steps, NaN for a single step."""
    start_seconds: float
    """Making the parameters, compiling, and the first step; of the last start."""
    seconds: float
    """All of it, the tests included; of every start up to its last checkpoint."""
    skipped: int
    """Steps whose gradient was not finite."""

    @property
    def sent(self) -> np.ndarray:
        """Wire bytes of each step, int64[steps]."""
        return np.asarray(self.wire_bytes)[self.phase]

    @property
    def is_dense(self) -> np.ndarray:
        """Steps that average whole gradients where others do not, bool[steps]."""
        dense = [name in DENSE_PHASES for name in self.phases]
        return np.asarray(dense)[self.phase]

    @property
    def bits_per_parameter(self) -> float:
        """Wire bits of the last phase, for each parameter and step."""
        return 8 * self.wire_bytes[-1] / self.parameters

    @property
    def mean_bits(self) -> float:
        """Wire bits for each parameter and step, over all steps of the run."""
        return 8 * float(self.sent.mean()) / self.parameters


class RunStopped(Exception):
    """A run was asked to end before its last step, and can go on where it is."""


def run_contender(
    contender: Contender,
    task: Task,
    mesh: Mesh,
    batches: DataIterator,
    tests: Sequence[Any],
    train: Train,
    *,
    microbatches: int = 1,
    on_record: Callable[[Record], None] = lambda record: None,
    on_plan: Callable[[RecomputePlan], None] = lambda plan: None,
    store: Store | None = None,
    stop: Stop | None = None,
    recorder: Recorder | None = None,
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
      on_plan: called before the first step with what it computes again, where that was
        planned.
      store: keeps checkpoints, and goes on from the last; None keeps nothing.
      stop: ends the run early when it is requested.
      recorder: profiles some steps; None: none.

    Returns:
      The result, with all records.

    Raises:
      RunStopped: `stop` was requested; with a store, the run is saved.
      BudgetError: the step does not fit, whatever is computed again.
    """
    began = time.perf_counter()
    step, init, test_batch = make_trainee(
        task,
        contender.tx,
        contender.release,
        mesh,
        microbatches=microbatches,
        max_norm=contender.max_norm,
        shard_axes=contender.shard_axes,
        frozen=task.frozen and task.frozen(train.seed),
        budget=contender.budget,
        staleness=contender.staleness,
    )
    # Not the key the parameters come from.
    key = jax.random.fold_in(jax.random.key(train.seed), 1) if task.has_key else None
    model_state = task.init_state and task.init_state(train.seed)
    state = step.init(init(train.seed), key, model_state)
    sent = _wire_bytes(contender, step, state, batches, stop)
    if step.recompute_plan is not None:
        on_plan(step.recompute_plan)
    tests = [step.shard_batch(batch) for batch in tests]
    log = RunLog(contender.name, sent, contender.course, train, on_record, store)
    log.watch(state.params)

    def test(params: Any, **state: Any) -> dict[str, float] | None:
        if step.frozen is not None:
            state["frozen"] = step.frozen
        sums = evaluate(functools.partial(test_batch, **state), params, tests, stop)
        if sums is None:
            return None
        correct, loss, images = sums.tolist()
        return {"test_accuracy": correct / images, "test_loss": loss / images}

    watching: AbstractContextManager[Monitor] = contextlib.nullcontext(log)
    if recorder is not None:
        name, phases, first = contender.name, contender.phases, _peek(batches)
        watching = recorder.watching(log, name, phases, train, step, task, state, first)
    with watching as monitor:
        done = fit(
            step,
            state,
            batches,
            train,
            evaluate=test,
            monitor=monitor,
            checkpoints=store.checkpoints if store else None,
            stop=stop,
        )
    if not done.is_finished:
        raise RunStopped(f"{contender.name} stopped after step {done.done}")
    # The layered step may have the weights in parts, and has them in stacks.
    if store and task.save and contender.release is None and current_hosts().is_first:
        store.weights.mkdir(parents=True, exist_ok=True)
        task.save(store.weights, done.state.params, step.frozen)
    return Result(
        name=contender.name,
        records=log.records,
        test_accuracy=log.tested["test_accuracy"],
        test_loss=log.tested["test_loss"],
        train_loss=statistics.fmean(list(log.losses)[-max(1, train.steps // 20) :]),
        wire_bytes=sent,
        parameters=task.parameters,
        freeze=log.freeze,
        sparsity=log.course.sparsity,
        phases=list(contender.phases),
        phase=log.course.phase,
        step_seconds=median(log.durations),
        # A run that had only its last test to make has no first step.
        start_seconds=(log.first_done or time.perf_counter()) - began,
        seconds=log.seconds_before + time.perf_counter() - began,
        skipped=int(done.state.skipped),
    )


def _peek(batches: DataIterator) -> Any:
    """The next batch, which is not taken away."""
    place = batches.get_state()
    first = next(batches)
    batches.set_state(place)
    return first


def _wire_bytes(
    contender: Contender,
    step: Step,
    state: TrainState,
    batches: DataIterator,
    stop: Stop | None,
) -> list[int]:
    """Bytes of a step in each phase; takes no batch away."""
    first = _peek(batches)
    # It compiles, which can take minutes, and there is nothing to save yet.
    if stop and stop.meet():
        raise RunStopped(f"{contender.name} stopped before its first step")
    text, found = step.compiled_text(state, first), []
    for phase in contender.phases:
        sent = wire_bytes(step.transfers_in(text, phase))
        found.append(sum(size for axis, size in sent.items() if axis != "op"))
    return found
