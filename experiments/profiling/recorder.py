"""What a run of a contender is asked to do for `--profile`, and what comes of it."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from experiments.profiling.breakdown import break_down
from experiments.profiling.kinds import read_program
from experiments.profiling.profiler import Profiler
from experiments.profiling.summary import Flops, Profile
from experiments.profiling.trace import read_trace
from experiments.run_log import RunLog
from experiments.task import Task
from sfpo_jax.memory import count_flops
from sfpo_jax.parallel import Step, TrainState
from sfpo_jax.training import Train


class Recorder:
    """Profiles one contender.

    Args:
      folder: where its traces go.
    """

    def __init__(self, folder: Path) -> None:
        self.profiles: list[Profile] = []
        self._folder = folder

    @contextmanager
    def watching(
        self,
        log: RunLog,
        name: str,
        phases: tuple[str | None, ...],
        train: Train,
        step: Step,
        task: Task,
        state: TrainState,
        batch: Any,
    ) -> Iterator[Profiler]:
        """A monitor in the place of `log`; afterwards `profiles` has what it saw.

        Args:
          log: of the run.
          name: of the contender.
          phases: of its steps, in order; (None,) where all are alike.
          train: the intervals at which the run pauses are meant.
          step: what is trained by.
          task: what is trained.
          state: of which only shapes are read, now.
          batch: likewise.
        """
        # Now, for the first step takes the state away.
        program = read_program(step.compiled_text(state, batch))
        flops = _flops(step, task, state, batch)
        samples = jax.tree.leaves(batch)[0].shape[0] * jax.process_count()
        named = tuple(phase or "steps" for phase in phases)
        profiler = Profiler(log, self._folder, named, train)
        try:
            yield profiler
        finally:
            profiler.close()
        for window in profiler.windows:
            found = break_down(read_trace(window.folder), window.steps, program)
            self.profiles.append(
                Profile(
                    name,
                    window.phase,
                    window.first,
                    window.steps,
                    window.folder,
                    found,
                    profiler.untraced(window.phase) or found.step,
                    program,
                    flops,
                    samples,
                )
            )


def _flops(step: Step, task: Task, state: TrainState, batch: Any) -> Flops | None:
    """Of one device in a step; None where they cannot be counted."""
    counted, is_estimate = count_flops(step.trace(state, batch).jaxpr), False
    if counted.unknown_loops:
        # Counted as running once, they say less than the loss without the step.
        extra: dict[str, Any] = {"key": state.key} if task.has_key else {}
        if state.model_state is not None:
            extra["model_state"] = state.model_state
        if step.frozen is not None:
            extra["frozen"] = step.frozen
        loss = functools.partial(task.loss_fn, **extra)
        try:
            counted = count_flops(jax.make_jaxpr(loss)(task.shapes, batch))
        except NameError:
            # Products shared over `op` are traced inside the step alone.
            return None
        counted, is_estimate = counted._replace(total=3 * counted.total), True
    return Flops(counted.total // step.mesh.size, is_estimate)
