"""Several hosts as one run: joining it, and what its processes tell each other.

The engine is `jax.distributed`. Beside its collectives, which move arrays, it keeps a
table of short texts that every process can read; `Hosts` puts small decisions into it,
such as the folder of the run. A host here is a process, as JAX has it: with a process
for each GPU a machine has several.
"""

import contextlib
import json
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax

from sfpo_jax.parallel._watchdog import Watchdog

# Where one process waits for another, which may compile for long meanwhile. The
# watchdog ends a wait for one that is gone.
_PATIENCE_MS = 24 * 3600 * 1000


class Hosts:
    """What the processes of a run tell each other; all call the same, in one order.

    Attributes:
      rank: of this process.
      count: of all.
    """

    def __init__(
        self,
        rank: int = 0,
        count: int = 1,
        client: Any = None,
        watchdog: Watchdog | None = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        self.rank, self.count = rank, count
        self._client, self._watchdog, self._close = client, watchdog, close
        self._uses: Counter[str] = Counter()

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files and reports."""
        return self.rank == 0

    def from_first(self, name: str, make: Callable[[], Any]) -> Any:
        """What `make` gives in the first process, given to all.

        Args:
          name: of what it is about.
          make: called in the first process alone; its result goes through JSON.

        Raises:
          ValueError: `make` raised it; in every process.
        """
        if self.count == 1:
            return make()
        key = self._key(name)
        if self.is_first:
            try:
                made = {"value": make()}
            except ValueError as error:
                made = {"error": str(error)}
            self._client.key_value_set(key, json.dumps(made))
        else:
            text = self._client.blocking_key_value_get(key, _PATIENCE_MS)
            made = json.loads(text)
        if "error" in made:
            raise ValueError(made["error"])
        return made["value"]

    def wait(self, name: str) -> None:
        """Returns when all processes have called it."""
        if self.count > 1:
            self._client.wait_at_barrier(self._key(name), _PATIENCE_MS)

    def agree(self, name: str, value: str) -> str:
        """What was named first, by any process; `value` where none was before this."""
        if self.count == 1:
            return value
        # Refused where another was faster.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._client.key_value_set(f"sfpo/agreed/{name}", value)
        return self._client.blocking_key_value_get(f"sfpo/agreed/{name}", _PATIENCE_MS)

    def agreed(self, name: str) -> str | None:
        """What `agree` was given by any process so far, None for nothing."""
        if self.count == 1:
            return None
        try:
            return self._client.key_value_try_get(f"sfpo/agreed/{name}")
        except jax.errors.JaxRuntimeError:
            return None

    def progressed(self) -> None:
        """Tells the watchdog that this process has come further."""
        if self._watchdog:
            self._watchdog.progressed()

    @contextlib.contextmanager
    def failing_together(self, program: str) -> Iterator[None]:
        """Where the block fails in one process, all end, and say why in a line.

        Args:
          program: how the line begins.
        """
        try:
            yield
        except SystemExit as error:
            if error.code and self._watchdog:
                self._watchdog.fail(f"{program} ended with status {error.code}")
            raise
        except Exception as error:
            if self._watchdog is None:
                raise
            # A transfer to a process that is gone fails so.
            if isinstance(error, jax.errors.JaxRuntimeError):
                self._watchdog.end_if_peer_gone()
            traceback.print_exc()
            first_line = str(error).partition("\n")[0]
            self._watchdog.fail(f"{program}: {type(error).__name__}: {first_line}")
            raise

    def leave(self, status: int = 0) -> None:
        """Ends the run of all processes: in good order, or at once.

        Args:
          status: that this process is about to exit with; not 0: the others end, too.
        """
        if self._watchdog is None:
            return
        if status:
            self._watchdog.fail(f"host {self.rank} ended with status {status}")
        self.wait("leave")
        self._watchdog.stop()
        if self._close:
            self._close()

    def _key(self, name: str) -> str:
        self._uses[name] += 1
        return f"sfpo/{name}/{self._uses[name]}"


_current = Hosts()


def current_hosts() -> Hosts:
    """The run this process has joined; one of itself alone where it has joined none.

    Example:
      >>> hosts = current_hosts()
      >>> hosts.count, hosts.is_first, hosts.from_first("folder", lambda: "runs/a")
      (1, True, 'runs/a')
    """
    return _current


def set_current(hosts: Hosts) -> None:
    """Makes a run the one that this process has joined."""
    global _current
    _current = hosts
