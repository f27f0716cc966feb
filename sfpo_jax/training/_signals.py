"""SIGTERM and Ctrl-C as a flag that a loop reads where it can save and leave."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType


class Stop:
    """Whether the program was asked to end."""

    def __init__(self) -> None:
        self.requested = False

    def request(self) -> None:
        """Asks the loop to end after the step at hand."""
        self.requested = True


@contextlib.contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Turns SIGTERM and SIGINT into a flag while the block runs.

    A second Ctrl-C raises KeyboardInterrupt at once. A signal that arrives while XLA
    compiles is seen when it is done.

    Returns:
      A context manager whose value has `requested`.

    Raises:
      ValueError: outside the main thread, where Python sets no handlers.

    Example:
      >>> import os, signal
      >>> with stop_on_signals() as stop:
      ...     os.kill(os.getpid(), signal.SIGTERM)
      ...     print(stop.requested)
      True
    """
    stop = Stop()

    def handle(number: int, frame: FrameType | None) -> None:
        if stop.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.request()

    before = {n: signal.signal(n, handle) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
