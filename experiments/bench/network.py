"""Training over slow links: SFPO, dense JAX and PyTorch's hooks, measured alike.

    sudo python -m experiments.bench.network [--torch_python PATH] [--rounds 3]

Hosts are processes in network namespaces of their own, one core each, joined by links
of three bandwidths. All contenders train the same network on the same batches, in
turns; what they send is read from the interfaces. Writes JSON as it goes, a table with
the promises that were kept or not, and a picture. Without root: over loopback, where
nothing can be held back.
"""

import dataclasses
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from experiments.bench import network_bounds, network_report
from experiments.bench.namespaces import Loopback, Namespaces, problem
from experiments.bench.network_bounds import RATIO, RATIO_LINK, SHARE, SHARE_LINK
from experiments.bench.network_cells import (
    CONTENDERS,
    JAX,
    TORCH,
    bandwidth_for,
    difference,
    join_hosts,
    make_rows,
)
from experiments.bench.network_group import Group, with_torch
from experiments.bench.network_options import Options, link_name
from experiments.bench.network_task import parameters, write_digits
from sfpo_jax.training import exit_on_config_error, load_config

PROGRAM = "python -m experiments.bench.network"
_PACKAGE = "experiments.bench"
_TRIALS = ("alone", "dense", "onebit")  # over the links that dense training chooses
_WARMUP = 0.12  # dense steps of SFPO, share of a run

_FIRST_STEPS = 3  # PowerSGD's hook sends the first two densely

Results = dict[str, Any]
Save = Callable[[], None]


class Hosts:
    """Some hosts, and the processes of all contenders on them.

    Args:
      lab: the hosts.
      options: what to measure.
      torch_python: an interpreter that has PyTorch; None leaves its contenders out.
      folder: for the task and what the processes print as errors; holds "task.npz".
      say: tells what is going on.
    """

    def __init__(
        self,
        lab: Namespaces | Loopback,
        options: Options,
        torch_python: str | None,
        folder: Path,
        say: Callable[[str], None],
    ) -> None:
        self.count, self._lab = len(lab.interfaces), lab
        self._options, self._say = options, say
        self._stack = ExitStack()
        self.names = [
            name for name in options.chosen() if name in JAX or torch_python is not None
        ]
        self._groups: dict[str, Group] = {}
        kinds = {"jax": (JAX, sys.executable, "network_child")}
        if torch_python is not None:
            kinds["torch"] = (TORCH, torch_python, "network_torch")
        for place, (known, python, module) in enumerate(kinds.values()):
            mine = [name for name in self.names if name in known]
            if mine:
                group = Group(
                    lab,
                    python,
                    f"{_PACKAGE}.{module}",
                    lab.port + place,
                    options.batch,
                    folder / "task.npz",
                    folder,
                )
                self._stack.enter_context(group)
                self._groups |= dict.fromkeys(mine, group)
        self._wire: dict[str, Any] = {}
        self._chosen: str | None = None

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def prepare(self) -> None:
        """Compiles and warms up, over links that hold nothing back."""
        self._lab.limit(None)
        for group in dict.fromkeys(self._groups.values()):
            mine = [
                n for n, its in self._groups.items() if its is group and n != "auto"
            ]
            self._say(f"{self.count} hosts: compiling {', '.join(mine)}")
            answer = group.ask("prepare", names=mine, steps=_FIRST_STEPS)[0]
            if isinstance(answer, dict):
                self._wire |= answer
            elif answer != parameters(self._options.model()):
                raise RuntimeError(f"PyTorch's network has {answer:,} parameters")
        if "auto" in self.names:
            self._say(f"{self.count} hosts: measuring codecs")
            self._groups["auto"].ask("codecs")

    def limit(self, bits: float | None) -> str | None:
        """Sets the links; the reasons of what `auto` chooses over them."""
        self._lab.limit(bits)
        if "auto" not in self.names:
            return None
        answer = self._groups["auto"].ask("probe")[0]
        self._chosen = answer["chosen"]
        # What was chosen may not have been compiled.
        wire = self._groups["auto"].ask("prepare", names=["auto"], steps=0)[0]
        self._wire |= {"auto": wire["auto"]}
        return answer["reasons"]

    def measure(
        self, link: str, names: Sequence[str], results: Results, save: Save
    ) -> None:
        """A cell for each contender, taking turns in rounds; saved after each."""
        cells = {name: self._cell(link, name) for name in names}
        results["cells"] += cells.values()
        for place in range(self._options.rounds):
            for name in names:
                group, cycle = self._groups[name], CONTENDERS[name].cycle
                steps = 1 + -(-self._options.steps // cycle) * cycle
                turn = join_hosts(group.ask("turn", name=name, steps=steps))
                if isinstance(self._lab, Loopback):
                    # One interface counts what all of them send.
                    for counter in ("bytes", "packets"):
                        turn[counter] = [x / self.count for x in turn[counter]]
                cells[name]["rounds"].append(turn)
            medians = [
                f"{n} {statistics.median(c['rounds'][-1]['seconds'][1:]):.2f}"
                for n, c in cells.items()
            ]
            self._say(
                f"{self.count} hosts, {link}, round {place + 1}, s: "
                f"{', '.join(medians)}"
            )
            save()

    def _cell(self, link: str, name: str) -> dict[str, Any]:
        wire = self._wire.get(name, {}).get("compressed")
        cell = {"hosts": self.count, "link": link, "contender": name, "wire": wire}
        if name == "auto":
            cell["chosen"] = self._chosen
        return cell | {"rounds": []}

    def train(self, name: str, rate: float) -> dict[str, Any]:
        """A run of a contender, tested as it goes."""
        steps = self._options.train_steps
        points = self._groups[name].ask(
            "train",
            name=name,
            rate=rate,
            steps=steps,
            warmup=max(1, round(_WARMUP * steps)),
            every=self._options.train_every,
        )[0]
        last = points[-1]
        self._say(
            f"{name} at {rate:g}: accuracy {last['accuracy']:.3f} after "
            f"{last['seconds']:.0f} s"
        )
        run = {"contender": name, "rate": rate, "steps": steps, "points": points}
        return run | ({"chosen": self._chosen} if name == "auto" else {})


def measure(
    options: Options,
    labs: Callable[[int], Namespaces | Loopback],
    torch_python: str | None,
    results: Results,
    save: Save,
) -> None:
    """Fills in the results, and saves them whenever there is something new."""
    is_limited = labs is not Loopback
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_digits(folder / "task.npz", options.model())
        for count in options.host_counts():
            with (
                labs(count) as lab,
                Hosts(lab, options, torch_python, folder, _say) as hosts,
            ):
                hosts.prepare()
                for link, bits in options.links().items():
                    if bits is None or is_limited:
                        _one_link(hosts, link, bits, hosts.names, results, save)
                if count == 2 and is_limited:
                    _chosen_links(hosts, results, save)
                if count == 2 and options.train_steps:
                    _runs(hosts, options, is_limited, results, save)


def _one_link(
    hosts: Hosts,
    link: str,
    bits: float | None,
    names: Sequence[str],
    results: Results,
    save: Save,
) -> None:
    reasons = hosts.limit(bits)
    if reasons:
        _say(f"auto, {link}: {reasons}")
        results["auto"].append({"hosts": hosts.count, "link": link, "reasons": reasons})
    results["links"][link] = bits
    hosts.measure(link, names, results, save)


def _chosen_links(hosts: Hosts, results: Results, save: Save) -> None:
    """The two bandwidths of which the promises speak, found by how dense fares."""
    if not set(_TRIALS) <= set(hosts.names):
        return
    for link, spent in ((SHARE_LINK, SHARE / (1 - SHARE)), (RATIO_LINK, RATIO - 1)):
        cells = {(c["link"], c["contender"]): c for c in results["cells"]}
        points, alone = [], []
        for known, bits in results["links"].items():
            if known in (SHARE_LINK, RATIO_LINK):
                continue
            if bits is not None and (known, "dense") in cells:
                own = cells[known, "alone"]
                points.append((bits, difference(cells[known, "dense"], own)))
                alone += [x for turn in own["rounds"] for x in turn["seconds"][1:]]
        if len(points) < 2:
            return
        target = spent * statistics.median(alone)
        # The two measured ones that are nearest.
        points.sort(key=lambda point: abs(point[1] - target))
        try:
            bits = bandwidth_for(target, points[:2])
        except ValueError as error:
            _say(f"{link}: {error}")
            continue
        _say(f"{link}: {link_name(bits)}")
        _one_link(hosts, link, bits, _TRIALS, results, save)


def _runs(
    hosts: Hosts,
    options: Options,
    is_limited: bool,
    results: Results,
    save: Save,
) -> None:
    """Test accuracy over time, of all contenders that communicate."""
    hosts.limit(options.train_bits() if is_limited else None)
    for rate in options.learning_rates():
        for name in hosts.names:
            if CONTENDERS[name].alone != name and name != "onebit_alone":
                results["runs"].append(hosts.train(name, rate))
                save()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Measures and writes; 1 where a promise was not kept."""
    with exit_on_config_error(PROGRAM):
        options = load_config(
            Options(), argv, prog=PROGRAM, description="Training over slow links."
        )
    labs: Callable[[int], Namespaces | Loopback] = Namespaces
    if reason := problem():
        _say(f"{PROGRAM}: {reason}: over loopback, where nothing can be held back")
        labs = Loopback
    torch_python = with_torch(options.torch_python or sys.executable)
    if torch_python is None and any(name in TORCH for name in options.chosen()):
        _say(f"{PROGRAM}: no PyTorch here: its rows are left out (--torch_python PATH)")
    results: Results = {
        "options": dataclasses.asdict(options),
        "model": dataclasses.asdict(options.model()),
        "parameters": parameters(options.model()),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "is_limited": labs is Namespaces,
        "links": {},
        "auto": [],
        "cells": [],
        "runs": [],
    }
    out = Path(options.out)
    out.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        rows = make_rows(results["cells"], options.batch, results["parameters"])
        bounds = network_bounds.check(rows)
        results["rows"] = [row._asdict() | {"share": row.share} for row in rows]
        results["bounds"] = [bound._asdict() for bound in bounds]
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        text = network_report.markdown(results, rows, bounds)
        out.with_suffix(".md").write_text(text, encoding="utf-8")
        network_report.save_picture(out.with_suffix(".png"), results, rows)

    measure(options, labs, torch_python, results, save)
    print(out.with_suffix(".md").read_text(encoding="utf-8"))
    return int(not all(bound["is_met"] for bound in results["bounds"]))


if __name__ == "__main__":
    # Ended from outside it takes its namespaces away, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
