"""`python -m experiments.resnet50` from the command line to the files it leaves."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
import pytest

from experiments import resnet50

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
    tiny: list[str], stopped_and_resumed: Callable[..., Any]
) -> None:
    whole, broken = stopped_and_resumed(resnet50, tiny)
    assert broken.records == whole.records
    leaves = map(jax.tree.leaves, (broken.state, whole.state))
    for found, wanted in zip(*leaves, strict=True):
        assert np.array_equal(found, wanted)
    # The statistics have moved, and the test has them.
    norm = whole.state.model_state["stem"]["norm"]
    assert norm["mean"][...].any() and (norm["var"][...] != 1).all()
    assert (whole.folder / "report.md").exists()


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
    refused: Callable[[ModuleType, list[str]], str],
    options: list[str],
    words: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    np.savez("one.npz", images=np.zeros((9, 8, 8), np.uint8), labels=np.zeros(9, int))
    message = refused(resnet50, [*tiny, *options])
    for word in words:
        assert word in message, message
