"""The comparison over seeds: which runs it makes, what it keeps, what it says."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from rich.console import Console

from experiments.bench import parity
from experiments.bench.parity_report import markdown, summarize
from experiments.contender import Result
from experiments.vit_run import Config
from sfpo_jax.training import ConfigError, build

TINY = build(
    Config,
    {"model": {"patch_size": 14, "width": 8, "depth": 1, "heads": 1, "mlp_width": 8}},
)


@pytest.fixture(autouse=True)
def standard_promotion() -> Iterator[None]:
    """Optax's own AdamW does not run under the strict rules of the other tests."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, int]]:
    """Lists the runs made, which are replaced by a rule: a rate of 0.005 is best."""
    runs: list[tuple[str, float, int]] = []

    def prepare(config: Config) -> Any:
        algorithm = config.communication.compression.algorithm
        rate, seed = config.optimizer.learning_rate, config.train.seed

        def start(contender: str) -> Result:
            runs.append((contender, rate, seed))
            return Result(
                name=contender,
                records=[],
                test_accuracy=(0.95 if rate == 0.005 else 0.9) + 0.01 * seed,
                test_loss=rate,
                train_loss=0.1,
                wire_bytes=[560] if contender == "none" else [560, 20],
                parameters=80,
                freeze=None if contender == "none" else 2,
                sparsity=np.linspace(0.0, 0.5, 5),
                step_seconds=0.01,
                start_seconds=1.0,
                seconds=2.0,
                skipped=0,
            )

        return SimpleNamespace(contenders=["reference", algorithm], start=start)

    monkeypatch.setattr(parity, "prepare", prepare)
    return runs


def test_the_search_chooses_a_rate_and_other_seeds_report_it(
    tmp_path: Path, made: list[tuple[str, float, int]]
) -> None:
    out = tmp_path / "results" / "parity.json"
    assert parity.main(["--steps=5", "--seeds=2", f"--out={out}"], TINY) == 0
    assert len(made) == len(parity.VARIANTS) * (len(parity.RATES) + 2)
    first = [(rate, seed) for name, rate, seed in made if name == "none"]
    assert first == [(0.0025, 0), (0.005, 0), (0.01, 0), (0.005, 1), (0.005, 2)]

    held = json.loads(out.read_text())
    assert held["config"]["train"]["steps"] == 5
    text = out.with_suffix(".md").read_text()
    # Seed 0 chose the rate and is not reported: the mean of 96 and 97 %.
    assert "| dense AdamW | 0.005 | 96.50 ± 0.71 | +0.00 |" in text
    assert "| 56.00 |" in text
    assert "2 seeds" in text
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

    # Everything is known: the same command makes no run.
    made.clear()
    assert parity.main(["--steps=5", "--seeds=2", f"--out={out}"], TINY) == 0
    assert not made
    assert parity.main(["--steps=5", "--seeds=3", f"--out={out}"], TINY) == 0
    assert {seed for _, _, seed in made} == {3}


def test_a_stop_loses_the_run_at_hand_only(
    tmp_path: Path,
    made: list[tuple[str, float, int]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out, add = tmp_path / "parity.json", parity.Results.add

    def add_two(results: parity.Results, outcome: dict[str, Any]) -> None:
        if len(results.outcomes) == 2:
            raise KeyboardInterrupt
        add(results, outcome)

    monkeypatch.setattr(parity.Results, "add", add_two)
    assert parity.main([f"--out={out}"], TINY) == 130
    assert "goes on from" in capsys.readouterr().out
    assert len(json.loads(out.read_text())["runs"]) == 2
    assert len(made) == 3


def test_runs_of_another_configuration_are_not_mixed_in(tmp_path: Path) -> None:
    out = tmp_path / "parity.json"
    parity.Results(out, TINY).add({"variant": "SFPO", "rate": 0.1, "seed": 0})
    other = dataclasses.replace(TINY, train=dataclasses.replace(TINY.train, steps=9))
    with pytest.raises(ConfigError, match=r"`out`.*another configuration.*move"):
        parity.Results(out, other)
    assert parity.Results(out, TINY).find("SFPO", 0.1, 0)
    assert parity.Results(out, TINY).find("SFPO", 0.1, 1) is None


@pytest.mark.parametrize("option", ["--steps=0", "--seeds=0", "--sedes=1"])
def test_options_that_cannot_be_used(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parity.main([option], TINY)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert option.strip("-").partition("=")[0] in message
    assert message.count("\n") == 1


def test_a_real_run(tmp_path: Path) -> None:
    base = build(Config, {"train": {"steps": 3}}, base=TINY)
    results = parity.Results(tmp_path / "parity.json", base)
    name = "dense AdamW"
    best = parity.measure(
        base,
        results,
        seeds=1,
        variants={name: parity.VARIANTS[name]},
        rates=[0.01],
        console=Console(quiet=True),
    )
    assert best == {name: 0.01}
    (summary,) = summarize(results.outcomes, best, 1)
    assert 0.0 <= summary.accuracy <= 1.0
    assert summary.sparsity == 0.0
    assert markdown([summary]).startswith("| variant |")


def test_every_variant_is_a_configuration() -> None:
    for changes in parity.VARIANTS.values():
        build(Config, changes, base=TINY)
