"""`python -m sfpo_jax plan`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sfpo_jax import __main__ as command_line
from sfpo_jax.memory import _command

TARGET = "tests.memory.programs:build"
CPU = ("--compiler", "cpu", "--no-cache", "--mesh", "data=2")


def run(*arguments: str) -> int:
    return command_line.main(["plan", *arguments])


def test_a_plan_in_its_own_process(tmp_path: Path) -> None:
    flags = "JAX_PLATFORMS", "XLA_FLAGS"
    environ = {k: v for k, v in os.environ.items() if k not in flags}
    done = subprocess.run(
        [sys.executable, "-m", "sfpo_jax", "plan", TARGET, *CPU],
        capture_output=True,
        text=True,
        check=False,
        env=environ | {"XDG_CACHE_HOME": str(tmp_path)},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "fits into 85.1 GB of a100-80gb, mesh data 2" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_status_says_whether_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(TARGET, *CPU, "--budget", "1GB", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["fits"] and plan["mesh_shape"]["data"] == 2
    assert run(TARGET, *CPU, "--budget", "1MB") == 1
    assert "does NOT fit" in capsys.readouterr().out


def test_the_largest_batch(capsys: pytest.CaptureFixture[str]) -> None:
    target = "tests.memory.programs:build_small"
    options = ("--max-batch-size", "--multiple-of", "64")
    assert run(target, *CPU, *options, "--budget", "1MB") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "largest batch: 1920, at 986.9 KB a device"
    assert run(target, *CPU, *options, "--budget", "1MB", "--json") == 0
    assert json.loads(capsys.readouterr().out)["max_batch_size"] == 1920
    assert run(target, *CPU, *options, "--budget", "1KB") == 1
    assert "no batch fits, not even 64" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_module:build"], "'no_such_module', which is not found"),
        (["tests.no_such:build"], "'tests.no_such', which is not found"),
        (["tests.memory.programs:bild"], "names 'bild', no function"),
        (["tests.memory.programs"], "must be module:function, got"),
        ([TARGET, "--device", "a100"], "did you mean 'a100-80gb'?"),
        ([TARGET, "--budget", "40"], "`budget` has no unit, got '40'"),
        ([TARGET, "--mesh", "data"], "`mesh` has the part 'data'"),
        ([TARGET, "--mesh", "data=0"], "`mesh` has the part 'data=0'"),
        ([TARGET, "--mesh", "data=2,data=2"], "has the axis 'data' twice"),
        ([TARGET, "--mesh", ","], "`mesh` is empty"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert message in err


def test_a_missing_compiler_is_one_line_with_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sfpo_jax.memory._planner.compiler_problem", lambda: "no plugin"
    )
    assert run(TARGET, "--compiler", "gpu") == 2
    assert "no plugin; pip install" in capsys.readouterr().err


def test_what_the_target_itself_misses_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs_more.py").write_text("import no_such_module\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        _command.load_target("needs_more:build")
