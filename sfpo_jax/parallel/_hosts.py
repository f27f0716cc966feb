"""Several hosts as one run: joining it, and what its processes tell each other.

The engine is `jax.distributed`. Beside its collectives, which move arrays, it keeps a
table of short texts that every process can read; `Hosts` puts small decisions into it,
such as the folder of the run. A host here is a process, as JAX has it: with a process
for each GPU a machine has several.
"""

import contextlib
import ipaddress
import json
import os
import socket
import subprocess
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from sfpo_jax._validate import check_at_least
from sfpo_jax.parallel._watchdog import Watchdog

# How a launcher says what a process is to join: see `launch`.
COORDINATOR, HOSTS, RANK = "SFPO_COORDINATOR", "SFPO_HOSTS", "SFPO_RANK"
# Where one process waits for another, which may compile for long meanwhile. The
# watchdog ends a wait for one that is gone.
_PATIENCE_MS = 24 * 3600 * 1000


class Place(NamedTuple):
    """Which process of a run this is."""

    coordinator: str  # HOST:PORT of the first
    hosts: int
    rank: int


class Hosts:
    """What the processes of a run tell each other; all call the same, in one order.

    Attributes:
      rank: of this process.
      count: of all.
    """

    def __init__(
        self, rank: int = 0, count: int = 1, client: Any = None, watch: Any = None
    ) -> None:
        self.rank, self.count = rank, count
        self._client, self._watchdog = client, watch
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
        """The value of the first process that names one, from whichever comes first."""
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

    def _key(self, name: str) -> str:
        self._uses[name] += 1
        return f"sfpo/{name}/{self._uses[name]}"


_current = Hosts()
_started: list[subprocess.Popen[bytes]] = []


def current_hosts() -> Hosts:
    """The run this process has joined; one of itself alone where it has joined none.

    Example:
      >>> hosts = current_hosts()
      >>> hosts.count, hosts.is_first, hosts.from_first("folder", lambda: "runs/a")
      (1, True, 'runs/a')
    """
    return _current


def is_launched() -> bool:
    """Whether `python -m sfpo_jax launch` started this process."""
    return HOSTS in os.environ


def join_hosts(
    coordinator: str | None = None,
    hosts: int | None = None,
    rank: int | None = None,
    *,
    deadline: float = 30.0,
    stuck_after: float = 1800.0,
    bind: str | None = None,
) -> Hosts:
    """Makes this process part of a run on several hosts; before any use of a device.

    What is None comes from `python -m sfpo_jax launch`, or is found by JAX under SLURM,
    Open MPI and Kubernetes. A watchdog then ends this process, and names the cause,
    when another one is gone or stuck.

    Args:
      coordinator: HOST:PORT on the first host, where all meet. It listens on this
        address alone, and what it is told is not encrypted.
      hosts: number of processes.
      rank: of this process, from 0.
      deadline: seconds without a sign of life after which a process counts as gone.
      stuck_after: seconds for which some processes may wait for others that are alive.
      bind: HOST:PORT to listen on in place of `coordinator`, of the first process.

    Returns:
      The run, also from `current_hosts`.

    Raises:
      ValueError: something is missing, out of range, or a port that cannot be used.
      RuntimeError: this process has joined a run, or has used JAX before.
    """
    global _current
    if _current.count > 1:
        raise RuntimeError("this process has joined a run: call `join_hosts` once.")
    check_at_least("deadline", deadline, 1, "seconds without a sign of life")
    check_at_least("stuck_after", stuck_after, 1, "seconds of waiting for another")
    place, devices = _find_place(coordinator, hosts, rank, os.environ)
    if place.hosts == 1:
        return _current
    if place.rank == 0:
        _start_coordinator(bind or place.coordinator, place.hosts, deadline)
    # Python's own handler of SIGTERM lets all hosts save the same step.
    jax.config.update("jax_enable_preemption_service", False)
    _bind_gloo(place.coordinator)
    jax.distributed.initialize(
        place.coordinator,
        place.hosts,
        place.rank,
        local_device_ids=devices,
        cluster_detection_method="deactivate",
        # Of JAX's own in this process, which nobody asks: see `_coordinator`.
        coordinator_bind_address="127.0.0.1:0",
        heartbeat_timeout_seconds=_heartbeat(deadline),
    )
    from jax._src import distributed

    client = distributed.global_state.client
    watchdog = Watchdog(client, place.rank, place.hosts, deadline, stuck_after)
    _current = Hosts(place.rank, place.hosts, client, watchdog)
    return _current


def _find_place(
    coordinator: str | None,
    hosts: int | None,
    rank: int | None,
    environ: Mapping[str, str],
) -> tuple[Place, Any]:
    """(what to join, the local devices of this process or None for all)."""
    coordinator = coordinator or environ.get(COORDINATOR)
    if hosts is None and HOSTS in environ:
        hosts = int(environ[HOSTS])
    if rank is None and RANK in environ:
        rank = int(environ[RANK])
    devices = None
    if listed := environ.get("JAX_LOCAL_DEVICE_IDS"):
        devices = [int(number) for number in listed.split(",")]
    if None in (coordinator, hosts, rank):
        from jax._src import clusters

        detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
        coordinator, hosts, rank, devices = detect(
            coordinator, hosts, rank, devices, None, 300
        )
    given = {"coordinator": coordinator, "hosts": hosts, "rank": rank}
    missing = [name for name, value in given.items() if value is None]
    if missing or coordinator is None or hosts is None or rank is None:
        raise ValueError(
            f"`{missing[0]}` is missing, and neither SLURM, Open MPI nor Kubernetes "
            "says it: give coordinator (HOST:PORT of the first host), hosts and rank, "
            "or start with python -m sfpo_jax launch."
        )
    check_at_least("hosts", hosts, 1, "a number of processes")
    if not 0 <= rank < hosts:
        raise ValueError(
            f"`rank` must lie in [0, {hosts}), got {rank}: hosts count from 0."
        )
    _, colon, port = coordinator.rpartition(":")
    if not colon or not port.isdigit():
        raise ValueError(
            f"`coordinator` must be HOST:PORT, got '{coordinator}': write for example "
            "10.0.0.1:7070, an address of the first host."
        )
    return Place(coordinator, hosts, rank), devices


def _heartbeat(deadline: float) -> int:
    """Seconds after which JAX aborts everyone, in C++: the watchdog speaks first."""
    return int(3 * deadline) + 60


def _start_coordinator(address: str, hosts: int, deadline: float) -> None:
    """Starts the process that all others meet in; it ends after this one."""
    script = Path(__file__).with_name("_coordinator.py")
    # Longer than the others need to find this process gone.
    linger = 2 * deadline
    process = subprocess.Popen(
        [
            sys.executable,
            str(script),
            *(address, str(hosts), str(linger), str(_heartbeat(deadline))),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        # Ctrl-C in a terminal is for the run, which still needs it.
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    with process.stdout:
        is_ready = process.stdout.readline() == b"ready\n"
    if not is_ready:
        process.stdin.close()
        process.wait()
        raise ValueError(
            f"`coordinator` cannot listen on {address}: the port is taken, or the "
            "address is not of the first host; take another."
        )
    # Its input stays open as long as this process lives, whatever becomes of it.
    _started.append(process)


def _bind_gloo(coordinator: str) -> None:
    """Keeps the CPU's collectives on the loopback device where the coordinator is.

    Gloo listens on the address of the host's own name, which others may reach.
    """
    host = coordinator.rpartition(":")[0].strip("[]")
    try:
        address = ipaddress.ip_address(socket.gethostbyname(host))
    except OSError:
        return
    if not address.is_loopback:
        return
    from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

    make: Callable[..., Any] = _jax.make_gloo_tcp_collectives

    def make_local(**options: Any) -> Any:
        return make(**{"hostname": str(address), **options})

    _jax.make_gloo_tcp_collectives = make_local
