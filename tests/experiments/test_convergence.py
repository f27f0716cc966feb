"""The comparison over seeds: which runs it makes, what it keeps, what it says."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import optax
import pytest
from rich.console import Console

from experiments.bench import convergence
from experiments.bench.convergence import CONTENDERS, StudyTask
from experiments.bench.convergence_report import markdown, summarize
from experiments.contender import Contender, Result
from experiments.models.gpt import GPTConfig
from experiments.text_run import TextConfig, TextData, prepare_text
from experiments.vit_run import Config
from sfpo_jax.training import ConfigError, Train, build

TINY = TextConfig(
    model=GPTConfig(length=8, width=8, depth=1, heads=1, mlp_width=8),
    data=TextData(batch_size=8, test_windows=64),
    train=Train(compare=False),
)
RATES = (0.1, 0.2)


@pytest.fixture(autouse=True)
def standard_promotion() -> Iterator[None]:
    """Optax's own AdamW does not run under the strict rules of the other tests."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture(autouse=True)
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of programs would stay on for the tests that follow."""
    monkeypatch.setattr(convergence, "_cache_programs", lambda: None)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, int, int]]:
    """Lists the runs made, which are replaced by a rule: a rate of 0.2 is best."""
    runs: list[tuple[str, float, int, int]] = []

    def start(config: TextConfig, contender: Contender) -> Result:
        algorithm = config.communication.compression.algorithm
        rate, train = config.optimizer.learning_rate, config.train
        runs.append((contender.name, rate, train.steps, train.seed))
        is_dense = algorithm == "none"
        return Result(
            name=contender.name,
            records=[],
            test_accuracy=0.9 + 0.01 * train.seed - 0.001 * (train.seed % 2),
            test_loss=(1.0 if is_dense else 1.1) + train.seed + 0.2 - rate,
            train_loss=0.1,
            wire_bytes=[560] if is_dense else [560, 20],
            parameters=80,
            freeze=None if is_dense else 2,
            phases=[None] if is_dense else ["warmup", "compressed"],
            phase=(np.arange(train.steps) >= (train.steps if is_dense else 2)) * 1,
            sparsity=np.linspace(0.0, 0.5, train.steps),
            step_seconds=0.01,
            start_seconds=1.0,
            seconds=2.0,
            skipped=0,
        )

    def prepare(config: TextConfig) -> Any:
        name = config.communication.compression.algorithm
        own = Contender(name, optax.identity())
        return SimpleNamespace(
            contenders=[own], start=lambda contender: start(config, contender)
        )

    monkeypatch.setattr(convergence, "prepare_text", prepare)
    return runs


def study(out: Path, *options: str) -> int:
    task = StudyTask(TINY, convergence.prepare_text, RATES)
    argv = ["--text-steps=20", "--ablation-seeds=0", f"--out={out}", *options]
    return convergence.main(argv, {"text": task})


def test_the_search_chooses_a_rate_and_other_seeds_report_it(
    tmp_path: Path, made: list[tuple[str, float, int, int]]
) -> None:
    out = tmp_path / "results" / "study.json"
    assert study(out, "--seeds=2") == 0
    runs = len(CONTENDERS) * (len(RATES) + 2) + 2 * len(convergence.EXTENDED)
    assert len(made) == runs
    dense = [run[1:] for run in made if run[0] == "none"]
    assert dense == [(0.1, 20, 0), (0.2, 20, 0), (0.2, 20, 1), (0.2, 20, 2)]
    assert {run[2] for run in made if run[0] == "sparse_1bit"} == {20, 23}

    held = json.loads(out.read_text())
    assert held["configs"]["text"]["train"]["steps"] == 20
    text = out.with_suffix(".md").read_text()
    # Seed 0 chose the rate and is not reported: the mean of 90.9 and 92 %.
    assert "| dense AdamW | 0.2 | 91.45 |  | 2.5000 |  |" in text
    assert "SFPO, +15 % steps" in text
    # Of 20 steps 2 are dense: 56 bits in them, 2 in the others.
    assert "| 10% | 2.00 | 7.4 |" in text
    assert "2 paired seeds" in text
    brief = out.with_name("study_overview.md").read_text()
    # 1.1 + seed against 1.0 + seed.
    assert "| dense AdamW | 2.5000 | 56.0 | 56.0 |" in brief
    assert "| SFPO, +15 % steps | x 1.042 [" in brief
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    # Everything is known: the same command makes no run.
    made.clear()
    assert study(out, "--seeds=2") == 0
    assert not made
    assert study(out, "--seeds=3") == 0
    assert {run[-1] for run in made} == {3}
    made.clear()
    assert study(out, "--seeds=3", "--ablation-seeds=2") == 0
    assert len(made) == 2 * len(convergence.ABLATIONS)
    assert {run[2] for run in made} == {20, 22, 24}
    assert "SFPO: final sparsity 0" in out.with_suffix(".md").read_text()


def test_a_stop_loses_the_run_at_hand_only(
    tmp_path: Path,
    made: list[tuple[str, float, int, int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, add = tmp_path / "study.json", convergence.Results.add

    def add_two(results: convergence.Results, outcome: dict[str, Any]) -> None:
        if len(results.outcomes) == 2:
            raise KeyboardInterrupt
        add(results, outcome)

    monkeypatch.setattr(convergence.Results, "add", add_two)
    assert study(out) == 130
    assert "goes on from" in capsys.readouterr().out
    assert len(json.loads(out.read_text())["runs"]) == 2
    assert len(made) == 3


def test_runs_of_another_configuration_are_not_mixed_in(tmp_path: Path) -> None:
    out = tmp_path / "study.json"
    convergence.Results(out, {"text": TINY}).add({"contender": "SFPO", "seed": 0})
    other = dataclasses.replace(TINY, train=dataclasses.replace(TINY.train, steps=9))
    with pytest.raises(ConfigError, match=r"`out`.*another configuration.*move"):
        convergence.Results(out, {"text": other})
    held = convergence.Results(out, {"text": TINY})
    assert held.find(contender="SFPO", seed=0)
    assert not held.find(contender="SFPO", seed=1)


@pytest.mark.parametrize(
    "option", ["--text_steps=5", "--seeds=1", "--ablation_seeds=-1", "--sedes=1"]
)
def test_options_that_cannot_be_used(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        convergence.main([option], {})
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert option.strip("-").partition("=")[0] in message
    assert message.count("\n") == 1


def test_differences_are_paired_by_seed() -> None:
    shared = {
        "task": "text",
        "rate": 0.1,
        "bits": 2.0,
        "mean_bits": 10.0,
        "dense_share": 0.2,
        "mean_sparsity": 0.5,
        "steps": 20,
    }
    outcomes = [
        {
            **shared,
            "contender": name,
            "seed": seed,
            # Seeds differ far more than the contenders do.
            "test_accuracy": 0.1 * seed + (0.0 if name == "dense" else -0.01),
            "test_loss": 2.0**seed * (1.0 if name == "dense" else 1.05),
        }
        for name in ("dense", "other")
        for seed in range(4)
    ]
    _, other = summarize(outcomes)
    assert other.seeds == 3
    np.testing.assert_allclose(other.gap, -1.0)
    np.testing.assert_allclose(other.ratio, 1.05)
    # One seed apart from the others: t with two degrees of freedom.
    outcomes[-1]["test_loss"] *= math.exp(0.03)
    ratio = summarize(outcomes)[1].ratio
    half = 4.302653 * 0.03 / math.sqrt(3) / math.sqrt(3)
    np.testing.assert_allclose(np.log(ratio.high / ratio.mean), half, rtol=1e-5)
    assert "| other | 0.1 |" in markdown(summarize(outcomes))


@pytest.mark.parametrize(
    "name", ["SFPO", pytest.param("sparsify alone, AdamW", marks=pytest.mark.full)]
)
def test_a_real_run(tmp_path: Path, name: str) -> None:
    base = build(TextConfig, {"train": {"steps": 20, "evaluate_every": 20}}, base=TINY)
    results = convergence.Results(tmp_path / "study.json", {"text": base})
    task = StudyTask(base, prepare_text, (0.01,))
    console = Console(quiet=True)
    chosen = {name: CONTENDERS[name]}
    convergence.Study("text", task, results, console).measure(chosen, (), {}, 2, 0)
    (summary,) = summarize(results.outcomes)
    assert 0.0 < summary.accuracy <= 1.0
    assert 0.0 < summary.loss < math.log(256)
    assert summary.sparsity > 0.4
    assert (summary.dense_share < 0.2) == (name == "SFPO")


def test_every_contender_is_a_configuration() -> None:
    for changes in [*CONTENDERS.values(), *convergence.ABLATIONS.values()]:
        if not isinstance(changes, float):
            build(TextConfig, changes, base=TINY)
            build(Config, changes, base=Config())
