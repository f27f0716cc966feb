"""The launcher: what each process gets, what is shown, how it ends."""

import os
import signal
import subprocess
import sys
import time

import pytest

LAUNCH = [sys.executable, "-m", "sfpo_jax", "launch"]
# A line in one write: parts of one would mix with those of other hosts.
ENVIRON = {**os.environ, "PYTHONUNBUFFERED": ""}


def launch(hosts: int, code: str, *arguments: str):
    """What a launch of Python code ends with, and what it shows."""
    command = [*LAUNCH, "--hosts", str(hosts), "--", sys.executable, "-c", code]
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, env=ENVIRON
    )
    return done.returncode, done.stdout, done.stderr


def test_each_process_gets_its_place_and_the_first_is_shown_as_it_is() -> None:
    code = (
        "import os, sys; e = os.environ; print(e['SFPO_RANK'], e['SFPO_HOSTS'], "
        "e['SFPO_COORDINATOR'].split(':')[0], sys.argv[1])"
    )
    status, out, _ = launch(3, code, "--steps=2")
    assert status == 0
    assert sorted(out.splitlines()) == [
        "0 3 127.0.0.1 --steps=2",
        "[host 1] 1 3 127.0.0.1 --steps=2",
        "[host 2] 2 3 127.0.0.1 --steps=2",
    ]


def test_the_status_is_that_of_the_first_that_fails() -> None:
    code = (
        "import os, sys, time; r = int(os.environ['SFPO_RANK']); time.sleep(2 * r); "
        "sys.exit(7 + r if r else 0)"
    )
    status, _, err = launch(3, code)
    assert status == 8
    assert err.splitlines()[0] == "host 1 ended: status 8"


def test_a_process_that_a_signal_ends_is_said_so() -> None:
    code = (
        "import os; os.environ['SFPO_RANK'] == '1' and os.kill(os.getpid(), 9); print()"
    )
    status, _, err = launch(2, code)
    assert status == 128 + 9
    assert "host 1 ended: by SIGKILL" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_every_process_once(number: int) -> None:
    code = """
import signal, sys, time
caught = []
for n in (signal.SIGTERM, signal.SIGINT):
    signal.signal(n, lambda number, frame: caught.append(number))
print("up", flush=True)
while not caught: time.sleep(0.05)
time.sleep(0.5)
print("caught", *map(int, caught), flush=True)
"""
    command = [*LAUNCH, "--hosts", "2", "--", sys.executable, "-c", code]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRON)
    assert process.stdout is not None
    for _ in range(2):
        assert "up" in process.stdout.readline()
    os.kill(process.pid, number)
    rest, _ = process.communicate(timeout=60)
    expected = [f"[host 1] caught {int(number)}", f"caught {int(number)}"]
    assert sorted(rest.splitlines()) == expected
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--hosts", "2"], "`command` is missing: write, for example"),
        (["--hosts", "0", "--", "true"], "`--hosts` must be at least 1, got 0"),
        (["--", "no-such-program"], "No such file or directory: 'no-such-program'"),
    ],
)
def test_bad_commands_are_refused_in_a_line(arguments: list[str], words: str) -> None:
    began = time.monotonic()
    done = subprocess.run([*LAUNCH, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert words in done.stderr
    assert time.monotonic() - began < 60
