"""The network benchmark: counters, arithmetic, tables, and two hosts over loopback."""

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments.bench import namespaces, network
from experiments.bench.namespaces import Loopback
from experiments.bench.network_bounds import FREE, SLOW, check
from experiments.bench.network_cells import (
    CONTENDERS,
    DENSE_STEPS,
    HEADER,
    bandwidth_for,
    make_rows,
)
from experiments.bench.network_group import Group, with_torch
from experiments.bench.network_host import (
    Batches,
    Digits,
    Sent,
    Spec,
    read_digits,
    read_sent,
    serve,
    train,
)
from experiments.bench.network_options import Options
from experiments.bench.network_report import best_runs, markdown, save_picture
from experiments.bench.network_task import (
    VIT,
    create,
    filled,
    named,
    parameters,
    write_digits,
)
from sfpo_jax.training import ConfigError

PARAMETERS = 1_000_000
TABLE = """Inter-|   Receive                   |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs
    lo:  456339    3290    0    0    0     0          0         0   111  22    0    0
  veth0:1 2 0 0 0 0 0 0 98765 432 0 0 0 0 0 0
"""
TINY = dataclasses.replace(VIT, width=64, depth=1, heads=1, mlp_width=256)


def turn(seconds: float, sent: float, first: tuple[float, float]) -> dict[str, Any]:
    """A turn of one step that is apart and two that are alike."""
    return {
        "seconds": [first[0], seconds, seconds],
        "bytes": [first[1], sent, sent],
        "packets": [10 if sent else 0] * 3,
    }


def cell(
    name: str,
    seconds: float,
    sent: float,
    *,
    link: str = SLOW,
    first: tuple[float, float] = (9.0, 9.0),
    **more: Any,
) -> dict[str, Any]:
    rounds = [turn(seconds + extra, sent, first) for extra in (0.0, 0.1, 0.3)]
    shared = {"hosts": 2, "link": link, "contender": name, "wire": None}
    return shared | {"rounds": rounds} | more


CELLS = [
    cell("alone", 0.5, 0),
    cell("dense", 2.5, 4e6 + 10 * HEADER, wire=4_000_000),
    cell("onebit", 0.55, 130_000, wire=126_000, first=(2.6, 4e6)),
    cell("onebit_alone", 0.52, 0),
    cell("torch_ddp", 2.5, 4e6),
]


def test_counters_are_those_of_the_interface() -> None:
    assert read_sent("veth0", TABLE) == Sent(98765, 432)
    assert read_sent("lo", TABLE) == Sent(111, 22)
    assert read_sent("lo").bytes >= 0
    with pytest.raises(ValueError, match="`interface` must be one of this host"):
        read_sent("veth", TABLE)


def test_communication_is_what_a_step_takes_beyond_computing_alone() -> None:
    rows = make_rows(CELLS, batch=32, parameters=PARAMETERS)
    # PyTorch's own reference was not measured.
    assert [r.contender for r in rows] == ["alone", "dense", "onebit", "onebit_alone"]
    alone, dense, onebit, _ = rows
    assert alone.communication == 0 and alone.share == 0
    assert dense.communication == pytest.approx(2.0)
    assert dense.step == pytest.approx(2.6)
    assert dense.samples == pytest.approx(64 / 2.6)
    assert dense.payload == pytest.approx(4e6)
    # 2 (N - 1) / N x 4 bytes.
    assert dense.formula == 4 * PARAMETERS
    assert dense.mean_communication == dense.communication
    assert onebit.communication == pytest.approx(0.05)
    assert onebit.own == pytest.approx(0.03)
    assert DENSE_STEPS == pytest.approx(0.175)
    assert onebit.mean_communication == pytest.approx(0.175 * 2.0 + 0.825 * 0.05)
    assert onebit.mean_sent == pytest.approx(0.175 * 4e6 + 0.825 * 130_000)


def test_steps_of_which_one_sends_count_by_their_mean() -> None:
    one = {"seconds": [9.0, 0.5, 0.5, 0.5, 0.9], "bytes": [9e6, 0, 0, 0, 4e5]}
    lazy = cell("zero_one", 0.5, 0, wire=100_000)
    lazy["rounds"] = [one | {"packets": [10, 0, 0, 0, 8]}] * 3
    row = make_rows([CELLS[0], lazy], 32, PARAMETERS)[1]
    assert row.step == pytest.approx(0.6) and row.sent == 100_000
    assert row.communication == pytest.approx(0.6 - 0.6)  # the rounds of alone: 0.6
    assert row.own is None and row.payload == 100_000 - 2 * HEADER
    assert row.formula == pytest.approx(PARAMETERS / 8 / 4, rel=0.02)
    assert row.mean_sent == pytest.approx(0.175 * 9e6 + 0.825 * 1e5)


def test_auto_is_what_it_chose() -> None:
    chosen = cell("auto", 0.55, 130_000, first=(2.6, 4e6), chosen="onebit")
    row = make_rows([*CELLS, chosen], 32, PARAMETERS)[-1]
    assert row.mean_sent > row.sent and row.formula is not None
    text = markdown(results([]), [row], [])
    assert "| SFPO auto (SFPO one bit) |" in text


def test_promises_are_met_or_missed() -> None:
    free = [
        cell("alone", 0.5, 0, link=FREE),
        cell("dense", 0.6, 4e6, link=FREE),
        cell("auto", 0.6, 4e6, link=FREE, chosen="dense"),
    ]
    bounds = check(make_rows([*CELLS, *free], 32, PARAMETERS))
    by = {bound.promise: bound for bound in bounds}
    time = by[f"2 hosts, {SLOW}, SFPO one bit over dense float32: communication time"]
    assert (time.found, time.limit, time.is_met) == (pytest.approx(0.025), 0.05, True)
    sent = by[f"2 hosts, {SLOW}, SFPO one bit over dense float32: bytes"]
    assert sent.is_met and sent.found == pytest.approx(130_000 / 4_000_660)
    assert by[f"2 hosts, {FREE}: auto (dense) over the best dense"].found == 1
    wire = by["2 hosts, SFPO one bit: interface against wire_bytes"]
    assert wire.found == pytest.approx(129_340 / 126_000 - 1) and wire.is_met
    slow = [cell("alone", 0.5, 0), cell("dense", 1.0, 4e6), cell("onebit", 1.0, 4e6)]
    missed = check(make_rows(slow, 32, PARAMETERS))
    assert not missed[0].is_met and str(missed[0]).endswith("**missed**")


def test_a_bandwidth_is_found_between_two_links() -> None:
    points = [(1e8, 0.01 + 1.0), (1e9, 0.01 + 0.1)]
    assert bandwidth_for(0.01 + 0.4, points) == pytest.approx(2.5e8)
    with pytest.raises(ValueError, match="at no bandwidth"):
        bandwidth_for(0.005, points)
    with pytest.raises(ValueError, match="at no bandwidth"):
        bandwidth_for(0.5, [(1e8, 0.1), (1e9, 1.0)])


def results(runs: list[Any]) -> dict[str, Any]:
    return {
        "options": dataclasses.asdict(Options()),
        "model": dataclasses.asdict(VIT),
        "parameters": PARAMETERS,
        "cores": 2,
        "is_limited": True,
        "links": {SLOW: 1e8},
        "runs": runs,
    }


def run_of(name: str, rate: float, accuracies: list[float]) -> dict[str, Any]:
    points = [
        {"step": i, "seconds": 2.0 * i, "accuracy": x, "loss": 1.0, "train_loss": 1.0}
        for i, x in enumerate(accuracies)
    ]
    return {"contender": name, "rate": rate, "points": points}


def test_table_and_picture(tmp_path: Path) -> None:
    runs = [
        run_of("dense", 1e-3, [0.1, 0.5, 0.86]),
        run_of("onebit", 1e-3, [0.1, 0.2, 0.3]),
        run_of("onebit", 3e-3, [0.1, 0.9, 0.95]),
    ]
    assert [r["rate"] for r in best_runs(runs, 0.85)] == [1e-3, 3e-3]
    rows = make_rows(CELLS, 32, PARAMETERS)
    text = markdown(results(runs), rows, check(rows))
    table = [line for line in text.splitlines() if line.startswith("| JAX dense")]
    assert len(table) == 2 and table[0].count("|") == 12
    assert "| SFPO one bit | 0.003 | 95.0% | 4.0 | 2.0 |" in text
    assert "**2 hosts, 100 Mbit/s**" in text and ", met" in text
    save_picture(tmp_path / "a.png", results(runs), rows)
    save_picture(tmp_path / "b.png", results([]), [])
    assert (tmp_path / "a.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hosts", "1", "numbers from 2"),
        ("contenders", "dens", "got dens"),
        ("bandwidths", "100", "unit"),
        ("rates", "fast", "fast"),
        ("width", 100, "multiple of 64"),
        ("rounds", 0, "at least 1"),
    ],
)
def test_options_are_checked(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options(**{name: value})


def test_contenders_bring_what_they_are_compared_with() -> None:
    chosen = Options(contenders="onebit,torch_ddp").chosen()
    assert chosen == ["alone", "onebit", "torch_alone", "torch_ddp"]
    assert parameters(VIT) == parameters(Options().model()) == 5_353_354


def test_hosts_share_a_batch_and_train() -> None:
    digits = Digits(
        images=np.arange(10, dtype=np.float32)[:, None, None],
        labels=np.arange(10, dtype=np.int32),
        test_images=np.zeros((1, 1, 1), np.float32),
        test_labels=np.zeros(1, np.int32),
        config={},
        weights={},
    )
    streams = [Batches(digits, 2, host, 2) for host in range(2)]
    seen = [next(stream)[1].tolist() for _ in range(2) for stream in streams]
    # Every image once before any comes again.
    assert len({x for part in seen for x in part}) == 8

    class Fake:
        def begin(self, name: str, spec: Spec) -> None:
            pass

        def step(self, images: np.ndarray, labels: np.ndarray) -> float:
            return 0.5

        def test(self) -> tuple[float, float]:
            return 0.9, 0.1

        def barrier(self) -> None:
            pass

    points = train(Fake(), streams[0], Spec(1.0, 5, 1), 2, 0)
    assert [p["step"] for p in points] == [0, 2, 4, 5]
    assert points[-1]["train_loss"] == 0.5 and points[-1]["accuracy"] == 0.9


def test_orders_are_answered() -> None:
    answers = io.StringIO()
    orders = io.StringIO('{"do": "add", "a": 1, "b": 2}\n')
    serve({"add": lambda a, b: a + b}, orders, answers)
    assert json.loads(answers.getvalue()) == {"answer": 3}


def test_parameters_survive_the_file(tmp_path: Path) -> None:
    write_digits(tmp_path / "task.npz", TINY)
    digits = read_digits(tmp_path / "task.npz")
    again = named(filled(TINY, digits.weights))
    first = named(create(TINY))
    assert first.keys() == again.keys()
    assert all(np.array_equal(x, again[name]) for name, x in first.items())
    assert digits.config["width"] == 64 and len(digits.images) == 4000


def test_without_root_it_says_so(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    seen = []
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network, "measure", lambda *given: seen.append(given[1]))
    monkeypatch.setattr(network, "with_torch", lambda python: None)
    out = str(tmp_path / "network.json")
    with pytest.raises(FileNotFoundError):
        network.main(["--out", out])  # nothing was measured
    assert seen == [Loopback]
    message = capsys.readouterr().err.splitlines()
    assert "network namespaces need root: over loopback" in message[0]
    assert "no PyTorch here" in message[1] and len(message) == 2
    with pytest.raises(ValueError, match="must be None over loopback"):
        Loopback(2).limit(1e8)


def test_no_interpreter_has_no_pytorch() -> None:
    assert with_torch("/nowhere/python") is None


@pytest.mark.full
def test_two_hosts_over_loopback(tmp_path: Path) -> None:
    write_digits(tmp_path / "task.npz", TINY)
    lab = Loopback(2)
    module = "experiments.bench.network_child"
    given = (lab.port, 4, tmp_path / "task.npz", tmp_path)
    with Group(lab, sys.executable, module, *given) as group:
        names = ["dense", "onebit", "unmasked", "zero_one", "low_rank"]
        wire = group.ask("prepare", names=names, steps=1)[0]
        for name in names:
            cycle = CONTENDERS[name].cycle
            first, second = group.ask("turn", name=name, steps=1 + cycle)
            assert len(first["seconds"]) == len(second["seconds"]) == 1 + cycle
            # The interface counts both hosts.
            sent = sum(first["bytes"][1:]) / cycle
            assert sent > 2 * wire[name]["compressed"]
        points = group.ask(
            "train", name="onebit", rate=1e-3, steps=3, warmup=1, every=1
        )[0]
    dense = wire["dense"]["compressed"]
    assert wire["onebit"]["compressed"] < dense / 20
    # Mask and Adam each ask the ranks whether all of the gradient is finite.
    assert wire["onebit"]["compressed"] == wire["unmasked"]["compressed"] + 4
    assert wire["zero_one"]["compressed"] < wire["onebit"]["compressed"] / 2
    assert wire["low_rank"]["compressed"] < dense / 10
    assert len(points) == 4 and points[-1]["loss"] > 0


def test_a_host_that_ends_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lab = Loopback(1)
    (tmp_path / "host_that_ends.py").write_text("raise SystemExit('gone')\n")
    started: list[Any] = []

    def start(host: int, command: list[str], **options: Any) -> Any:
        started.append(subprocess.Popen(command, cwd=tmp_path, **options))
        return started[-1]

    monkeypatch.setattr(lab, "start", start)
    given = (1, 1, tmp_path / "task.npz", tmp_path)
    with (
        Group(lab, sys.executable, "host_that_ends", *given) as group,
        pytest.raises((RuntimeError, BrokenPipeError)),
    ):
        group.ask("turn")
