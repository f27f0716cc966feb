"""`python -m sfpo_jax audit`."""

import json
from pathlib import Path

import pytest

from sfpo_jax import __main__ as command_line

CPU = ("--compiler", "cpu", "--mesh", "data=2")


def run(name: str, *arguments: str) -> int:
    return command_line.main(["audit", f"tests.auditing.steps:{name}", *arguments])


def test_the_status_says_whether_anything_was_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("build_keeps", *CPU) == 0
    out = capsys.readouterr().out
    assert out.startswith("no findings on a100-80gb, mesh data 2, compiled for cpu")
    assert run("build_widens", *CPU) == 1
    out = capsys.readouterr().out
    assert (
        out.startswith("2 findings on") and "growth          8.192 KB  steps.py" in out
    )
    assert run("build_widens", *CPU, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert not report["ok"] and report["mesh_shape"]["data"] == 2
    assert [finding["bytes"] for finding in report["findings"]] == [8192, 8192]


def test_the_page_shows_what_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ("--compressed", "data", "--releases-gradients")
    assert run("build_planted", *CPU, *options) == 1
    kept = Path(__file__).parents[2] / "docs" / "results" / "audit.md"
    printed = f"```text\n{capsys.readouterr().out}```\n"
    assert printed == kept.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such"], "names 'no_such', no function"),
        (["build_keeps", "--device", "a100"], "did you mean 'a100-80gb'?"),
        (["build_keeps", "--mesh", "data=0"], "`mesh` has the part 'data=0'"),
        (["build_keeps", *CPU, "--compressed", "date"], "no axis of the mesh"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert message in err
