"""What a run of a contender is asked to do for `--profile`, and what comes of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from experiments.profiling.breakdown import break_down
from experiments.profiling.kinds import read_program
from experiments.profiling.profiler import Profiler
from experiments.profiling.summary import Profile
from experiments.profiling.trace import read_trace
from experiments.run_log import RunLog
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
          state: of which only shapes are read, now.
          batch: likewise.
        """
        # Now, for the first step takes the state away.
        program = read_program(step.compiled_text(state, batch))
        flops = _flops(step, state, batch)
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


def _flops(step: Step, state: TrainState, batch: Any) -> int | None:
    """Of one device in a step; None where a loop's length is not known."""
    counted = count_flops(step.trace(state, batch).jaxpr)
    return None if counted.unknown_loops else counted.total // step.mesh.size
