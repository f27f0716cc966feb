"""Joining a run on several hosts: who is who, the coordinator, and the watchdog."""

import ipaddress
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from sfpo_jax._validate import check_at_least
from sfpo_jax.parallel._hosts import Hosts, current_hosts, set_current
from sfpo_jax.parallel._watchdog import Watchdog

# How a launcher says what a process is to join: see `launch`.
COORDINATOR, HOSTS, RANK = "SFPO_COORDINATOR", "SFPO_HOSTS", "SFPO_RANK"

# The coordinator that this process has started.
_started: list[subprocess.Popen[bytes]] = []


class Place(NamedTuple):
    """Which process of a run this is."""

    coordinator: str  # HOST:PORT of the first
    hosts: int
    rank: int


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

    Example:
      >>> import sfpo_jax as sfpo
      >>> hosts = sfpo.join_hosts("127.0.0.1:7070", hosts=1, rank=0)
      >>> hosts.count, hosts.is_first
      (1, True)
    """
    if current_hosts().count > 1:
        raise RuntimeError("this process has joined a run: call `join_hosts` once.")
    check_at_least("deadline", deadline, 1, "seconds without a sign of life")
    check_at_least("stuck_after", stuck_after, 1, "seconds of waiting for another")
    place, devices = _find_place(coordinator, hosts, rank, os.environ)
    if place.hosts == 1:
        return current_hosts()
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
    set_current(Hosts(place.rank, place.hosts, client, watchdog, _close))
    return current_hosts()


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
    linger = deadline + 10
    # An earlier run's may linger, and gRPC would share the port with it.
    _wait_for_port(address, linger + 5)
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
            f"`coordinator` cannot listen on {address}: it is not an address of the "
            "first host, or the port is not free; take another."
        )
    # Its input stays open as long as this process lives, whatever becomes of it.
    _started.append(process)


def _wait_for_port(address: str, seconds: float) -> None:
    """Returns when nobody listens at an address, or raises ValueError."""
    host, _, port = address.rpartition(":")
    until = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection((host.strip("[]"), int(port)), 1.0).close()
        except OSError:
            return
        if time.monotonic() > until:
            raise ValueError(
                f"`coordinator` cannot listen on {address}: another program does; end "
                "it, or take another port."
            )
        time.sleep(0.5)


def _close() -> None:
    """Leaves `jax.distributed` with all others, and ends the coordinator."""
    jax.distributed.shutdown()
    for process in _started:
        assert process.stdin is not None
        process.stdin.write(b"done\n")
        process.stdin.close()
        process.wait()
    _started.clear()


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
