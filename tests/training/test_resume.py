"""A run that is killed and goes on is, bit by bit, the run that was not.

The exhaustive version, on the network of the default experiment, is
`python -m experiments.bench.resume`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("interrupted.py")

# Three kills up to the freeze after step 7, three beyond it, and the stops between.
POINTS = [
    "step@1",  # before the first checkpoint
    "save@4",
    "term-step@6",
    "step@7",
    "commit@8",
    "term-test@9",
    "retire@10",
    "term-save@12",
    "test@14",
]


class Run(NamedTuple):
    """What a program left."""

    starts: list[dict[str, Any]]
    tape: list[dict[str, Any]]

    def start(self, point: str) -> dict[str, Any]:
        (found,) = [start for start in self.starts if start["point"] == point]
        return found


def run(folder: Path, cache: Path, points: list[str]) -> Run:
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, PROGRAM, folder, *points],
        env=os.environ
        | {
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    starts = [json.loads(line) for line in done.stdout.splitlines()]
    assert starts[-1]["status"] == 0, done.stderr
    tape = (folder / "tape.jsonl").read_text().splitlines()
    return Run(starts, [json.loads(line) for line in tape])


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Run:
    """The run without a break."""
    return run(tmp_path_factory.mktemp("resume") / "whole", cache, [])


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory, cache: Path, whole: Run) -> Run:
    """The run in ten pieces; its programs are compiled by the other's."""
    assert whole.starts[-1]["status"] == 0
    return run(tmp_path_factory.mktemp("resume") / "broken", cache, POINTS)


def by_name(tape: list[dict[str, Any]]) -> dict[tuple[int, str], Any]:
    """Records by step and kind."""
    found = {}
    for record in tape:
        kind = next(name for name in ("test", "digests", "loss") if name in record)
        # No step twice, whatever was written before a kill.
        assert (record["step"], kind) not in found
        found[record["step"], kind] = record
    return found


def test_it_ended_where_it_should(broken: Run) -> None:
    for point in POINTS:
        assert broken.start(point)["status"] == (0 if "term" in point else -9), point


def test_losses_data_and_tests_are_equal_to_the_last_bit(
    whole: Run, broken: Run
) -> None:
    wanted, found = by_name(whole.tape), by_name(broken.tape)
    assert [step for step, kind in wanted if kind == "loss"] == list(range(1, 15))
    assert [step for step, kind in wanted if kind == "test"] == [3, 6, 9, 12, 14]
    for step in range(1, 15):
        assert wanted[step, "loss"]["number"] == float(step - 1).hex()
    for name, record in wanted.items():
        assert found[name] == record, name


def test_every_array_is_equal_to_the_last_bit(whole: Run, broken: Run) -> None:
    wanted, found = by_name(whole.tape), by_name(broken.tape)
    steps = [step for step, kind in wanted if kind == "digests"]
    assert steps == [2, 4, 6, 8, 10, 12, 14]
    names = " ".join(wanted[14, "digests"]["digests"])
    for part in (
        "params['w']",
        ".mu['w']",
        ".nu['w']",
        "worker_error.tree['w']",
        "server_error.tree",
        "['train'].key",
        "model_state",
        "['ema'].mean['w']",
    ):
        assert part in names
    for step in steps:
        assert found[step, "digests"] == wanted[step, "digests"], step
    # A test that was stopped comes after the resume, so the state was saved before it.
    extra = {step for step, kind in found if kind == "digests"} - set(steps)
    assert extra == {9}


def test_a_kill_in_a_save_costs_no_checkpoint(broken: Run) -> None:
    left = {point: broken.start(point)["checkpoints"] for point in POINTS}
    assert left["save@4"] == [".saving-4", "step_00000002"]
    # The debris is gone with the next start.
    assert left["term-step@6"] == ["step_00000004", "step_00000006"]
    assert left["commit@8"] == [".saving-8", "step_00000004", "step_00000006"]
    # The newest is there before the oldest goes.
    assert left["retire@10"] == ["step_00000008", "step_00000009", "step_00000010"]
    assert broken.starts[-1]["checkpoints"] == ["step_00000012", "step_00000014"]


def test_sigterm_saves_and_leaves(broken: Run) -> None:
    for point, step in (("term-step@6", 6), ("term-test@9", 9), ("term-save@12", 12)):
        assert broken.start(point)["checkpoints"][-1] == f"step_{step:08d}"
