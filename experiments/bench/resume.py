"""Is a run that was ended in the worst ways, and went on, the run that was not?

    python -m experiments.bench.resume

Runs the network of the default experiment for a few steps: once without a break, then
killed at five points of each phase, killed ten times while it saved, and stopped by
SIGTERM; then damages each file of a checkpoint and fills a disk. Metrics and all arrays
of the last checkpoint are compared byte by byte. Prints a table and writes it.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.bench.resume_damage import Outcome, damage_every_file, fill_a_disk
from experiments.devices import show_cpu_devices
from experiments.run_log import TIMED
from sfpo_jax.training import check_checkpoint, exit_on_config_error, load_config

PROGRAM = "python -m experiments.bench.resume"

STEPS, FREEZE, EVERY = 40, 20, 4
# SFPO alone: the dense reference has one phase only.
OPTIONS = {
    "train.compare": "false",
    "train.steps": STEPS,
    "train.checkpoint_every": EVERY,
    "train.evaluate_every": 20,
    "train.log_every": 1,
    "train.ema": 0.9,
    "model.dropout": 0.1,
    "communication.compression.warmup": FREEZE / STEPS,
}
DENSE_STEPS = (2, 6, 9, 15, 20)
COMPRESSED_STEPS = (21, 26, 31, 35, 39)


@dataclasses.dataclass(frozen=True)
class Options:
    """Where the table goes."""

    out: str = "docs/results/resume.md"
    """The file with the table."""


class Bench:
    """Runs in processes of their own, in folders side by side."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._stamp = place / "signal"

    def start(
        self, name: str, point: str = "none"
    ) -> tuple[subprocess.CompletedProcess[str], float]:
        """One start of the run `name`, and seconds from its signal to its end."""
        done = self.run(self.place / name, point)
        ended = time.monotonic()
        wanted = {"SIGKILL": -9}.get(point.partition("@")[0], 0)
        if done.returncode != wanted:
            raise RuntimeError(f"{name} {point}: {done.returncode}\n{done.stderr}")
        stamp = float(self._stamp.read_text()) if point != "none" else ended
        return done, ended - stamp

    def run(self, folder: Path, point: str = "none") -> Any:
        """The process of one start."""
        options = {**OPTIONS, "train.folder": folder}
        module = ["-m", "experiments.bench.resume_child", point, str(self._stamp)]
        return subprocess.run(
            [sys.executable, *module, *[f"--{k}={v}" for k, v in options.items()]],
            env=os.environ
            | {
                "JAX_COMPILATION_CACHE_DIR": str(self.place / "cache"),
                "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            },
            capture_output=True,
            text=True,
            check=False,
        )

    def checkpoints(self, name: str) -> list[Path]:
        """The folders of a run's checkpoints, the oldest first."""
        return sorted((self.place / name / "checkpoints" / "sfpo").glob("step_*"))

    def is_same(self, name: str, other: str) -> bool:
        """Whether two runs measured the same and ended with the same bytes."""
        return self._records(name) == self._records(other) and self._arrays(
            name
        ) == self._arrays(other)

    def _records(self, name: str) -> list[dict[str, Any]]:
        lines = (self.place / name / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        return [{k: r[k] for k in r if k not in TIMED} for r in records]

    def _arrays(self, name: str) -> dict[str, bytes]:
        import orbax.checkpoint as ocp

        newest = self.checkpoints(name)[-1]
        assert newest.name == f"step_{STEPS:08d}"
        # Orbax warns that without a template it takes the devices it was saved from.
        with (
            ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
            warnings.catch_warnings(action="ignore"),
        ):
            held = checkpointer.restore(newest / "arrays")
        return {key: np.asarray(x).tobytes() for key, x in held.items()}


def killed_in_steps(bench: Bench, steps: Sequence[int], phase: str) -> Outcome:
    """Kills one run at each of the steps and lets it go on to its end."""
    name = f"killed-{phase}"
    for step in steps:
        bench.start(name, f"SIGKILL@step@{step}@0")
    bench.start(name)
    good = len(steps) * bench.is_same("whole", name)
    note = f"after steps {', '.join(map(str, steps))}"
    return Outcome(f"kill -9 in a step, {phase} phase", len(steps), good, note)


def killed_in_saves(bench: Bench, seconds: float) -> Outcome:
    """Kills one run in each of its ten saves, at another tenth of the save."""
    good, committed = 0, 0
    steps = range(EVERY, STEPS + 1, EVERY)
    for number, step in enumerate(steps):
        delay = seconds * (number + 0.5) / len(steps)
        bench.start("saves", f"SIGKILL@save@{step}@{delay:.3f}")
        # A name that begins with step_ is whole, and is the new one or the one before.
        newest = max(map(check_checkpoint, bench.checkpoints("saves")), default=0)
        committed += newest == step
        good += newest in (step - EVERY, step)
    bench.start("saves")
    if not bench.is_same("whole", "saves"):
        good = 0
    note = f"over {seconds:.2f} s; {committed} came after the new one had its name"
    return Outcome("kill -9 in a save", len(steps), good, note)


def stopped(bench: Bench) -> list[Outcome]:
    """Stops one run by SIGTERM in a step, a save and a test."""
    outcomes = []
    for where, step in (("step", 6), ("save", 12), ("test", 20), ("step", 30)):
        _, seconds = bench.start("stopped", f"SIGTERM@{where}@{step}@0")
        newest = check_checkpoint(bench.checkpoints("stopped")[-1])
        good = int(seconds < 10 and step <= newest <= step + 1)
        what = f"SIGTERM in a {where}: saved, exit 0"
        outcomes.append(Outcome(what, 1, good, f"after {seconds:.1f} s"))
    bench.start("stopped")
    good = int(bench.is_same("whole", "stopped"))
    outcomes.append(Outcome("the run stopped four times, at its end", 1, good))
    return outcomes


def measure(bench: Bench) -> list[Outcome]:
    """All cases."""
    bench.start("whole")
    # A second one: the same at all, and how long a save takes once it has begun.
    bench.start("again")
    outcomes = [Outcome("run twice", 1, int(bench.is_same("whole", "again")))]
    outcomes.append(killed_in_steps(bench, DENSE_STEPS, "dense"))
    outcomes.append(killed_in_steps(bench, COMPRESSED_STEPS, "compressed"))
    outcomes.append(killed_in_saves(bench, _save_seconds(bench)))
    outcomes += stopped(bench)
    newest = bench.checkpoints("whole")[-1]
    outcomes.append(damage_every_file(newest, _new(bench, "damage")))
    bytes_held = sum(p.stat().st_size for p in newest.rglob("*") if p.is_file())
    # Three stay, and there is no room for a fourth beside them.
    outcomes.append(fill_a_disk(_new(bench, "disk"), 4 * bytes_held, bench.run))
    return outcomes


def _new(bench: Bench, name: str) -> Path:
    path = bench.place / name
    path.mkdir()
    return path


def _save_seconds(bench: Bench) -> float:
    """From the first file of a save to its last, and half as long again."""
    newest = bench.checkpoints("again")[-1]
    first = min(p.stat().st_mtime for p in newest.rglob("*"))
    return 1.5 * max(0.2, (newest / "MANIFEST").stat().st_mtime - first)


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The table."""
    lines = ["| case | as promised | |", "| :-- | --: | :-- |"]
    for what, cases, good, note in outcomes:
        lines.append(f"| {what} | {good} of {cases} | {note} |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Measures and writes the table; 1 where a promise was not kept."""
    with exit_on_config_error(PROGRAM):
        options = load_config(
            Options(), argv, prog=PROGRAM, description="Ends runs and compares them."
        )
    show_cpu_devices(8)
    place = Path(tempfile.mkdtemp(prefix="resume-"))
    try:
        outcomes = measure(Bench(place))
    finally:
        shutil.rmtree(place)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(markdown(outcomes), encoding="utf-8")
    print(markdown(outcomes))
    return int(any(outcome.good < outcome.cases for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
