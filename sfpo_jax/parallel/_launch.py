"""`python -m sfpo_jax launch`: several processes on this machine, as hosts of a run."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import IO

from sfpo_jax._validate import check_at_least
from sfpo_jax.parallel._join import COORDINATOR, HOSTS, RANK

# What the others get to end by themselves when one has failed: longer than the
# watchdog needs to name it.
_GRACE = 60.0
# Seconds for what they wrote last to be shown.
_LAST_LINES = 5.0


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `launch`."""
    parser.add_argument(
        "--hosts", type=int, default=2, help="processes to start (2 where not given)"
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        help="after --, what each runs, e.g. python -m experiments.vit_l",
    )


def run_launch(options: argparse.Namespace) -> int:
    """Starts the processes, shows what they write, and waits for them.

    They meet at a free port of the loopback device, which nobody else can reach.

    Args:
      options: `hosts`, and `command` with or without a leading "--".

    Returns:
      0 where all end so; else the status of the first that does not, 128 + n for one
      that signal n ended.
    """
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        check_at_least("--hosts", options.hosts, 1, "a number of processes")
        if not command:
            raise ValueError(
                "`command` is missing: write, for example, python -m sfpo_jax launch "
                "--hosts 2 -- python -m experiments.vit_l"
            )
        processes, readers = _start(command, options.hosts)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"python -m sfpo_jax launch: {error}\n")
        return 2
    with _passed_on(processes):
        status = _wait(processes)
    for reader in readers:
        # A program that a host has left behind may keep its output open.
        reader.join(_LAST_LINES)
    return status


def _start(
    command: Sequence[str], hosts: int
) -> tuple[list[subprocess.Popen[bytes]], list[threading.Thread]]:
    """(the processes, the threads that show what all but the first write)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes, readers = [], []
    for rank in range(hosts):
        own = {COORDINATOR: f"127.0.0.1:{port}", HOSTS: str(hosts), RANK: str(rank)}
        process = subprocess.Popen(
            command,
            env={**os.environ, **own},
            # The first is looked at as if it were alone, progress bars and all.
            stdout=None if rank == 0 else subprocess.PIPE,
            stderr=None if rank == 0 else subprocess.STDOUT,
            # Ctrl-C reaches each once, from here.
            start_new_session=True,
        )
        processes.append(process)
        if process.stdout is not None:
            reader = threading.Thread(target=_show, args=(rank, process.stdout))
            reader.daemon = True
            reader.start()
            readers.append(reader)
    return processes, readers


def _show(rank: int, lines: IO[bytes]) -> None:
    for line in lines:
        sys.stdout.buffer.write(f"[host {rank}] ".encode() + line)
        sys.stdout.buffer.flush()


@contextmanager
def _passed_on(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Signals to this program go to all of them."""

    def handle(number: int, frame: FrameType | None) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> int:
    """The first status that is not 0; the others then have `_GRACE` seconds to end."""
    first, until = 0, float("inf")
    while True:
        ends = [process.poll() for process in processes]
        for rank, code in enumerate(ends):
            if code and not first:
                first, until = _status(code), time.monotonic() + _GRACE
                sys.stderr.write(f"host {rank} ended: {_in_words(code)}\n")
        if None not in ends:
            return first
        if time.monotonic() > until:
            for process in processes:
                process.kill()
        time.sleep(0.1)


def _status(code: int) -> int:
    """As a shell has it: 128 + n for signal n."""
    return code if code >= 0 else 128 - code


def _in_words(code: int) -> str:
    if code >= 0:
        return f"status {code}"
    return f"by {signal.Signals(-code).name}"
