"""The bench of the kernels: what it refuses, what it times, what it writes."""

import json
from pathlib import Path

import pytest

from experiments.bench import kernels
from experiments.bench.contender import Contender
from sfpo_jax.kernels import native_platforms


def test_a_case_is_timed_and_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "cpu" not in native_platforms():
        pytest.skip("no native library is in use")
    out = tmp_path / "kernels.json"
    arguments = ["--millions", "1", "--kernels", "server", "--repeats", "2"]
    assert kernels.main([*arguments, "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["kernel"], row["millions"]) == ("server", 1)
    assert [t["name"] for t in row["timings"]] == ["copy", "native", "jnp twin"]
    assert all(t["seconds"] > 0 and t["runs"] == 2 for t in row["timings"])
    table = out.with_suffix(".md").read_text()
    assert "| server | 1 million |" in table
    assert "| native |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--kernels", "sort"], "`kernels` must be all or of threshold"),
        (["--millions", "1.5"], "`millions` must be whole numbers"),
        (["--repeats", "0"], "`repeats` must be at least 1"),
    ],
)
def test_options_that_cannot_be_are_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        kernels.main(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_what_is_too_large_or_absent_is_left_out() -> None:
    ran: list[str] = []

    def prepare(name: str) -> Contender:
        return Contender(name, lambda size: lambda: ran.append(name))

    small = Contender("small", lambda size: lambda: ran.append("small"), limit=10)
    absent = Contender("absent", lambda size: None)
    found = kernels.time_all([prepare("any"), small, absent], 11, 3)
    assert [(t.name, t.runs) for t in found] == [("any", 3)]
    assert ran == ["any"] * 4


@pytest.mark.parametrize(
    ("flags", "said"), [("sse2", "EPYC"), ("avx avx2 avx512f", "EPYC (AVX-512)")]
)
def test_the_processor_is_named(flags: str, said: str) -> None:
    assert kernels.machine(f"model name\t: EPYC\nflags\t\t: fpu {flags}\n") == said


def test_the_table_has_copies_and_steps() -> None:
    def timing(name: str, seconds: float) -> dict[str, object]:
        return {"name": name, "seconds": seconds, "runs": 1}

    text = kernels.markdown(
        {
            "machine": "EPYC (AVX2)",
            "cores": 2,
            "repeats": 1,
            "rows": [
                {
                    "kernel": "server",
                    "millions": size,
                    "timings": [timing("copy", 0.01), timing("native", 0.015)],
                }
                for size in (1, 16)
            ],
            "steps": [timing("SGD", 0.05), timing("SFPO", 0.07)],
        }
    )
    assert text.startswith("EPYC (AVX2), 2 cores, shared;")
    assert "| server | 1 million | 16 million |" in text
    assert "| native | 15 ms (1.5) | 15 ms (1.5) |" in text
    assert "| SFPO | 70.0 ms | 20.0 ms |" in text
