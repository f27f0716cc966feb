"""SIGTERM and Ctrl-C as a flag that a loop reads where it can save and leave.

With several hosts, a signal to one of them ends all at the same place.
"""

import contextlib
import itertools
import signal
from collections.abc import Iterator
from types import FrameType

from sfpo_jax.parallel import Hosts, current_hosts

# Each request has a name of its own; all hosts count alike.
_numbers = itertools.count()


# From a request to the end, in questions: see `Stop`.
_NOTICE = 2


class Stop:
    """Whether the program was asked to end.

    With several hosts all get the same answer to the same question: whoever is asked to
    end names the question, the second from now, at which all will be told so. For that
    all ask in the same order, and between two questions all take part in a collective
    whose result is waited for before the question after the next, or `meet`. Then
    nobody is more than two questions ahead, so nobody can have passed the one named.

    Args:
      hosts: None for the run that this process has joined.
    """

    def __init__(self, hosts: Hosts | None = None) -> None:
        self._hosts = hosts or current_hosts()
        self._name = f"stop/{next(_numbers)}"
        self._wanted = False
        self._asked = 0
        self._end: int | None = None  # the question that is answered with yes

    @property
    def wanted(self) -> bool:
        """Whether this process was asked."""
        return self._wanted

    @property
    def requested(self) -> bool:
        """Whether to end here; a question that all hosts ask together."""
        if self._hosts.count == 1:
            return self._wanted
        self._hosts.progressed()
        self._asked += 1
        if self._end is None:
            if self._wanted:
                named = self._hosts.agree(self._name, str(self._asked + _NOTICE))
            else:
                named = self._hosts.agreed(self._name)
            self._end = None if named is None else int(named)
        return self._end is not None and self._asked >= self._end

    @property
    def requested_alone(self) -> bool:
        """Whether to end here, of a process without others; no question to them."""
        return self._hosts.count == 1 and self._wanted

    def meet(self) -> bool:
        """Asks where no collective keeps the hosts together, and waits for all."""
        answer = self.requested
        self._hosts.wait("stop")
        return answer

    def request(self, is_wanted: bool = True) -> None:
        """Asks the loop to end after the step at hand, or takes it back."""
        self._wanted = is_wanted


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
        if stop.wanted and number == signal.SIGINT:
            raise KeyboardInterrupt
        stop.request()

    before = {n: signal.signal(n, handle) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
