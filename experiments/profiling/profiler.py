"""Traces some steps of each phase of a run, without changing what it does."""

import shutil
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.profiler

from experiments.profiling.trace import WAITED, WINDOW
from experiments.run_log import RunLog
from sfpo_jax.parallel import TrainState
from sfpo_jax.training import Monitor, Train

STEPS = 5  # traced of each phase, where tests and checkpoints leave room
SETTLED = 3  # steps before them, in which caches and queues fill


class Window(NamedTuple):
    """Steps that were traced."""

    phase: str
    first: int
    steps: int
    folder: Path


class Profiler(Monitor):
    """Passes all it is told on to the log of the run, and traces in between.

    Each phase is traced once: `STEPS` steps, after `SETTLED` of the same phase, in a
    row without a test or a checkpoint. The devices are waited for at both ends, so that
    the window is the time of its steps and nothing else.

    Args:
      log: of the run.
      folder: where traces go, one folder for each phase.
      phases: their names, in the order in which they are run through.
      train: the intervals at which a run pauses are meant.
    """

    def __init__(
        self, log: RunLog, folder: Path, phases: tuple[str, ...], train: Train
    ) -> None:
        self.windows: list[Window] = []
        self._log, self._folder, self._phases, self._train = log, folder, phases, train
        intervals = (train.evaluate_every, train.checkpoint_every, train.agree_every)
        self._pauses = [every for every in intervals if every != "none"]
        self._began = 0  # first step of the phase that was seen
        self._phase = ""
        self._open: Window | None = None
        self._annotation: Any = None
        # When the last step was done, None where what follows is not a step's time.
        self._clock: float | None = None
        self._awaited = 0  # the last step that was waited for out of turn
        self._seconds: dict[str, list[float]] = {}

    def started(self, done: int, tested: int, saved: Any) -> None:
        self._log.started(done, tested, saved)
        self._began = done

    def fetched(self, seconds: float) -> None:
        self._log.fetched(seconds)
        if self._open is not None:
            with jax.profiler.TraceAnnotation(WAITED, ns=int(1e9 * seconds)):
                pass

    def dispatched(self, done: int, state: TrainState) -> None:
        self._log.dispatched(done, state)
        if self._open is not None:
            if done == self._open.first + self._open.steps - 1:
                self._wait(done, state)
                self._end(is_whole=True)
            return
        if done >= self._train.steps:
            return
        phase = self._phase_of(done)
        if phase != self._phase:
            self._phase, self._began = phase, done
        wanted, room = self._wanted(), min(self._room(done), STEPS)
        is_new = all(window.phase != phase for window in self.windows)
        is_settled = done - self._began >= min(SETTLED, wanted - 1)
        if is_new and is_settled and room >= wanted:
            self._wait(done, state)
            self._begin(Window(phase, done + 1, room, self._folder / phase))

    def stepped(self, done: int, metrics: dict[str, float]) -> None:
        self._log.stepped(done, metrics)
        now = time.perf_counter()
        is_alone = self._open is None and done > self._awaited
        if self._clock is not None and is_alone:
            phase = self._phase_of(done - 1)
            self._seconds.setdefault(phase, []).append(now - self._clock)
        self._clock = now

    def paused(self) -> None:
        self._log.paused()
        self._clock = None
        # A stop came in between: the steps so far are not those that were asked for.
        self.close()

    def evaluated(self, done: int, metrics: dict[str, float]) -> None:
        self._log.evaluated(done, metrics)

    def get_state(self) -> Any:
        return self._log.get_state()

    def untraced(self, phase: str) -> float | None:
        """Median seconds of the steps of a phase that were not traced."""
        found = self._seconds.get(phase)
        return statistics.median(found) if found else None

    def close(self) -> None:
        """Ends a trace that is under way, without keeping it."""
        if self._open is not None:
            self._end(is_whole=False)

    def _wait(self, done: int, state: TrainState) -> None:
        jax.block_until_ready(state)
        self._awaited = done

    def _begin(self, window: Window) -> None:
        shutil.rmtree(window.folder, ignore_errors=True)
        options = jax.profiler.ProfileOptions()
        # Each call of a Python function would be an event, and slow the host down.
        options.python_tracer_level = 0
        jax.profiler.start_trace(str(window.folder), profiler_options=options)
        self._annotation = jax.profiler.TraceAnnotation(WINDOW)
        self._annotation.__enter__()
        self._open = window

    def _end(self, *, is_whole: bool) -> None:
        window, self._open = self._open, None
        assert window is not None
        self._annotation.__exit__(None, None, None)
        jax.profiler.stop_trace()
        if is_whole and self._is_one_phase(window):
            self.windows.append(window)
        else:
            shutil.rmtree(window.folder, ignore_errors=True)

    def _phase_of(self, done: int) -> str:
        """The phase of the step after `done`."""
        return self._phases[self._log.course.phase[done]]

    def _is_one_phase(self, window: Window) -> bool:
        # 1-bit Adam may have frozen its variance meanwhile, by its own decision.
        steps = range(window.first - 1, window.first - 1 + window.steps)
        return {self._phase_of(step) for step in steps} == {window.phase}

    def _wanted(self) -> int:
        """Steps to trace of this phase: where pauses follow closely, or it is short,
        half of what there is in a row."""
        longest = min(*self._pauses, self._ahead(self._began))
        return min(STEPS, max(1, longest // 2))

    def _room(self, done: int) -> int:
        """Steps until the next pause or another phase; 0 before a pause."""
        until = min((every - done % every) % every for every in self._pauses)
        return min(until, self._ahead(done))

    def _ahead(self, done: int) -> int:
        """Steps after `done` until the phase or the run ends."""
        phase, steps = self._phase_of(done), range(done, self._train.steps)
        others = (step for step in steps if self._phase_of(step) != phase)
        return next(others, self._train.steps) - done
