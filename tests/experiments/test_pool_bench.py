"""The bench of the memory pool: what it refuses, and how it reads its programs."""

from pathlib import Path
from typing import Any

import pytest

from experiments.bench import pool
from experiments.bench.pool import Options
from sfpo_jax.training import ConfigError

_TEXT = "malloc\t4.0\t9.0\t2.0\nmmap\t8.0\t9.0\t8.0\npool\t2.0\t3.0\t2.0\n"
_TRACE = {"seed": 0, "limit": 10, "peak_in_use": 9, "peak_mapped": 10, "moved": 3}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sizes": ()}, "`sizes` must be numbers of at least 1"),
        ({"live": (0,)}, "`live` must be numbers of at least 1"),
        ({"sizes": (1, 3)}, "`sizes` must have an even one"),
        ({"rounds": 0}, "`rounds` must be at least 1"),
    ],
)
def test_wrong_options_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Options(**arguments)


def test_ratios_are_of_the_same_round() -> None:
    row = pool.make_row(4, 2, _TEXT)
    assert row["us"] == {"malloc": 4.0, "mmap": 8.0, "pool": 2.0}
    # 4 / 2, 9 / 3, 2 / 2, of which the middle one.
    assert row["malloc_by"] == {"malloc": 1.0, "mmap": 0.5, "pool": 2.0}


@pytest.mark.parametrize(("after", "status"), [(0.9, 0), (0.7, 1)])
def test_tables_are_written_and_a_shortfall_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: float, status: int
) -> None:
    trace = _TRACE | {"least_before": 0.6, "least_after": after}
    results = {
        "options": {"rounds": 3},
        "cores": 2,
        "load_before": 0.0,
        "rows": [pool.make_row(4, 1, _TEXT)],
        "floor": {"4": pool.parse_floor("memfd\t1234.5\nanonymous\t2.0\n")},
        "trace": [trace],
    }
    monkeypatch.setattr(pool, "measure", lambda options: results)
    out = tmp_path / "pool.json"
    assert pool.main(["--out", str(out)]) == status
    text = out.with_suffix(".md").read_text("utf-8")
    assert "| 4 MiB | 1 | 4 (1) | 8 (0.5) | 2 (2) |" in text
    assert "| memfd | 1,234 |" in text
    assert f"| 0 | 10 B | 9 B | 10 B | 3 B | 0.600 | {after:.3f} |" in text


def test_what_is_missing_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pool, "pool_problem", lambda backend: "no library")
    assert pool.main([]) == 1
    assert "no library" in capsys.readouterr().err
