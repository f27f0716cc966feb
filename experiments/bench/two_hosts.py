"""Two hosts on one machine: network namespaces joined by a link of any bandwidth.

A veth pair joins them, a token bucket at each end holds back what is sent. Needs root
and iproute2.
"""

import os
import shutil
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

_NETWORK = "10.231.77"
_PORT = 7781
_HZ = 250  # of the kernel: a bucket must hold what passes in one tick


def problem() -> str | None:
    """Why there can be no two hosts here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not found: install iproute2" if missing else None


class TwoHosts:
    """A context in which two namespaces exist.

    Attributes:
      address: of the first, with a port, for `jax.distributed`.
    """

    address = f"{_NETWORK}.1:{_PORT}"

    def __init__(self) -> None:
        # Of this process: two benchmarks do not meet in one namespace.
        self._names = [f"sfpo{os.getpid()}{end}" for end in "ab"]
        self._ends = [f"v{os.getpid()}{end}" for end in "ab"]
        self._etc = [Path("/etc/netns") / name for name in self._names]

    def __enter__(self) -> "TwoHosts":
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def limit(self, bits: float | None) -> None:
        """Lets each side send so many bits a second; None: as many as it can."""
        for name, end in zip(self._names, self._ends, strict=True):
            device = ["-n", name, "qdisc"]
            _run("tc", *device, "del", "dev", end, "root", is_checked=False)
            if bits is not None:
                burst = max(65536, int(bits / 8 / _HZ))
                shape = ["rate", f"{bits:.0f}bit", "burst", f"{burst}b"]
                _run(
                    "tc",
                    *device,
                    *["add", "dev", end, "root", "tbf"],
                    *shape,
                    *["latency", "50ms"],
                )

    def start(self, host: int, command: Sequence[str], **options: Any) -> Any:
        """A process on one of the hosts; options are those of `subprocess.Popen`."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self._names[host], *command], **options
        )

    def _make(self) -> None:
        for place, name in enumerate(self._names):
            _run("ip", "netns", "add", name)
            # Gloo looks for its own address by the machine's name.
            self._etc[place].mkdir(parents=True, exist_ok=True)
            own = f"{_NETWORK}.{place + 1} {socket.gethostname()}\n"
            (self._etc[place] / "hosts").write_text(f"127.0.0.1 localhost\n{own}")
        (a, b), (left, right) = self._names, self._ends
        veth = ["type", "veth", "peer", "name", right, "netns", b]
        _run("ip", "link", "add", left, "netns", a, *veth)
        for place, (name, end) in enumerate(
            zip(self._names, self._ends, strict=True), 1
        ):
            _run("ip", "-n", name, "addr", "add", f"{_NETWORK}.{place}/24", "dev", end)
            _run("ip", "-n", name, "link", "set", end, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for name, etc in zip(self._names, self._etc, strict=True):
            _run("ip", "netns", "del", name, is_checked=False)
            shutil.rmtree(etc, ignore_errors=True)


def _run(*command: str, is_checked: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if is_checked and done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
