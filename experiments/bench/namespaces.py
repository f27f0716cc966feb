"""Hosts on one machine: network namespaces joined by links of any bandwidth.

A bridge in a namespace of its own is the switch. A veth pair leads from it to each
host, where a token bucket holds back what the host sends. Needs root and iproute2.
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
PORT = 7781  # and the one above it
_HZ = 250  # of the kernel: a bucket must hold what passes in one tick
_BRIDGE = "br0"


def problem() -> str | None:
    """Why there can be no hosts here; None where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    return f"{' and '.join(missing)} not found: install iproute2" if missing else None


class Loopback:
    """Processes of this machine that stand for hosts, where namespaces cannot be made.

    What one host sends cannot be told from what another does, nor be held back.
    """

    def __init__(self, count: int) -> None:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            self.port = one.getsockname()[1]
        self.interfaces = ["lo"] * count

    @staticmethod
    def ip(host: int) -> str:
        """The address of a host."""
        del host
        return "127.0.0.1"

    def __enter__(self) -> "Loopback":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def limit(self, bits: float | None) -> None:
        """Does nothing, for it cannot.

        Raises:
          ValueError: where something was to be done.
        """
        if bits is not None:
            raise ValueError(f"`bits` must be None over loopback, got {bits:g}.")

    def start(self, host: int, command: Sequence[str], **options: Any) -> Any:
        """A process; options are those of `subprocess.Popen`."""
        del host
        return subprocess.Popen(list(command), **options)


class Namespaces:
    """A context in which some hosts exist.

    Args:
      count: of the hosts.

    Attributes:
      address: of the first host, with a port, for `jax.distributed`.
      port: of that address.
      names: the namespaces of the hosts.
      interfaces: the name of each host's end of its link.
    """

    def __init__(self, count: int) -> None:
        # Of this process: two benchmarks do not meet in one namespace.
        self.port = PORT
        self.address = f"{self.ip(0)}:{PORT}"
        self.names = [f"sfpo{os.getpid()}h{place}" for place in range(count)]
        self.interfaces = [f"v{os.getpid()}h{place}" for place in range(count)]
        self._switch = f"sfpo{os.getpid()}s"
        self._etc = [Path("/etc/netns") / name for name in self.names]

    @staticmethod
    def ip(host: int) -> str:
        """The address of a host."""
        return f"{_NETWORK}.{host + 1}"

    def __enter__(self) -> "Namespaces":
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
        """Lets each host send so many bits a second; None: as many as it can."""
        for name, end in zip(self.names, self.interfaces, strict=True):
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
            ["ip", "netns", "exec", self.names[host], *command], **options
        )

    def _make(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", _BRIDGE, "type", "bridge")
        _run("ip", "-n", self._switch, "link", "set", _BRIDGE, "up")
        for place, name in enumerate(self.names):
            _run("ip", "netns", "add", name)
            # Gloo looks for its own address by the machine's name.
            self._etc[place].mkdir(parents=True, exist_ok=True)
            own = f"{self.ip(place)} {socket.gethostname()}\n"
            (self._etc[place] / "hosts").write_text(f"127.0.0.1 localhost\n{own}")
            self._connect(place)

    def _connect(self, place: int) -> None:
        """Lays the link from a host to the switch."""
        name, end, port = self.names[place], self.interfaces[place], f"port{place}"
        pair = ["type", "veth", "peer", "name", port, "netns", self._switch]
        _run("ip", "link", "add", end, "netns", name, *pair)
        _run("ip", "-n", self._switch, "link", "set", port, "master", _BRIDGE, "up")
        _run("ip", "-n", name, "addr", "add", f"{self.ip(place)}/24", "dev", end)
        _run("ip", "-n", name, "link", "set", end, "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for name in (*self.names, self._switch):
            _run("ip", "netns", "del", name, is_checked=False)
        for etc in self._etc:
            shutil.rmtree(etc, ignore_errors=True)


def _run(*command: str, is_checked: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if is_checked and done.returncode:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
