"""The coordinator of a run on several hosts, in a process of its own.

    python _coordinator.py HOST:PORT HOSTS LINGER HEARTBEAT

JAX's own place for it is the process of the first host, with which it would die: the
others would be aborted at once, without a word about who is gone. This one they can
still ask. It ends at a line on its standard input, or `LINGER` seconds after that ends.
"""

import sys
import time

# Of JAX this needs the library alone; to import JAX itself takes seconds.
from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]


def main(address: str, hosts: int, linger: float, heartbeat: int) -> None:
    """Serves until the host that started this says so, or is gone for a while.

    Args:
      address: to listen on.
      hosts: processes that will connect.
      linger: seconds for the others to find out who is gone.
      heartbeat: seconds without a sign of a process after which JAX ends the others.
    """
    service = _jax.get_distributed_runtime_service(
        address, hosts, heartbeat_timeout=heartbeat
    )
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if not sys.stdin.readline():
        # The first host died, and the others are to find that out here.
        time.sleep(linger)
    service.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
