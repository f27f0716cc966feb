"""The memory pool against the system's malloc, and how much of it stays in one piece.

    python -m experiments.bench.pool

Compiles three programs of `xla_ffi/tests`, which needs a C++ compiler, and writes JSON
and tables. `pool_floor` asks the system for memory in several ways. `pool_bench`
allocates blocks, writes a byte into every 4 KiB of them and frees them, by the
installed pool, by malloc and by mmap alone, in turns. `pool_trace` replays a recorded
trace. Fails where the pool is slower than malloc, or where less than 0.8 of what is
free can be had in one block after a compaction.
"""

import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sfpo_jax.kernels import find_library, pool_problem
from sfpo_jax.training import ConfigError, exit_on_config_error, load_config
from sfpo_jax.units import format_bytes

PROGRAM = "python -m experiments.bench.pool"
LEAST_IN_ONE = 0.8
_SOURCES = Path(__file__).parents[2] / "xla_ffi"
_FILE = "libsfpo_jax_pool.so"


@dataclasses.dataclass(frozen=True)
class Options:
    """What to time, how often, and where the numbers go."""

    sizes: tuple[int, ...] = (1, 4, 16, 64)
    """MiB of a block."""
    live: tuple[int, ...] = (1, 4)
    """Blocks that are alive at the same time."""
    rounds: int = 15
    """Of each contender, in turns."""
    out: str = "docs/results/pool.json"
    """The file of results; a table goes beside it."""

    def __post_init__(self) -> None:
        for name, least in {"sizes": 1, "live": 1}.items():
            if not getattr(self, name) or min(getattr(self, name)) < least:
                raise ConfigError(f"`{name}` must be numbers of at least {least}")
        if all(size % 2 for size in self.sizes):
            raise ConfigError("`sizes` must have an even one: huge pages are of 2 MiB")
        if self.rounds < 1:
            raise ConfigError(f"`rounds` must be at least 1, got {self.rounds}")


def compile_program(name: str, folder: Path, library: Path | None) -> Path:
    """Makes a program of `xla_ffi/tests`.

    Args:
      name: of its source, without the ending.
      folder: where it goes.
      library: the pool's library to use; None: the pool's sources, without CUDA.

    Raises:
      RuntimeError: there is no compiler, or it fails.
    """
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise RuntimeError("a C++ compiler must be on the PATH, or in `CXX`")
    pool = [library] if library else _host_sources()
    out = folder / name
    command = [compiler, "-std=c++17", "-O3", "-DNDEBUG", "-pthread"]
    command += [f"-I{_SOURCES}", str(_SOURCES / "tests" / f"{name}.cc")]
    command += [*map(str, pool), "-ldl", "-o", str(out)]
    if library:
        command.append(f"-Wl,-rpath,{library.parent}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return out


def _host_sources() -> list[Path]:
    found = sorted((_SOURCES / "memory_pool").glob("*.cc"))
    return [path for path in found if not path.name.startswith("cuda_")]


def run(program: Path, *arguments: object) -> str:
    """What a program prints.

    Raises:
      RuntimeError: it fails; with what it says.
    """
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{program.name}: {done.stdout}{done.stderr}")
    return done.stdout


def make_row(size: int, live: int, text: str) -> dict[str, Any]:
    """Medians in microseconds a block, and ratios to malloc, from `pool_bench`.

    A ratio is the median of those of each round, of malloc's time by the contender's:
    above 1 the contender is faster.
    """
    times: dict[str, list[float]] = {}
    for line in text.splitlines():
        name, *cells = line.split("\t")
        times[name] = [float(cell) for cell in cells]
    ratios = {
        name: statistics.median(
            a / b for a, b in zip(times["malloc"], own, strict=True)
        )
        for name, own in times.items()
    }
    return {
        "mib": size,
        "live": live,
        "us": {name: statistics.median(own) for name, own in times.items()},
        "malloc_by": {name: round(ratio, 3) for name, ratio in ratios.items()},
    }


def parse_floor(text: str) -> dict[str, float]:
    """Microseconds of each way to get memory, from `pool_floor`."""
    return {name: float(us) for name, us in (x.split("\t") for x in text.splitlines())}


def markdown(results: dict[str, Any]) -> str:
    """Three tables: times, the floor, and the trace."""
    rows, names = results["rows"], list(results["rows"][0]["us"])
    lines = [
        f"{results['cores']} CPU cores, shared (load {results['load_before']} before). "
        "Microseconds of a thread's CPU time, its faults included, for a block "
        "allocated, touched once in 4 KiB and freed; medians "
        f"of {results['options']['rounds']} interleaved rounds, and in brackets how "
        "many times as fast as malloc.",
        "",
        "| block | alive | " + " | ".join(names) + " |",
        "|---:|---:|" + "---:|" * len(names),
    ]
    for row in rows:
        cells = [_cell(row["us"][name], row["malloc_by"][name]) for name in names]
        lines.append(f"| {row['mib']} MiB | {row['live']} | {' | '.join(cells)} |")
    sizes = list(results["floor"])
    lines += [
        "",
        "| microseconds, the system alone | "
        + " | ".join(f"{size} MiB" for size in sizes)
        + " |",
        "|---|" + "---:|" * len(sizes),
    ]
    for way in results["floor"][sizes[0]]:
        cells = [f"{results['floor'][size][way]:,.0f}" for size in sizes]
        lines.append(f"| {way} | {' | '.join(cells)} |")
    lines += [
        "",
        "| trace | limit | in use at most | mapped at most | moved | "
        "largest / free, worst moment | after compaction |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for one in results["trace"]:
        cells = [format_bytes(one[key]) for key in _SIZES]
        cells += [f"{one['least_before']:.3f}", f"{one['least_after']:.3f}"]
        lines.append(f"| {one['seed']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


_SIZES = ("limit", "peak_in_use", "peak_mapped", "moved")


def _cell(us: float, ratio: float) -> str:
    return f"{us:.3g} ({ratio:.3g})" if us < 1000 else f"{us:,.0f} ({ratio:.3g})"


def measure(options: Options) -> dict[str, Any]:
    """All numbers.

    Raises:
      RuntimeError: no library, no compiler, or a program that fails.
    """
    library = find_library(_FILE)
    if problem := pool_problem("host"):
        raise RuntimeError(problem)
    assert library is not None
    results: dict[str, Any] = {
        "options": dataclasses.asdict(options),
        "cores": os.cpu_count(),
        # What else ran: times mean little where it is not near 0.
        "load_before": round(os.getloadavg()[0], 1),
    }
    with tempfile.TemporaryDirectory() as name:
        bench = compile_program("pool_bench", Path(name), library)
        trace = compile_program("pool_trace", Path(name), None)
        floor = compile_program("pool_floor", Path(name), library)
        results["rows"] = [
            make_row(size, live, run(bench, size, live, options.rounds))
            for live in options.live
            for size in options.sizes
        ]
        # Whole huge pages, as the pool maps them.
        results["floor"] = {
            str(size): parse_floor(run(floor, size))
            for size in options.sizes
            if size % 2 == 0
        }
        results["trace"] = [json.loads(line) for line in run(trace).splitlines()]
    return results


def main(argv: Sequence[str]) -> int:
    """Measures, prints the tables and writes them; 1 where the pool falls short.

    Args:
      argv: the arguments after the program's name.
    """
    with exit_on_config_error(PROGRAM):
        options = load_config(
            Options(), argv, prog=PROGRAM, description="Times the memory pool."
        )
    try:
        results = measure(options)
    except RuntimeError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(markdown(results), encoding="utf-8")
    print(markdown(results))
    slowest = min(row["malloc_by"]["pool"] for row in results["rows"])
    in_one = min(one["least_after"] for one in results["trace"])
    return int(slowest < 1 or in_one < LEAST_IN_ONE)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
