"""`experiments.vit_l` in a process that ends itself at a given point.

    python -m experiments.bench.resume_child POINT STAMP OPTIONS...

POINT is SIGNAL@WHERE@STEP@DELAY or `none`; WHERE is `step` (in flight), `test` (at its
first batch) or `save` (DELAY seconds after it began). STAMP is a file for the time of
the signal.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments import contender, output, run_log, vit_l
from sfpo_jax.training import Checkpoints


def main(point: str, stamp: Path, options: list[str]) -> int:
    """Hooks the point and runs the experiment; its exit status."""
    if point != "none":
        kind, where, step, delay = point.split("@")

        def end() -> None:
            stamp.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.Signals[kind])

        _hook(where, int(step), float(delay), end)
    return vit_l.main(options)


def _hook(where: str, step: int, delay: float, end: Callable[[], None]) -> None:
    sent, test = run_log.RunLog.dispatched, contender.evaluate
    point, now = (where, step), 0

    def dispatched(self: Any, done: int, state: Any) -> None:
        nonlocal now
        now = done
        if point == ("step", done):
            end()
        sent(self, done, state)

    def evaluate(*arguments: Any) -> Any:
        if point == ("test", now):
            end()
        return test(*arguments)

    class TimedCheckpoints(Checkpoints):
        def save(
            self, step: int, state: Any, data_state: Any = None, extra: Any = None
        ) -> None:
            if point == ("save", step):
                # From another thread: the main one may be anywhere in the save.
                threading.Timer(delay, end).start()
            super().save(step, state, data_state, extra)

    run_log.RunLog.dispatched = dispatched
    contender.evaluate = evaluate
    output.Checkpoints = TimedCheckpoints


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:]))
