"""The bench of budgets: which it asks for, and what it says of the answers."""

from pathlib import Path
from typing import Any

import pytest

from experiments.bench.recompute import chosen, targets
from experiments.bench.recompute_programs import cases
from experiments.bench.recompute_report import broken, markdown, save_picture
from sfpo_jax.training import ConfigError

GB = 10**9


def answer(budget: float, total: float, extra: float, compilations: int = 3) -> Any:
    return {
        "budget_bytes": round(budget * GB),
        "total_bytes": round(total * GB),
        "predicted_bytes": round(total * GB),
        "extra_share": extra,
        "compilations": compilations,
        "solver_seconds": 1.5,
    }


def row(*answers: Any) -> Any:
    return {
        "title": "a network",
        "kept": {"bytes": 20 * GB, "flops": 100},
        "blocks": {"bytes": 8 * GB, "flops": 130},
        "whole": {"bytes": 15 * GB, "flops": 130},
        "bounds": [[0.3, 0.10], [0.7, 0.35]],
        "answers": list(answers),
        "curve": [{"bytes": 7 * GB, "flops": 120}, {"bytes": 20 * GB, "flops": 100}],
    }


def test_budgets_are_those_promised_that_of_blocks_and_those_between() -> None:
    resnet = next(case for case in cases() if case.name == "resnet50")
    found = targets(resnet, 20 * GB, 8 * GB, 5)
    assert [size / GB for size in found] == [14, 6, 8, 10, 12, 14, 16, 18]


def test_the_table_has_every_answer_the_smallest_budget_first(tmp_path: Path) -> None:
    unmet = {"budget_bytes": 5 * GB, "problem": "no", "smallest_bytes": 6 * GB}
    rows = {"net": row(answer(14, 13.5, 0.02), answer(8, 7.9, 0.2), unmet)}
    lines = markdown(rows).splitlines()
    assert "| planned | 14.00 | 13.50 | **13.50** | -32% | +2.0% | 3 | 1.5 s |" in lines
    assert [line.split("|")[2].strip() for line in lines[-3:]] == [
        "5.00",
        "8.00",
        "14.00",
    ]
    assert (
        "| `jax.checkpoint` around each block | | | 8.00 | -60% | +30.0% | | |" in lines
    )
    assert "smallest: 6.00" in lines[-3]
    save_picture(tmp_path / "curve.png", rows)
    assert (tmp_path / "curve.png").stat().st_size > 10_000
    assert broken(rows) == ["net at 5.00 GB: no"]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (answer(8, 8.1, 0.2), "net at 8.00 GB takes 8.10 GB"),
        (answer(8, 8, 0.31), "net at 8.00 GB is worse than jax.checkpoint"),
        (answer(6, 6, 0.36), "net at 6.00 GB costs +36.0% FLOPs"),
        (answer(14, 14, 0.11), "net at 14.00 GB costs +11.0% FLOPs"),
        (answer(9, 9, 0.2, compilations=5), "net at 9.00 GB took 5 compilations"),
    ],
)
def test_a_broken_promise_is_named(made: Any, said: str) -> None:
    (problem,) = broken({"net": row(made)})
    assert problem.startswith(said)


def test_an_unknown_program_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="has no 'vgg': use all, or some of gpt, resnet"
    ):
        chosen("vgg", cases())
