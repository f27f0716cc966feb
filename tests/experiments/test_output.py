"""The folder of a run: one program at a time, and nothing lost that was finished."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from experiments.contender import Result
from experiments.output import open_folder
from experiments.vit_run import Config
from sfpo_jax.training import Train, build, read_yaml

RESULT = Result(
    name="SFPO",
    records=[{"contender": "SFPO", "step": 1, "train_loss": float("nan")}],
    test_accuracy=0.1 + 0.2,
    test_loss=float("nan"),
    train_loss=1 / 3,
    wire_bytes=[560, 20],
    parameters=80,
    freeze=None,
    phases=["warmup", "compressed"],
    phase=np.array([0, 1, 1], np.int8),
    sparsity=np.linspace(0, 1, 7, dtype=np.float32),
    step_seconds=0.1,
    start_seconds=1.0,
    seconds=2.0,
    skipped=0,
)


def train(folder: Path, **values: object) -> Train:
    return build(Train, {"folder": str(folder), **values}, base=Train())


def test_results_come_back_as_they_were(tmp_path: Path) -> None:
    folder = open_folder(Config(), train(tmp_path / "run"))
    folder.finish(RESULT)
    folder.close()
    folder = open_folder(Config(), train(tmp_path / "run"))
    (found,) = folder.results.values()
    np.testing.assert_equal(dataclasses.asdict(found), dataclasses.asdict(RESULT))
    assert found.sparsity.dtype == np.float32
    folder.close()

    (tmp_path / "run" / "results.json").write_text("[{}]")
    with pytest.raises(ValueError, match=r"results.json` is damaged: delete it"):
        open_folder(Config(), train(tmp_path / "run"))


def test_one_program_at_a_time(tmp_path: Path) -> None:
    first = open_folder(Config(), train(tmp_path))
    with pytest.raises(ValueError, match=r"`train.folder`.* another is at work"):
        open_folder(Config(), train(tmp_path))
    first.close()
    open_folder(Config(), train(tmp_path)).close()


def test_its_configuration_does_not_lead_back_to_it(tmp_path: Path) -> None:
    section = train(tmp_path / "run", keep=5)
    open_folder(dataclasses.replace(Config(), train=section), section).close()
    held = build(Config, read_yaml(tmp_path / "run" / "config.yaml"), base=Config())
    assert (held.train.folder, held.train.resume, held.train.keep) == ("none",) * 2 + (
        5,
    )


def test_two_runs_in_one_second_have_two_folders(tmp_path: Path) -> None:
    section = build(Train, {"runs": str(tmp_path)}, base=Train())
    folders = [open_folder(Config(), section) for _ in range(3)]
    assert len({folder.path for folder in folders}) == 3
    for folder in folders:
        folder.close()


def test_records_of_others_and_of_the_past_stay(tmp_path: Path) -> None:
    folder = open_folder(Config(), train(tmp_path))
    for name in ("AdamW", "SFPO"):
        store = folder.store(name)
        for step in (1, 2, 3):
            store.record({"contender": name, "step": step, "train_loss": float("nan")})
            store.record({"contender": name, "step": step, "test_accuracy": 0.5})
    kept = folder.store("SFPO").rewind(2, 1)
    assert [(r["step"], "test_accuracy" in r) for r in kept] == [
        (1, False),
        (1, True),
        (2, False),
    ]
    assert np.isnan(kept[0]["train_loss"])
    assert len(folder.metrics.read()) == 6 + 3
    folder.close()


def test_each_contender_has_its_curves(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    folder = open_folder(Config(), train(tmp_path, tensorboard=True))
    with folder.store("dense AdamW") as store:
        store.rewind(0, 0)
        store.record({"contender": "dense AdamW", "step": 1, "train_loss": 0.5})
    folder.close()
    (events,) = (tmp_path / "tensorboard" / "dense_adamw").iterdir()
    assert b"train_loss" in events.read_bytes()
