"""Two hosts for real, as processes on this machine: equal bytes, one end, named faults.

from typing import Any
All cases are runs of `host_child.py` through the launcher, side by side.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import pytest

from sfpo_jax.parallel import Hosts, current_hosts, join_hosts
from sfpo_jax.parallel._join import _find_place, _start_coordinator, _wait_for_port
from sfpo_jax.training import Checkpoints
from tests.hosts_table import Table

CHILD = Path(__file__).with_name("host_child.py")
DEADLINE = 3.0


class Run:
    """A run of the child, on hosts or alone."""

    def __init__(
        self, folder: Any, steps: int = 20, seconds: float = 0.0, hosts: int = 2
    ) -> None:
        launch = ["-m", "sfpo_jax", "launch", "--hosts", str(hosts), "--"]
        launch = [sys.executable, *launch] if hosts else []
        self.process = subprocess.Popen(
            [
                *launch,
                *(sys.executable, str(CHILD), str(folder), str(steps)),
                *(str(seconds), str(DEADLINE)),
            ],
            env={**os.environ, "XLA_FLAGS": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []

    def wait_for(self, pattern: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return
        raise AssertionError("".join(self.lines))

    def host(self, rank: int):
        """The process of a host, by what the launcher put into its environment."""
        children = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        for child in Path(children).read_text().split():
            environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            if f"SFPO_RANK={rank}".encode() in environ:
                return int(child)
        raise AssertionError(f"no host {rank}")

    def end(self):
        """(status, all it wrote)."""
        rest, _ = self.process.communicate(timeout=240)
        return self.process.returncode, "".join(self.lines) + rest

    def losses(self):
        status, text = self.end()
        assert status == 0, text
        return re.findall(r"step (\d+) loss (\S+)", text)


def manifest(folder: Any, step: Any):
    """The manifest of a checkpoint."""
    text = (folder / f"step_{step:08d}" / "MANIFEST").read_text()
    return json.loads(text.partition("\n")[2])


def restored(folder: Any, step: Any):
    """Every array of a checkpoint, in the order it was saved."""
    import numpy as np
    import orbax.checkpoint as ocp

    path = (folder / f"step_{step:08d}" / "arrays").absolute()
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    metadata: Any = checkpointer.metadata(path).item_metadata
    names = metadata.tree
    arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), names)
    found = checkpointer.restore(
        path, args=ocp.args.PyTreeRestore(restore_args=arguments)
    )
    return [found[name] for name in sorted(found)]


@pytest.mark.slow
def test_two_hosts_give_the_bytes_of_two_devices_and_four_go_on(
    tmp_path: Path,
) -> None:
    together = Run(tmp_path / "two", hosts=2)
    alone = Run(tmp_path / "one", hosts=0)
    assert len(losses := together.losses()) == 20
    assert losses == alone.losses()
    one, two = restored(tmp_path / "one", 20), restored(tmp_path / "two", 20)
    assert len(one) == len(two) > 8
    assert all(a.tobytes() == b.tobytes() for a, b in zip(one, two, strict=True))
    # From either, a run of other hosts goes on.
    more = Run(tmp_path / "one", hosts=4, steps=23).losses()
    assert [int(step) for step, _ in more] == [21, 22, 23]


# Steps around tests (every 7) and checkpoints (every 10), in both phases.
STEPS = (2, 6, 7, 9, 10, 12, 13, 14, 19, 20)


def cases(*kinds: tuple[str, int]):
    """Each kind at some steps, 20 in all; one at one step where not all are asked for.

    The kinds are (what, rank).
    """
    few = 20 // len(kinds)
    wanted = [(kinds[-1], 12)]
    rest = [(k, s) for k in kinds for s in STEPS[-few:] if (k, s) not in wanted]
    full = [pytest.param(*case, marks=pytest.mark.full) for case in rest]
    return pytest.mark.parametrize(("kind", "step"), [*wanted, *full])


@cases(("TERM", 0), ("TERM", 1))
@pytest.mark.slow
def test_sigterm_to_one_host_saves_the_same_step_on_all_and_resumes(
    tmp_path: Path, kind: tuple[str, int], step: Any
) -> None:
    run = Run(tmp_path, steps=1000, seconds=0.05)
    run.wait_for(f"step {step} ")
    rank = kind[1]
    os.kill(run.host(rank), signal.SIGTERM)
    began = time.monotonic()
    status, text = run.end()
    assert status == 0, text
    assert time.monotonic() - began < 30, text
    left = set(re.findall(r"left after step (\d+)", text))
    assert len(left) == 1, text
    last = int(left.pop())
    assert last >= step
    assert manifest(tmp_path, last)["step"] == last
    # It goes on there, and not from the start.
    first = Run(tmp_path, steps=last + 3).losses()[0][0]
    assert int(first) == last + 1


@cases(("KILL", 1), ("STOP", 0), ("STOP", 1), ("KILL", 0))
def test_the_host_that_is_gone_is_named_by_the_other_and_the_run_goes_on(
    tmp_path: Path, kind: tuple[str, int], step: Any
) -> None:
    name, rank = kind
    run = Run(tmp_path, steps=1000, seconds=0.05)
    run.wait_for(f"step {step} ")
    gone = run.host(rank)
    began = time.monotonic()
    os.kill(gone, getattr(signal, f"SIG{name}"))
    try:
        # As the other host says it, or the launcher shows it.
        run.wait_for(rf"host {rank} \(.*process {gone}\) has given no sign of life")
        assert time.monotonic() - began < DEADLINE + 15
    finally:
        run.process.send_signal(signal.SIGTERM)
        if name == "STOP":
            os.kill(gone, signal.SIGKILL)
        status, _ = run.end()
    assert status != 0
    saved = max(Checkpoints(tmp_path).steps(), default=0)
    # The one of this very step may have been in the making.
    assert saved >= (step - 1) // 10 * 10
    assert int(Run(tmp_path, steps=saved + 3).losses()[0][0]) == saved + 1


def test_one_process_alone_is_a_run_of_one_host() -> None:
    hosts = current_hosts()
    assert (hosts.rank, hosts.count, hosts.is_first) == (0, 1, True)
    assert hosts.from_first("x", lambda: [1, 2]) == [1, 2]
    assert hosts.agree("x", "a") == "a"
    assert hosts.agreed("x") is None
    hosts.wait("x")
    hosts.leave(3)
    with pytest.raises(ValueError, match="as it is"), hosts.failing_together("p"):
        raise ValueError("as it is")


def test_all_hosts_get_what_the_first_made_and_what_it_raised() -> None:
    table = Table()
    first, second = (Hosts(rank, 2, table) for rank in (0, 1))

    def never() -> None:
        raise AssertionError("made in the first process alone")

    assert first.from_first("folder", lambda: {"path": "runs/a"}) == {"path": "runs/a"}
    assert second.from_first("folder", never) == {"path": "runs/a"}
    # The next use of a name is another.
    assert first.from_first("folder", lambda: 2) == 2
    assert second.from_first("folder", never) == 2

    def refuse() -> None:
        raise ValueError("`train.folder` is taken")

    for hosts, make in ((first, refuse), (second, never)):
        with pytest.raises(ValueError, match=r"`train.folder` is taken"):
            hosts.from_first("folder", make)


def test_the_first_of_several_values_counts_for_all() -> None:
    table = Table()
    first, second = (Hosts(rank, 2, table) for rank in (0, 1))
    assert first.agreed("stop") is None
    assert second.agree("stop", "7") == "7"
    assert first.agree("stop", "9") == "7"
    assert first.agreed("stop") == "7"


def test_a_place_comes_from_arguments_first_and_then_from_the_launcher() -> None:
    environ = {
        "SFPO_COORDINATOR": "127.0.0.1:99",
        "SFPO_HOSTS": "4",
        "SFPO_RANK": "3",
    }
    assert _find_place(None, None, None, environ)[0] == ("127.0.0.1:99", 4, 3)
    assert _find_place("a:1", 2, 1, environ)[0] == ("a:1", 2, 1)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("a:1", 2, 2), r"`rank` must lie in \[0, 2\), got 2"),
        (("a:1", 0, 0), "`hosts` must be at least 1, got 0"),
        (("a", 2, 0), "`coordinator` must be HOST:PORT, got 'a'"),
        (("a:b", 2, 0), "`coordinator` must be HOST:PORT, got 'a:b'"),
        ((None, 2, 0), "`coordinator` is missing, and neither SLURM"),
    ],
)
def test_bad_places_are_refused_in_a_line(
    given: tuple[str | None, int, int], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        _find_place(*given, {})


def test_bad_seconds_are_refused() -> None:
    with pytest.raises(ValueError, match="`deadline` must be at least 1, got 0"):
        join_hosts("127.0.0.1:1", 2, 0, deadline=0)


def test_a_port_that_is_taken_is_named() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"cannot listen on {address}: another"):
            _wait_for_port(address, 1.0)


def test_an_address_of_another_machine_is_refused() -> None:
    # Of a block that is for documentation, RFC 5737.
    with pytest.raises(ValueError, match=r"listen on 192\.0\.2\.1:7070: it is not"):
        _start_coordinator("192.0.2.1:7070", 2, 1.0)
