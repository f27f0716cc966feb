"""A watchdog: it ends this process, and says why, when another is gone or stuck.

A collective waits for ever for a process that was stopped, and fails with a line about
a socket where one died. So every process writes a sign of life into the coordinator's
table once a second, and reads those of the others in a thread, which can speak while
the program waits.
"""

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_BEAT = 1.0  # seconds from one sign of life to the next
_BEATS, _FAILED = "sfpo/beats/", "sfpo/failed/"
STATUS = 1  # of a process that the watchdog ends


class Sign(NamedTuple):
    """What a process says of itself."""

    name: str  # of the machine and the process
    beat: int  # goes up once a second
    progress: int  # goes up with the program


class _Seen(NamedTuple):
    sign: Sign
    beat_at: float  # when its beat last changed, by the clock of this process
    progress_at: float  # when its progress last changed


class Peers:
    """Signs of life of all processes, and what follows from them.

    Pure of clocks and networks: times come in, verdicts go out.

    Args:
      rank: of this process.
      deadline: seconds without a sign after which a process counts as gone.
      stuck_after: seconds for which processes may wait for one that is behind.
    """

    def __init__(self, rank: int, deadline: float, stuck_after: float) -> None:
        self._rank, self._deadline, self._stuck_after = rank, deadline, stuck_after
        self._seen: dict[int, _Seen] = {}

    def saw(self, signs: Mapping[int, Sign], now: float) -> None:
        """Takes the signs that were read at `now`, in seconds."""
        for rank, sign in signs.items():
            old = self._seen.get(rank)
            beat_at = old.beat_at if old and old.sign.beat == sign.beat else now
            same = old and old.sign.progress == sign.progress
            progress_at = old.progress_at if old and same else now
            self._seen[rank] = _Seen(sign, beat_at, progress_at)

    def gone(self, now: float) -> str | None:
        """The first process that has been silent for too long, in words."""
        for rank, seen in sorted(self._seen.items()):
            silent = now - seen.beat_at
            if rank != self._rank and silent > self._deadline:
                return (
                    f"host {rank} ({seen.sign.name}) has given no sign of life for "
                    f"{silent:.0f} s: it was killed or stopped, or its network is "
                    "down; start all hosts again, and the run goes on from its last "
                    "checkpoint"
                )
        return None

    def stuck(self, now: float) -> str | None:
        """The process that others have waited for too long, in words."""
        if not self._seen:
            return None
        behind = min(self._seen, key=lambda rank: self._seen[rank].sign.progress)
        ahead = max(seen.sign.progress for seen in self._seen.values())
        seen = self._seen[behind]
        waited = now - max(seen.progress_at for seen in self._seen.values())
        if seen.sign.progress == ahead or waited <= self._stuck_after:
            return None
        who = "this host" if behind == self._rank else f"host {behind}"
        return (
            f"{who} ({seen.sign.name}) is alive but has not come further for "
            f"{waited:.0f} s, and the others wait for it: look at what it does, for "
            "example with py-spy dump; the run goes on from its last checkpoint"
        )


class Watchdog:
    """Watches over the other processes from now on.

    Args:
      client: of `jax.distributed`.
      rank: of this process.
      count: of all.
      deadline: seconds without a sign after which a process counts as gone.
      stuck_after: seconds for which processes may wait for one that is behind.
      end: what ends this process; for tests.
    """

    def __init__(
        self,
        client: Any,
        rank: int,
        count: int,
        deadline: float,
        stuck_after: float,
        end: Callable[[str], None] | None = None,
    ) -> None:
        self._client, self._rank = client, rank
        self._deadline = deadline
        self._peers = Peers(rank, deadline, stuck_after)
        self._end = end or _end
        self._progress = 0
        self._failed: str | None = None  # which process ended for a reason of its own
        self._answered = time.monotonic()
        # All have joined just now; one that dies before its first sign is missed, too.
        joined = {
            other: Sign("not heard of since it joined", 0, 0) for other in range(count)
        }
        self._peers.saw(joined, self._answered)
        self._stopped = threading.Event()
        for work in (self._beat, self._guard):
            threading.Thread(target=work, name="sfpo watchdog", daemon=True).start()

    def progressed(self) -> None:
        """This process has come further."""
        self._progress += 1

    def stop(self) -> None:
        """Ends the watch."""
        self._stopped.set()

    def fail(self, reason: str) -> None:
        """Ends this process, and with this reason, a line, the others."""
        # Without a coordinator the others end for that.
        with contextlib.suppress(Exception):
            self._client.key_value_set(f"{_FAILED}{self._rank}", reason)
        self._end(reason)

    def end_if_peer_gone(self) -> None:
        """Ends this process where a peer turns out to be gone.

        A transfer to it fails at once; its silence is known after the deadline only,
        so this takes as long.
        """
        until = time.monotonic() + self._deadline + 3 * _BEAT
        while time.monotonic() < until:
            if verdict := self._verdict():
                self._end(verdict)
            time.sleep(_BEAT / 4)

    def _verdict(self) -> str | None:
        now = time.monotonic()
        silent = now - self._answered
        if silent > self._deadline:
            return (
                f"the coordinator on host 0 has not answered for {silent:.0f} s: that "
                "machine or the network to it is down; start all hosts again, and the "
                "run goes on from its last checkpoint"
            )
        return self._failed or self._peers.gone(now) or self._peers.stuck(now)

    def _beat(self) -> None:
        beat, name = 0, f"{socket.gethostname()}, process {os.getpid()}"
        while not self._stopped.wait(_BEAT):
            beat += 1
            sign = json.dumps(Sign(name, beat, self._progress))
            try:
                self._client.key_value_set(
                    f"{_BEATS}{self._rank}", sign, allow_overwrite=True
                )
                signs = self._read(_BEATS)
                failed = self._read(_FAILED)
            except Exception:
                continue
            self._answered = time.monotonic()
            held = {rank: Sign(*json.loads(text)) for rank, text in signs.items()}
            self._peers.saw(held, self._answered)
            for rank, reason in failed.items():
                if rank != self._rank:
                    self._failed = f"host {rank} ended: {reason}"

    def _read(self, folder: str) -> dict[int, str]:
        found = self._client.key_value_dir_get(folder)
        return {int(key.rpartition("/")[2]): text for key, text in found}

    def _guard(self) -> None:
        while not self._stopped.wait(_BEAT / 2):
            if verdict := self._verdict():
                self._end(verdict)
                return


def _end(reason: str) -> None:
    sys.stderr.write(f"sfpo_jax: {reason}\n")
    sys.stderr.flush()
    # Nothing else ends a thread that waits in a collective.
    os._exit(STATUS)
