"""The command line and `doctor`: each outcome of each check, on any machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sfpo_jax import __main__ as command_line
from sfpo_jax import _doctor
from sfpo_jax._doctor import Devices, Finding, check_kernels
from sfpo_jax._requirements import Requirement, parse_requirement, satisfies
from sfpo_jax.kernels import Library

CPU = Devices("cpu", "cpu", 1, 1, None, "")
GPU = Devices("gpu", "NVIDIA A100", 8, 2, 60_000_000_000, "")


def run_module(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sfpo_jax", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environ,
    )


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


@pytest.mark.parametrize(
    ("version", "bounds", "expected"),
    [
        ("0.10.2", ">=0.10.2,<0.13", True),
        ("0.12.0.1", ">=0.10.2,<0.13", True),
        ("0.13", ">=0.10.2,<0.13", False),
        ("0.13.0.dev1", ">=0.10.2,<0.13", False),
        ("0.10.1", ">=0.10.2,<0.13", False),
        ("0.9.9", ">=0.10.2", False),
        ("2.0", ">=2", True),
        ("2", "<=2.0.0", True),
        ("2", ">2.0", False),
        ("10.0", ">=10.0", True),
        ("3.11.7", ">=3.11", True),
        ("1.0", "", True),
    ],
)
def test_versions_are_compared(version: str, bounds: str, expected: bool) -> None:
    assert satisfies(version, bounds) is expected


def test_what_is_no_requirement_is_refused() -> None:
    assert parse_requirement("jax") == Requirement("jax", "", "")
    with pytest.raises(ValueError, match="no requirement"):
        parse_requirement(">=1")


def test_packages_in_and_out_of_range() -> None:
    needs = [Requirement("jax", ">=0.10.2,<0.13", ""), Requirement("optax", "", "")]
    jax, optax = _doctor.check_packages(needs, {"jax": "0.13.1"}.get)
    assert (jax.mark, jax.remedy) == ("fix", "pip install 'jax>=0.10.2,<0.13'")
    assert "0.13.1" in jax.fact
    assert (optax.mark, optax.remedy) == ("fix", "pip install 'optax'")
    good = _doctor.check_packages(needs, {"jax": "0.12.0.1", "optax": "1"}.get)
    assert [finding.mark for finding in good] == ["ok", "ok"]


def test_extras_name_what_is_missing_and_the_command() -> None:
    needs = [
        Requirement("flax", ">=0.12", "experiments"),
        Requirement("rich", "", "experiments"),
        Requirement("sfpo_jax", "", "test"),
        Requirement("pytest", "", "test"),
    ]
    missing, whole = _doctor.check_packages(needs, {"rich": "15", "pytest": "9"}.get)
    assert missing.mark == "note"
    assert "flax>=0.12" in missing.fact and "rich" not in missing.fact
    assert missing.remedy.endswith("pip install -e '.[experiments]'")
    assert whole == Finding("ok", "extra test", "complete")


def test_devices_that_are_there() -> None:
    assert only(_doctor.check_devices(CPU, {}, has_nvidia=False)).mark == "ok"
    fact = only(_doctor.check_devices(GPU, {}, has_nvidia=True)).fact
    assert fact == "8 x NVIDIA A100 (gpu), 60 GB each for JAX, in 2 processes"


def test_a_cpu_shown_several_times_is_said() -> None:
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    _, note = _doctor.check_devices(CPU, flags, has_nvidia=False)
    assert note.mark == "note" and "one CPU" in note.fact


def test_an_unused_gpu_is_to_fix_unless_the_cpu_was_asked_for() -> None:
    _, unused = _doctor.check_devices(CPU, {}, has_nvidia=True)
    assert unused.mark == "fix" and "jax[cuda13]" in unused.remedy
    asked = {"JAX_PLATFORMS": "cpu"}
    assert only(_doctor.check_devices(CPU, asked, has_nvidia=True)).mark == "ok"


def test_a_backend_that_does_not_start_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail() -> None:
        raise RuntimeError("no driver\nand a long trace")

    monkeypatch.setattr(_doctor.jax, "devices", fail)
    found = _doctor.find_devices()
    finding = only(_doctor.check_devices(found, {}, has_nvidia=False))
    assert finding.mark == "fix"
    assert finding.fact == "no backend: RuntimeError no driver"
    assert "JAX_PLATFORMS" in finding.remedy


@pytest.mark.parametrize(
    ("environ", "mark", "words"),
    [
        ({}, "ok", "reserves 75%"),
        ({"XLA_CLIENT_MEM_FRACTION": "0.9"}, "ok", "reserves 90%"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, "ok", "reserves 50%"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "note", "up to 75%"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, "note", "given back at once"),
        ({"XLA_PYTHON_CLIENT_ALLOCATOR": "vmm"}, "note", "the allocator vmm"),
        ({"XLA_CLIENT_MEM_FRACTION": "90%"}, "fix", "is not a number"),
        (
            {"XLA_CLIENT_MEM_FRACTION": "1", "XLA_PYTHON_CLIENT_MEM_FRACTION": "1"},
            "fix",
            "refuses to start",
        ),
    ],
)
def test_memory_settings_on_a_gpu(
    environ: dict[str, str], mark: str, words: str
) -> None:
    finding = only(_doctor.check_memory(environ, "gpu"))
    assert finding.mark == mark
    assert words in finding.fact
    assert finding.remedy


def test_memory_settings_do_nothing_on_a_cpu() -> None:
    environ = {"XLA_CLIENT_MEM_FRACTION": "0.9"}
    finding = only(_doctor.check_memory(environ, "cpu"))
    assert finding.mark == "ok"
    assert finding.fact == "XLA_CLIENT_MEM_FRACTION=0.9: of no effect on cpu"


def test_the_report_is_aligned_and_counts_what_is_broken() -> None:
    long = "word " * 30
    findings = [Finding("ok", "a", "fine"), Finding("fix", "bcd", long, "do this")]
    lines = _doctor.render(findings, width=40).splitlines()
    assert lines[0] == "ok    a    fine"
    assert lines[1].startswith("fix   bcd  word")
    assert all(line.startswith(" " * 11) for line in lines[2:-2])
    assert all(len(line) <= 40 for line in lines)
    assert lines[-3] == " " * 11 + "-> do this"
    assert lines[-1] == "1 to fix."


def test_doctor_runs_and_warns_about_the_automatic_mean() -> None:
    done = run_module("doctor", COLUMNS="500")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    is_installed = _doctor.installed(_doctor.PACKAGE) is not None
    for words in (
        "supported: >=0.10.2,<0.13" if is_installed else "not installed",
        "devices",
        "kernels cpu",
        "memory pool host",
        "memory pool cuda",
        "axis_name=None the compiler has already averaged the gradients densely",
        "use sfpo_jax.make_train_step, or shard_map with axis_name set",
        "Nothing to fix.",
    ):
        assert words in done.stdout


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_the_commands_are_listed(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = command_line.main(arguments)
    except SystemExit as stop:
        status = stop.code
    assert status == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in command_line.COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["docter"], "unknown command 'docter': did you mean 'doctor'?"),
        (["xyz"], "unknown command 'xyz': use doctor"),
        (["--verbose"], "unrecognized arguments: --verbose"),
        (["doctor", "--fast"], "unrecognized arguments: --fast"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        command_line.main(arguments)
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1 and said.endswith("\n")


def test_the_planner_is_there_or_says_what_installs_it() -> None:
    assert only(_doctor.check_planner(None, "pip")).mark == "ok"
    finding = only(_doctor.check_planner("no plugin", "pip install plugin"))
    assert finding.mark == "note"
    assert finding.fact.endswith("no plugin")
    assert finding.remedy == "if you want it: pip install plugin"


def test_kernels_are_native_absent_or_broken() -> None:
    path = Path("libsfpo_jax_cpu.so")
    loaded, absent, broken = check_kernels(
        [
            Library("cpu", path, ""),
            Library("cuda", None, "there is no library"),
            Library("cuda", path, "cannot be loaded"),
        ]
    )
    assert (loaded.mark, loaded.fact) == ("ok", "native: libsfpo_jax_cpu.so")
    assert absent.mark == "note"
    assert "the jnp versions run" in absent.fact
    assert broken.mark == "fix"
    assert "pip install" in broken.remedy


def test_a_pool_is_there_or_says_why_not() -> None:
    host, cuda = _doctor.check_pool({"host": "", "cuda": "no driver"})
    assert (host.mark, host.topic) == ("ok", "memory pool host")
    assert "2.097 MB" in host.fact
    assert (cuda.mark, cuda.fact) == ("note", "not available: no driver")
