"""`python -m experiments.vit_l` from the command line to the files it leaves."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments import vit_l
from experiments.progress import RunProgress
from experiments.report import sentences
from experiments.run import DENSE
from experiments.run_log import TIMED
from experiments.vit_run import Config, prepare
from sfpo_jax.training import CheckpointError, Record, build, load_config, read_yaml

pytestmark = pytest.mark.usefixtures("standard_promotion", "compile_once")

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Options of a run that takes seconds: 8 x 8 pixels, one narrow block."""
    return options(tmp_path)


def options(tmp_path: Path) -> list[str]:
    generator = np.random.default_rng(0)
    labels = np.arange(160) % 2
    images = generator.integers(0, 100, (160, 8, 8), dtype=np.uint8)
    images[labels == 1] += 100
    np.savez(tmp_path / "toy.npz", images=images, labels=labels)
    values = {
        "data.source": tmp_path / "toy.npz",
        "data.batch_size": 16,
        "model.image_size": 8,
        "model.patch_size": 4,
        "model.width": 8,
        "model.depth": 1,
        "model.heads": 2,
        "model.mlp_width": 16,
        "model.classes": 2,
        "sparsity.min_size": 16,
        "train.runs": tmp_path / "runs",
        "train.name": "toy",
        "train.steps": 12,
        "train.evaluate_every": 6,
        "train.log_every": 2,
        "communication.compression.warmup": 0.5,
    }
    return [f"--{key}={value}" for key, value in values.items()]


def only_run(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "runs").iterdir()
    return folder


def records(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run, and what it showed."""
    place = tmp_path_factory.mktemp("whole")
    shown = io.StringIO()
    promotion = jax.numpy_dtype_promotion("standard")
    with promotion, contextlib.redirect_stdout(shown):
        assert vit_l.main(options(place)) == 0
    return only_run(place), shown.getvalue()


def test_a_run_leaves_its_report(whole: tuple[Path, str]) -> None:
    folder, shown = whole
    assert folder.name.startswith("toy-")
    assert {p.name for p in folder.iterdir()} == {
        "checkpoints",
        "config.yaml",
        "curves.png",
        "metrics.jsonl",
        "report.md",
        "results.json",
    }
    assert (folder / "curves.png").read_bytes().startswith(PNG)

    resolved = build(Config, read_yaml(folder / "config.yaml"))
    assert (resolved.train.steps, resolved.model.width) == (12, 8)

    made = records(folder)
    assert {r["contender"] for r in made} == {DENSE, "SFPO"}
    for name in (DENSE, "SFPO"):
        own = [r for r in made if r["contender"] == name]
        assert [r["step"] for r in own if "train_loss" in r] == [2, 4, 6, 8, 10, 12]
        assert [r["step"] for r in own if "test_accuracy" in r] == [6, 12]
    # Same parameters, same batches; the warm-up is AdamW on the mean gradient.
    dense, first = (
        next(r for r in made if r["contender"] == name) for name in (DENSE, "SFPO")
    )
    assert dense["train_loss"] == pytest.approx(first["train_loss"], rel=1e-5)
    assert dense["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-4)
    sfpo = {r["step"]: r for r in made if r["contender"] == "SFPO" and "sparsity" in r}
    # Frozen after 6 of 12 steps: dense before, masked and packed after.
    assert sfpo[6]["sparsity"] == 0.0
    assert 0.3 < sfpo[8]["sparsity"] < 0.7
    assert sfpo[8]["wire_bytes"] < sfpo[6]["wire_bytes"] / 4

    text = (folder / "report.md").read_text()
    for words in (DENSE, "SFPO", "curves.png", "frozen after 6 of 12", "min_size: 16"):
        assert words in text
    assert "step 12/12" in shown
    assert str(folder / "report.md") in shown


def test_a_stopped_run_goes_on_from_its_folder(
    tmp_path: Path,
    tiny: list[str],
    whole: tuple[Path, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, show = tmp_path / "mine", RunProgress.show

    def show_and_stop(progress: RunProgress, record: Record) -> None:
        show(progress, record)
        if (record["contender"], record["step"]) == ("SFPO", 8):
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(RunProgress, "show", show_and_stop)
        assert vit_l.main([*tiny, f"--train.folder={folder}"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == (
        f"SFPO stopped after step 9; it goes on with: {vit_l.PROGRAM} "
        f"--train.resume {folder}"
    )
    assert not (folder / "report.md").exists()
    # A record that was written after the last checkpoint comes once.
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"contender": "SFPO", "step": 10, "train_loss": 0.1}\n{"conten')

    assert vit_l.main([f"--train.resume={folder}"]) == 0
    shown = capsys.readouterr().out
    assert "dense AdamW  step 12/12  test accuracy" in shown
    assert "SFPO         step  9/12  compiling" in shown
    # All that was measured but for times is equal to the last bit.
    found, wanted = records(folder), records(whole[0])
    for record in (*found, *wanted):
        for name in TIMED:
            record.pop(name, None)
    assert found == wanted
    for name in ("report.md", "results.json", "curves.png"):
        assert (folder / name).exists()

    # All is done: nothing is trained, whichever way it is asked for.
    with monkeypatch.context() as patch:
        patch.setattr("experiments.run.run_contender", None)
        assert vit_l.main([*tiny, f"--train.folder={folder}"]) == 0
    assert records(folder)[-1] == found[-1] | {"step": 12}


def test_what_ends_a_run_is_said_in_one_line(
    tmp_path: Path,
    tiny: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*arguments: object, **named: object) -> None:
        raise CheckpointError("the checkpoint of step 3 cannot be written")

    monkeypatch.setattr("experiments.run.run_contender", fail)
    assert vit_l.main(tiny) == 1
    assert capsys.readouterr().err == (
        f"{vit_l.PROGRAM}: the checkpoint of step 3 cannot be written\n"
    )
    # Its folder is free again.
    assert vit_l.main([f"--train.resume={only_run(tmp_path)}"]) == 1


@pytest.mark.full
def test_two_nodes_with_an_automatic_freeze(tiny: list[str]) -> None:
    options = ["--communication.compression.warmup=auto", "--train.steps=10"]
    argv = [*tiny, *options, "--parallel.mesh.node=2"]
    run = prepare(load_config(Config(), argv, prog="", description=""))
    result = run.start(run.contenders[1])
    # At a fifth of the run at the latest.
    assert result.freeze == 2
    assert not result.sparsity[:2].any()
    assert result.sparsity[2:].all()
    # Dense inside a node (2 * 3/4 float32), compressed between the nodes only.
    assert 48 < result.bits_per_parameter < 64
    assert 8 * result.wire_bytes[0] / result.parameters > 80


@pytest.mark.full
def test_products_shared_by_two_devices_train_as_whole_ones(tiny: list[str]) -> None:
    """Node, data and operator level together; a sequence has five tokens."""
    losses = []
    for op in (1, 2):
        mesh = [f"--parallel.mesh.op={op}", "--parallel.mesh.node=2"]
        options = ["--train.steps=4", "--train.evaluate_every=4", "--model.pool=token"]
        argv = [*tiny, *options, *mesh]
        run = prepare(load_config(Config(), argv, prog="", description=""))
        result = run.start(run.contenders[0])
        losses.append([r["loss"] for r in result.records if "loss" in r])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("release", "name"), [("false", "int8 AdamW"), ("true", "layered int8 AdamW")]
)
def test_one_contender_alone(
    tmp_path: Path, tiny: list[str], release: str, name: str
) -> None:
    options = ["--train.compare=false", "--communication.compression.algorithm=int8"]
    options += ["--model.dropout=0.1", f"--memory.gradient_release={release}"]
    assert vit_l.main([*tiny, *options]) == 0
    assert {r["contender"] for r in records(only_run(tmp_path))} == {name}


def test_ranks_may_take_steps_of_their_own(tiny: list[str]) -> None:
    options = {
        "communication.compression.sync_every": 2,
        "communication.compression.refresh_every": 4,
        "sparsity.schedule": "none",
        "train.compare": "false",
    }
    argv = [*tiny, *(f"--{key}={value}" for key, value in options.items())]
    run = prepare(load_config(Config(), argv, prog="", description=""))
    (own,) = run.contenders
    assert own.phases == ("warmup", "refresh", "local", "compressed")
    result = run.start(own)
    assert "3 of these later steps sent nothing" in sentences(result)
    assert (own.name, result.freeze, result.skipped) == ("0/1 Adam", 6, 0)
    assert result.phase.tolist() == [0] * 6 + [2, 3, 2, 1, 2, 3]
    dense, refresh, alone, bits = result.wire_bytes
    assert alone < 100 < bits < dense / 3
    assert refresh == pytest.approx(dense + bits, rel=0.05)
    assert result.is_dense.tolist() == [True] * 6 + [False] * 3 + [True] + [False] * 2


def test_ctrl_c_leaves_what_was_measured(
    tmp_path: Path,
    tiny: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("experiments.run.run_contender", interrupt)
    assert vit_l.main(tiny) == 130
    folder = only_run(tmp_path)
    assert (folder / "config.yaml").exists()
    assert "interrupted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--data.batch_size=12", ["`data.batch_size`", "12", "take 8 or 16"]),
        ("--data.source=absent.npz", ["`data.source`", "absent.npz"]),
        ("--parallel.mesh.data=3", ["`parallel.mesh`", "data=3", "8 devices"]),
        ("--parallel.mesh.op=4", ["model.heads", "got 2 and 4", "divisor of 2"]),
        ("--model.image_size=12", ["`model.image_size`", "12", "take 16"]),
        ("--model.classes=1", ["`model.classes`", "at least 2", "got 1"]),
        ("--memory.mu_dtype=float16", ["`memory.mu_dtype`", "'float16'", "bfloat16"]),
        ("--communication.compression.algorithm=zip", ["algorithm", "'zip'", "int8"]),
        ("--communication.compression.block_size=12", ["block_size", "12"]),
        ("--communication.compression.warmup=1.5", ["warmup", "1.5"]),
        ("--communication.compression.sync_every=0", ["sync_every", "at least 1"]),
        ("--communication.compression.sync_every=2", ["`sparsity.schedule`", "none"]),
        ("--optimizer.learning_rate=-1", ["`optimizer.learning_rate`", "-1.0"]),
        ("--train.runs=/dev/null/runs", ["`train.runs`", "/dev/null/runs"]),
        ("--train.folder=/dev/null/x", ["`train.folder`", "/dev/null/x"]),
        ("--train.folder=.", ["`train.folder`", "no config.yaml", "another folder"]),
        ("--train.resume=absent", ["`train.resume`", "absent", "config.yaml"]),
        ("--train.ema=2", ["`train.ema`", "2.0", "write none"]),
    ],
)
def test_what_cannot_run_ends_in_one_line_and_status_2(
    tiny: list[str],
    capsys: pytest.CaptureFixture[str],
    option: str,
    words: list[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        vit_l.main([*tiny, option])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("python -m experiments.vit_l: ")
    assert message.count("\n") == 1
    for word in words:
        assert word in message, message


def test_a_misspelt_option_on_the_real_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "experiments.vit_l", "--sparsity.bse", "0.6"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == (
        "python -m experiments.vit_l: unknown key `sparsity.bse` (value 0.6): did "
        "you mean `sparsity.base`?\n"
    )
