"""What the native kernels gain: each against its twin, a user's code, and a copy.

    python -m experiments.bench.kernels

Everything is timed in place where it can be (donated buffers, warm destinations), in
interleaved repeats, medians. The unit is a copy of the same number of float32 entries
into a warm destination by as many threads as there are cores: what it costs to read
and write the entries once. Writes JSON and a table.
"""

import dataclasses
import json
import os
import platform
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from experiments.bench.contender import Contender, Run, copy_in_threads
from experiments.bench.kernel_cases import CASES
from experiments.bench.step_case import step_runs
from sfpo_jax.kernels import load_libraries
from sfpo_jax.training import ConfigError, exit_on_config_error, load_config

PROGRAM = "python -m experiments.bench.kernels"
# Among the kernels' names: a whole training step.
_STEP = "step"
# A contender that is much slower than the others is not repeated for minutes.
_PATIENCE_SECONDS = 20.0


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time, and where to."""

    millions: str = "1,16,100"
    """Millions of entries, by commas."""
    repeats: int = 15
    """Interleaved runs of each contender."""
    kernels: str = "all"
    """Which, by commas."""
    out: str = "docs/results/kernels.json"
    """The file of results; the table lies beside it."""

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ConfigError(f"`repeats` must be at least 1, got {self.repeats}")
        words = self.millions.split(",")
        if not all(word.isdigit() and int(word) > 0 for word in words):
            raise ConfigError(
                f"`millions` must be whole numbers by commas, got {self.millions!r}"
            )
        if unknown := set(self.chosen()) - {*CASES, _STEP}:
            raise ConfigError(
                f"`kernels` must be all or of {', '.join([*CASES, _STEP])}, got "
                f"{', '.join(sorted(unknown))}"
            )

    def chosen(self) -> list[str]:
        """The kernels' names."""
        return [*CASES, _STEP] if self.kernels == "all" else self.kernels.split(",")

    def sizes(self) -> list[int]:
        """Millions of entries."""
        return [int(word) for word in self.millions.split(",")]


class Timing(NamedTuple):
    """The medians of one contender, in seconds."""

    name: str
    seconds: float
    runs: int


def time_all(contenders: Sequence[Contender], size: int, repeats: int) -> list[Timing]:
    """Medians of interleaved runs, the first of each, which compiles, left out."""
    runs: dict[str, Run] = {}
    for contender in contenders:
        if size <= contender.limit and (run := contender.prepare(size)) is not None:
            run()
            runs[contender.name] = run
    return interleaved(runs, repeats)


def interleaved(runs: Mapping[str, Run], repeats: int) -> list[Timing]:
    """Medians over turns in which each is run once."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            if sum(seconds[name]) > _PATIENCE_SECONDS:
                continue
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
    return [Timing(name, float(np.median(s)), len(s)) for name, s in seconds.items()]


def machine(cpuinfo: str | None = None) -> str:
    """The processor, and the widest vectors it computes on.

    Args:
      cpuinfo: the text of /proc/cpuinfo; None reads it, where there is one.

    Example:
      >>> machine("model name\\t: EPYC\\nflags\\t\\t: fpu avx avx2\\n")
      'EPYC (AVX2)'
    """
    path = Path("/proc/cpuinfo")
    if cpuinfo is None:
        cpuinfo = path.read_text(encoding="utf-8") if path.exists() else ""
    found = dict(re.findall(r"^(model name|flags)\s*: (.*)$", cpuinfo, re.MULTILINE))
    name, flags = found.get("model name", platform.machine()), found.get("flags", "")
    known = {"avx512f": "AVX-512", "avx2": "AVX2"}
    widest = next((x for flag, x in known.items() if flag in flags.split()), None)
    return f"{name} ({widest})" if widest else name


def measure(options: Options, console: Console) -> list[dict[str, Any]]:
    """Times every kernel at every size."""
    rows = []
    copy = Contender("copy", copy_in_threads)
    for million in options.sizes():
        for kernel in (name for name in options.chosen() if name != _STEP):
            contenders = [copy, *CASES[kernel]]
            timings = time_all(contenders, million * 10**6, options.repeats)
            row = {"kernel": kernel, "millions": million}
            row["timings"] = [timing._asdict() for timing in timings]
            rows.append(row)
            found = ", ".join(f"{t.name} {1e3 * t.seconds:.1f} ms" for t in timings)
            console.print(f"{million} M, {kernel}: {found}", highlight=False)
    return rows


def markdown(result: dict[str, Any]) -> str:
    """A table of each kernel: contenders down, sizes across."""
    lines = [
        f"{result['machine']}, {result['cores']} cores, shared; medians of up to "
        f"{result['repeats']} interleaved runs, and in brackets as",
        "many times that of copying as many float32 entries into a warm destination "
        "with all cores.",
    ]
    sizes = sorted({row["millions"] for row in result["rows"]})
    for kernel in dict.fromkeys(row["kernel"] for row in result["rows"]):
        heads = [f"{size} million" for size in sizes]
        lines += ["", f"| {kernel} | " + " | ".join(heads) + " |"]
        lines += ["|---|" + "---:|" * len(sizes)]
        cells: dict[str, dict[int, str]] = {}
        for row in result["rows"]:
            if row["kernel"] != kernel:
                continue
            copy = row["timings"][0]["seconds"]
            for timing in row["timings"]:
                text = _spoken(timing["seconds"])
                if timing["name"] != "copy":
                    text += f" ({timing['seconds'] / copy:.3g})"
                cells.setdefault(timing["name"], {})[row["millions"]] = text
        for name, found in cells.items():
            values = [found.get(size, "-") for size in sizes]
            lines.append(f"| {name} | " + " | ".join(values) + " |")
    lines += _step_table(result.get("steps", []))
    return "\n".join(lines) + "\n"


def _spoken(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _step_table(steps: Sequence[dict[str, Any]]) -> list[str]:
    """What each step takes, and how much of it is not forward and backward."""
    if not steps:
        return []
    lines = [
        "",
        "| step of the default `vit_l` | time | without SGD's |",
        "|---|---:|---:|",
    ]
    least = steps[0]["seconds"]
    for timing in steps:
        cells = [1e3 * timing["seconds"], 1e3 * (timing["seconds"] - least)]
        lines.append(f"| {timing['name']} | {cells[0]:.1f} ms | {cells[1]:.1f} ms |")
    note = "Eight simulated devices; SGD's step is forward and backward, near enough."
    return [*lines, "", note]


def main(argv: Sequence[str]) -> int:
    """Measures and writes.

    Args:
      argv: the arguments after the program's name.

    Returns:
      The exit status, 0.

    Raises:
      SystemExit: with status 2 for options that cannot be used, 0 after `--help`.
    """
    with exit_on_config_error(PROGRAM):
        options = load_config(
            Options(), argv, prog=PROGRAM, description="Times the native kernels."
        )
    console = Console(soft_wrap=True)
    if "cpu" not in [x.platform for x in load_libraries() if not x.problem]:
        console.print("No native kernels are loaded: `python -m sfpo_jax doctor`.")
        return 1
    result: dict[str, Any] = {
        "machine": machine(),
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "repeats": options.repeats,
        "rows": measure(options, console),
    }
    if _STEP in options.chosen():
        # Twice the turns: one in sixteen of SFPO's steps is a dense one.
        timings = interleaved(step_runs(), 2 * options.repeats)
        result["steps"] = [timing._asdict() for timing in timings]
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(markdown(result), encoding="utf-8")
    console.print(markdown(result), markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
