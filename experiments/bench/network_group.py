"""The processes of one kind of host, which `experiments.bench.network` gives orders."""

import json
import os
import subprocess
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.bench.namespaces import Loopback, Namespaces

_ANSWER = '{"answer"'
_SECONDS = 900  # that an order may take; a training over a slow link takes minutes

# One core a host, as one machine plays them all.
_ENVIRON = {
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "2",
}


class Group:
    """One process on each host; a context manager that ends them.

    Args:
      lab: the hosts.
      python: the interpreter.
      module: what each of them runs.
      port: where they meet, on the first host.
      batch: rows of one host.
      task: the file of the task.
      logs: a folder for what they print as errors.
    """

    def __init__(
        self,
        lab: Namespaces | Loopback,
        python: str,
        module: str,
        port: int,
        batch: int,
        task: Path,
        logs: Path,
    ) -> None:
        self._children: list[Any] = []
        self._logs: list[Path] = []
        hosts, cores = len(lab.interfaces), sorted(os.sched_getaffinity(0))
        self._threads = ThreadPoolExecutor(hosts)
        for host, interface in enumerate(lab.interfaces):
            meet = f"{lab.ip(0)}:{port}"
            words = [str(host), str(hosts), meet, interface, str(batch), str(task)]
            pinned = ["taskset", "-c", str(cores[host % len(cores)])]
            log = logs / f"{module.rpartition('.')[2]}{host}.log"
            self._logs.append(log)
            with log.open("w", encoding="utf-8") as errors:
                child = lab.start(
                    host,
                    [*pinned, python, "-m", module, *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    env=os.environ | _ENVIRON | {"GLOO_SOCKET_IFNAME": interface},
                )
            self._children.append(child)

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *error: object) -> None:
        for child in self._children:
            child.kill()
            child.wait()
        # Whoever still waits for a line has got its end.
        self._threads.shutdown()
        for child in self._children:
            child.stdout.close()
            with suppress(BrokenPipeError):
                child.stdin.close()

    def ask(self, do: str, **arguments: Any) -> list[Any]:
        """The answers of all hosts to an order.

        Raises:
          RuntimeError: a process that ended, with its last words, or is stuck.
        """
        order = json.dumps({"do": do, **arguments}) + "\n"
        for child in self._children:
            child.stdin.write(order)
            child.stdin.flush()
        places = range(len(self._children))
        waiting = [self._threads.submit(self._answer, place) for place in places]
        done, missing = wait(waiting, _SECONDS, FIRST_EXCEPTION)
        for one in done:
            one.result()
        if missing:
            raise RuntimeError(f"no answer to {order.strip()} in {_SECONDS} s")
        return [one.result() for one in waiting]

    def _answer(self, place: int) -> Any:
        child = self._children[place]
        # Gloo greets on the same stream.
        line = child.stdout.readline()
        while line and not line.startswith(_ANSWER):
            line = child.stdout.readline()
        if not line:
            raise RuntimeError(f"host {place} ended: {_last_line(self._logs[place])}")
        return json.loads(line)["answer"]


def with_torch(python: str) -> str | None:
    """The interpreter, if it has PyTorch."""
    try:
        done = subprocess.run(
            [python, "-c", "import torch"], capture_output=True, check=False
        )
    except OSError:
        return None
    return python if done.returncode == 0 else None


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "without a word"
