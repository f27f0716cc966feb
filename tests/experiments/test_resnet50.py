"""`python -m experiments.resnet50` from the command line to the files it leaves."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from experiments import resnet50
from experiments.progress import RunProgress
from experiments.run_log import TIMED
from sfpo_jax.training import Fit, Record, fit

pytestmark = pytest.mark.usefixtures("standard_promotion", "compile_once")


@pytest.fixture
def tiny(tmp_path: Path) -> list[str]:
    """Options of a run that takes seconds: 8 x 8 pixels, one narrow block."""
    generator = np.random.default_rng(0)
    labels = np.arange(80) % 2
    images = generator.integers(0, 100, (80, 8, 8), dtype=np.uint8)
    images[labels == 1] += 100
    np.savez(tmp_path / "toy.npz", images=images, labels=labels)
    model = tmp_path / "model.yaml"
    model.write_text("model: {image_size: 8, width: 4, stages: [1], classes: 2}\n")
    values = {
        "config": model,
        "data.source": tmp_path / "toy.npz",
        "data.batch_size": 32,
        "sparsity.min_size": 16,
        "train.runs": tmp_path / "runs",
        "train.compare": "false",
        "train.steps": 6,
        "train.evaluate_every": 3,
        "train.log_every": 1,
        "communication.compression.warmup": 0.5,
    }
    return [f"--{key}={value}" for key, value in values.items()]


@pytest.mark.full
def test_a_stopped_run_goes_on_with_its_statistics(
    tmp_path: Path, tiny: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ends, show = [], RunProgress.show

    def fit_and_keep(*arguments: Any, **named: Any) -> Fit:
        done = fit(*arguments, **named)
        ends.append(jax.device_get(done.state))
        return done

    def show_and_stop(progress: RunProgress, record: Record) -> None:
        show(progress, record)
        if record["step"] == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("experiments.contender.fit", fit_and_keep)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert resnet50.main([*tiny, f"--train.folder={whole}"]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(RunProgress, "show", show_and_stop)
        assert resnet50.main([*tiny, f"--train.folder={broken}"]) == 0
    assert not (broken / "report.md").exists()
    assert resnet50.main([f"--train.resume={broken}"]) == 0

    def records(folder: Path) -> list[dict[str, Any]]:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(x) | dict.fromkeys(TIMED, 0) for x in lines]

    assert records(broken) == records(whole)
    end, _, resumed = ends
    for found, wanted in zip(*map(jax.tree.leaves, (resumed, end)), strict=True):
        assert np.array_equal(found, wanted)
    # The statistics have moved, and the test has them.
    norm = end.model_state["stem"]["norm"]
    assert norm["mean"][...].any() and (norm["var"][...] != 1).all()
    assert (whole / "report.md").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--memory.gradient_release=true"], ["`memory.gradient_release`", "ResNet"]),
        (["--parallel.mesh.op=2"], ["`parallel.mesh.op`", "got 2"]),
        (["--model.classes=1"], ["`model.classes`", "at least 2", "got 1"]),
        (["--model.image_size=12"], ["`model.image_size`", "12", "take 16"]),
        (["--data.source=one.npz"], ["`data.source`", "two classes", "got 1"]),
        (["--data.source=empty"], ["`data.source`", "'empty'"]),
    ],
)
def test_what_cannot_run_ends_in_one_line(
    tmp_path: Path,
    tiny: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    np.savez("one.npz", images=np.zeros((9, 8, 8), np.uint8), labels=np.zeros(9, int))
    with pytest.raises(SystemExit) as stop:
        resnet50.main([*tiny, *options])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith("python -m experiments.resnet50: ")
    assert message.count("\n") == 1
    for word in words:
        assert word in message, message
