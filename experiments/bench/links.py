"""Does the cost model pick the method that is fastest? Over links of three bandwidths.

    sudo python -m experiments.bench.links

Two processes in network namespaces of their own average arrays of three sizes by each
method, taking turns; between them a link held to 100 Mbit/s, to 1 Gbit/s, or not at
all. The cost model, fed by the probe alone, picks one; its measured time is compared
with that of the best. Writes JSON and a table. Needs root and iproute2.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.bench.namespaces import Namespaces, problem
from sfpo_jax.collectives import Codec, Link, choose_method, methods
from sfpo_jax.training import exit_on_config_error, load_config

PROGRAM = "python -m experiments.bench.links"

LIMITS = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "not limited": None}
# Entries, and how often each method is run.
ROUNDS = {1 << 20: 15, 1 << 22: 9, 1 << 24: 5}
LIMIT = 1.15


@dataclasses.dataclass(frozen=True)
class Options:
    """Where the results go."""

    out: str = "docs/results/links.json"
    """The file of results; the table lies beside it."""


class Row(NamedTuple):
    """One bandwidth and size; times in seconds."""

    link: str
    entries: int
    chosen: str
    best: str
    estimated: dict[str, float]
    measured: dict[str, float]  # medians

    @property
    def ratio(self) -> float:
        """Measured time of the method chosen, over that of the best."""
        return self.measured[self.chosen] / self.measured[self.best]


def make_row(
    name: str,
    entries: int,
    link: Link,
    codecs: Mapping[str, Codec],
    times: Mapping[str, Sequence[float]],
) -> Row:
    """Compares what the model says with what was measured."""
    choice = choose_method(entries, 2, link, codecs)
    measured = {method: statistics.median(seconds) for method, seconds in times.items()}
    estimated = {x.method: x.seconds for x in choice.estimates}
    best = min(measured, key=measured.__getitem__)
    return Row(name, entries, choice.method, best, estimated, measured)


def measure() -> dict[str, Any]:
    """All bandwidths and sizes."""
    numbers = [str(x) for pair in ROUNDS.items() for x in pair]
    module = [sys.executable, "-m", "experiments.bench.links_child"]
    # One thread each: the two hosts share the cores of one machine.
    environ = os.environ | {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    with Namespaces(2) as hosts:
        children = [
            hosts.start(
                rank,
                [*module, str(rank), hosts.address, *numbers],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environ,
            )
            for rank in range(2)
        ]
        try:
            codecs = _answers(children)
            found = {}
            for name, bits in LIMITS.items():
                hosts.limit(bits)
                for child in children:
                    child.stdin.write("go\n")
                    child.stdin.flush()
                found[name] = _answers(children)
        finally:
            for child in children:
                child.kill()
                child.wait()
    return {"codecs": codecs, "links": found}


def _answers(children: Sequence[Any]) -> Any:
    """What the first process says; the other says as much."""
    lines = []
    for child in children:
        # Gloo greets on the same stream.
        line = child.stdout.readline()
        while line and not line.startswith("{"):
            line = child.stdout.readline()
        if not line:
            raise RuntimeError("a process ended before it answered")
        lines.append(line)
    return json.loads(lines[0])


def rows(found: Mapping[str, Any]) -> list[Row]:
    """One row for each bandwidth and size of what `measure` returned."""
    codecs = {name: _codec(*values) for name, values in found["codecs"].items()}
    return [
        make_row(name, int(entries), Link(*cell["link"]), codecs, times)
        for name, cell in found["links"].items()
        for entries, times in cell["times"].items()
    ]


def _codec(points: Sequence[Sequence[float]]) -> Codec:
    return Codec(tuple((int(n), seconds) for n, seconds in points))


def markdown(table: Sequence[Row]) -> str:
    """The table."""
    names = list(methods())
    lines = [
        f"| link | entries | {' | '.join(f'{n}, ms' for n in names)} | picked | best "
        "| picked / best |",
        f"| :-- | --: | {'--: | ' * len(names)}:-- | :-- | --: |",
    ]
    for row in table:
        times = [
            f"{1e3 * row.measured[n]:.0f} ({1e3 * row.estimated[n]:.0f})" for n in names
        ]
        lines.append(
            f"| {row.link} | {row.entries:,} | {' | '.join(times)} | {row.chosen} "
            f"| {row.best} | {row.ratio:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Measures and writes; 1 where a choice was more than 15 % slower than the best."""
    with exit_on_config_error(PROGRAM):
        options = load_config(
            Options(), argv, prog=PROGRAM, description="Cost model against measurement."
        )
    if reason := problem():
        print(f"{PROGRAM}: not measured: {reason}", file=sys.stderr)
        return 2
    found = measure()
    table = rows(found)
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    results = {
        **found,
        "cores": os.cpu_count(),
        "rows": [row._asdict() | {"ratio": row.ratio} for row in table],
    }
    out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    out.with_suffix(".md").write_text(markdown(table), encoding="utf-8")
    print(markdown(table))
    return int(any(row.ratio > LIMIT for row in table))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
