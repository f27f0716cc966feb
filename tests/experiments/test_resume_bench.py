"""The benchmark of resumes counts what it should; its runs are too long for a test."""

import subprocess
from pathlib import Path

import jax.numpy as jnp
import pytest

from experiments.bench import resume_damage
from experiments.bench.resume import markdown
from experiments.bench.resume_damage import Outcome, damage_every_file, fill_a_disk
from sfpo_jax.training import Checkpoints


def test_damage_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(1, {"w": jnp.ones(3)})
    newest = checkpoints.folder / "step_00000001"
    files = [path for path in newest.rglob("*") if path.is_file()]
    (tmp_path / "a").mkdir()
    found = damage_every_file(newest, tmp_path / "a")
    assert (found.cases, found.good) == (23 * len(files), 23 * len(files))
    # Where nothing is checked, nothing is found.
    (tmp_path / "b").mkdir()
    monkeypatch.setattr(resume_damage, "check_checkpoint", lambda folder: 1)
    assert damage_every_file(newest, tmp_path / "b").good == 0


def test_without_a_disk_to_fill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(folder: Path) -> subprocess.CompletedProcess[str]:
        raise AssertionError("nothing was mounted")

    monkeypatch.setattr("shutil.which", lambda name: None)
    assert fill_a_disk(tmp_path, 1000, run).note.startswith("not measured")


def test_the_table() -> None:
    table = markdown([Outcome("kill", 10, 9, "in a save")])
    assert table.splitlines()[-1] == "| kill | 9 of 10 | in a save |"
