"""What tests that train whole runs share."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from experiments.progress import RunProgress
from experiments.run_log import TIMED
from sfpo_jax.parallel import TrainState
from sfpo_jax.training import Fit, Record, fit


@pytest.fixture
def standard_promotion() -> Iterator[None]:
    """Optax's own AdamW does not run under the strict rules of the other tests."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(scope="module")
def compile_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Programs that several runs share are compiled by the first."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update(names[0], str(tmp_path_factory.mktemp("cache")))
    jax.config.update(names[1], 0)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


class Course(NamedTuple):
    """How a run went: its folder, what it recorded but for times, its last state."""

    folder: Path
    records: list[Record]
    state: TrainState


@pytest.fixture
def stopped_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[ModuleType, list[str]], tuple[Course, Course]]:
    """(experiment, arguments) -> an unbroken run, and one stopped after step 4."""
    states, show = [], RunProgress.show

    def fit_and_keep(*arguments: Any, **named: Any) -> Fit:
        done = fit(*arguments, **named)
        states.append(jax.device_get(done.state))
        return done

    def show_and_stop(progress: RunProgress, record: Record) -> None:
        show(progress, record)
        if record["step"] == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    def course(folder: Path) -> Course:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) | dict.fromkeys(TIMED, 0) for line in lines]
        return Course(folder, records, states[-1])

    def run(experiment: ModuleType, argv: list[str]) -> tuple[Course, Course]:
        monkeypatch.setattr("experiments.contender.fit", fit_and_keep)
        whole, broken = tmp_path / "whole", tmp_path / "broken"
        assert experiment.main([*argv, f"--train.folder={whole}"]) == 0
        unbroken = course(whole)
        with monkeypatch.context() as patch:
            patch.setattr(RunProgress, "show", show_and_stop)
            assert experiment.main([*argv, f"--train.folder={broken}"]) == 0
        assert not (broken / "report.md").exists()
        assert experiment.main([f"--train.resume={broken}"]) == 0
        return unbroken, course(broken)

    return run


@pytest.fixture
def refused(
    capsys: pytest.CaptureFixture[str],
) -> Callable[[ModuleType, list[str]], str]:
    """(experiment, arguments) -> the one line with which it does not begin."""

    def run(experiment: ModuleType, argv: list[str]) -> str:
        with pytest.raises(SystemExit) as stop:
            experiment.main(argv)
        assert stop.value.code == 2
        message = capsys.readouterr().err
        assert message.startswith(f"{experiment.PROGRAM}: ")
        assert message.count("\n") == 1
        return message

    return run
