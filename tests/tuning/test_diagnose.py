"""Faults planted in the records of runs are found, each by its rule and no other."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sfpo_jax as sfpo
from sfpo_jax import __main__ as command_line

STEPS, EVERY, FREEZE = 1000, 10, 120
CONFIG: dict[str, Any] = {
    "train": {"steps": STEPS},
    "optimizer": {"learning_rate": 0.01, "b2": 0.999},
    "sparsity": {"base": 0.7, "final": 0.0},
    "parallel": {
        "mesh": {"op": 2},
        "operator": {"chunk_size": 4, "prefetch_depth": 2},
    },
    "communication": {"compression": {"refresh_every": 16, "relaxation": 1.0}},
}
Records = list[dict[str, Any]]


def healthy(seed: int, name: str = "SFPO") -> Records:
    """Records as runs write them: a loss that falls through the noise of batches."""
    random = np.random.default_rng(seed)
    noise = random.uniform(0.02, 0.2)
    level, rate = random.uniform(0.05, 1.0), random.uniform(2, 8)
    found: Records = []
    for step in range(EVERY, STEPS + 1, EVERY):
        share = step / STEPS
        loss = level + 2 * np.exp(-rate * share)
        is_compressed = name == "SFPO" and step > FREEZE
        record = {
            "contender": name,
            "step": step,
            "train_loss": loss * (1 + noise * (1 - share / 2) * random.normal() / 3),
            "step_ms": 100 * random.lognormal(0, 0.1),
            "input_ms": 4 * random.lognormal(0, 0.5),
            "momentum": 1e-3 * random.lognormal(0, 0.1),
            "variance": 1e-6 * (1 - 0.999**step) * (1 + 0.3 * np.exp(-9 * share)),
            "memory_share": random.uniform(0.3, 0.88),
            "is_compressed": is_compressed,
            "still": [],
        }
        if is_compressed:
            record["residual"] = 2e-3 * random.lognormal(0, 0.2)
        else:
            record["residual"] = 0.0
        found.append(record)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_healthy_runs_give_no_finding(seed: int) -> None:
    records = healthy(seed, "dense AdamW") + healthy(seed + 100)
    assert sfpo.tuning.diagnose(records, CONFIG) == []
    # A run at its beginning has little to say.
    for count in (0, 1, 5, 20):
        assert sfpo.tuning.diagnose(records[:count], CONFIG) == []


def swing(records: Records) -> None:
    for i, record in enumerate(records):
        if record["step"] > 0.6 * STEPS:
            record["train_loss"] *= 1 + 0.4 * (-1) ** i


def grow(records: Records) -> None:
    for record in records:
        if record["is_compressed"]:
            record["residual"] *= np.exp(3 * record["step"] / STEPS)


def shrink(records: Records) -> None:
    for record in records:
        if not record["is_compressed"]:
            record["variance"] *= np.exp(-record["step"] / 30)


def hold(records: Records) -> None:
    for record in records:
        record["still"] = ["head/bias", "blocks/3/norm/scale"]


def starve(records: Records) -> None:
    for record in records:
        record["input_ms"] = 0.4 * record["step_ms"]


def fill(records: Records) -> None:
    records[-3]["memory_share"] = 0.97


PLANTED: dict[str, tuple[Callable[[Records], None], str, str]] = {
    "oscillation": (swing, "after 60 % of the run", "sparsity.final: 0.3"),
    "residual": (grow, "times the momentum since step 130", "relaxation: 1.5"),
    "still": (hold, "in 1000 steps: head/bias, blocks/3", "no gradient|gradient is"),
    "input": (starve, "ms for its batch", "data.workers"),
    "memory": (fill, "97 % of what JAX may use", "recompute: full"),
}


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("seed", range(3))
def test_a_planted_fault_is_found(kind: str, seed: int) -> None:
    plant, evidence, advice = PLANTED[kind]
    records = healthy(seed)
    plant(records)
    (found,) = sfpo.tuning.diagnose(healthy(seed, "dense AdamW") + records, CONFIG)
    assert (found.kind, found.contender) == (kind, "SFPO")
    assert evidence in found.evidence
    assert any(word in found.advice for word in advice.split("|"))
    assert found.advice in str(found) and kind in str(found)


def test_a_variance_frozen_too_early_matters_where_nothing_refreshes_it() -> None:
    records = healthy(0)
    shrink(records)
    assert sfpo.tuning.diagnose(records, CONFIG) == []
    frozen = {"refresh_every": "none", "relaxation": 1.5}
    config = CONFIG | {"communication": {"compression": frozen}}
    (found,) = sfpo.tuning.diagnose(records, config)
    assert found.kind == "variance" and "refresh_every: 16" in found.advice
    assert sfpo.tuning.diagnose(healthy(0), config) == []


def test_what_swings_is_asked_of_the_dense_run_first() -> None:
    dense, masked = healthy(1, "dense AdamW"), healthy(2)
    swing(masked)
    (alone,) = sfpo.tuning.diagnose(masked, CONFIG)
    assert "train.compare: true" in alone.advice
    high = CONFIG | {"sparsity": {"final": 0.3}}
    (floor,) = sfpo.tuning.diagnose(dense + masked, high)
    assert "refresh_every" in floor.advice and "0.3 already" in floor.advice
    swing(dense)
    both = sfpo.tuning.diagnose(dense + masked, CONFIG)
    assert [f.contender for f in both] == ["dense AdamW", "SFPO"]
    assert "masking is not the cause" in both[1].evidence
    assert all(f.advice.startswith("optimizer.learning_rate: 0.005") for f in both)


@pytest.mark.parametrize(
    ("operator", "ranks", "wanted"),
    [((4, 2), 2, None), ((4, 3), 2, 8), ((6, 3), 1, None), ((8, 4), 4, 12)],
)
def test_the_bubble(operator: tuple[int, int], ranks: int, wanted: int | None) -> None:
    pieces, depth = operator
    parallel = {
        "mesh": {"op": ranks},
        "operator": {"chunk_size": pieces, "prefetch_depth": depth},
    }
    found = sfpo.tuning.diagnose([], {"parallel": parallel})
    if wanted is None:
        assert found == []
        return
    assert [f.kind for f in found] == ["bubble"]
    assert found[0].advice == f"parallel.operator.chunk_size: {wanted}"
    assert 1 - sfpo.tuning.bubble_fraction(wanted, depth) >= 0.8


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(records: Records, *more: str) -> tuple[Any, ...]:
        lines = "".join(json.dumps(r) + "\n" for r in records)
        (tmp_path / "metrics.jsonl").write_text(lines + '{"half')
        status = command_line.main(["diagnose", str(tmp_path), *more])
        return status, *capsys.readouterr()

    status = command_line.main(["diagnose", str(tmp_path)])
    error = capsys.readouterr().err
    assert status == 2 and "has no metrics.jsonl" in error and error.count("\n") == 1
    status, out, _ = run(healthy(0))
    assert (status, out) == (0, "nothing found in 100 records up to step 1000\n")
    starved = healthy(0)
    starve(starved)
    status, out, _ = run(starved)
    assert status == 1 and out.startswith("input (SFPO): a step of")
    status, out, _ = run(starved, "--json")
    assert json.loads(out)[0]["kind"] == "input"
    (tmp_path / "config.yaml").write_text("a: [")
    status, _, error = run(starved)
    assert status == 2 and "config.yaml, line 1: not YAML" in error
