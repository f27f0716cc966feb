"""The ledger of claims says what the results say, and no more."""

import copy
from pathlib import Path
from typing import Any

import pytest

from experiments.bench import claims


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return claims.read_results(claims.RESULTS)


def test_the_table_is_that_of_the_results(results: dict[str, Any]) -> None:
    written = (claims.RESULTS / "claims.md").read_text()
    assert claims.markdown(results) == written
    # A row each, and every command that is named exists.
    rows = written.splitlines()[2:]
    assert len(rows) == len(claims.CLAIMS)
    for claim in claims.CLAIMS:
        for command in claim.command.split(", "):
            module = command.split()[2:3]
            if module and module[0].startswith("experiments"):
                path = Path(*module[0].split("."))
                assert (claims.RESULTS.parents[1] / f"{path}.py").exists()


def verdict(results: dict[str, Any], published: str) -> str:
    (claim,) = (c for c in claims.CLAIMS if c.published.startswith(published))
    return claim.find(results).verdict


def test_a_worse_result_changes_the_verdict(results: dict[str, Any]) -> None:
    worse = copy.deepcopy(results)
    assert verdict(results, "GPT-3 13B: out of memory") == "holds"
    worse["memory"]["gpt_13b"]["total_bytes"] = 73e9
    assert verdict(worse, "GPT-3 13B: out of memory") == "does not hold"
    worse["memory"]["vit_l"]["total_bytes"] = 42e9
    assert verdict(worse, "ViT-L: 78") == "does not hold"
    assert verdict(results, "no loss of accuracy") == "holds"
    for run in worse["convergence"]["runs"]:
        if run["contender"] == "SFPO":
            run["test_accuracy"] -= 0.02
            run["bits"] = 4
    assert verdict(worse, "no loss of accuracy") == "does not hold"
    assert verdict(worse, "gradients as one bit") == "does not hold"
    for row in worse["network"]["rows"]:
        if row["contender"] == "onebit":
            row["communication"] = 0.1 * row["step"]
    assert verdict(worse, "communication") == "holds"


def test_a_missing_result_names_its_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.setattr(claims, "RESULTS", tmp_path)
    assert claims.main(tmp_path / "claims.md") == 2
    error = capsys.readouterr().err
    assert "python -m experiments.bench.memory makes it" in error
    assert error.count("\n") == 1
