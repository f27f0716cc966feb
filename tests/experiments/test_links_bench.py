"""The benchmark of the cost model compares what it should; two hosts need root."""

import subprocess

import pytest

from experiments.bench import links, namespaces
from experiments.bench.links import LIMIT, make_row, markdown
from experiments.bench.namespaces import Namespaces, problem
from sfpo_jax.collectives import Codec, Link, methods

CODECS = {name: Codec(((0, 0.0), (10**6, 0.001))) for name in methods()}
TIMES = {
    "dense": [0.4, 0.1, 0.3],
    "bf16": [0.2, 0.2],
    "int8": [0.5],
    "sign": [0.24],
    "sparse_sign": [0.6],
}


def test_a_row_holds_the_choice_against_the_best() -> None:
    # So slow a link that the fewest bytes win.
    row = make_row("slow", 10**6, Link(1e-4, 1e6), CODECS, TIMES)
    assert (row.chosen, row.best) == ("sparse_sign", "bf16")
    assert row.measured["dense"] == 0.3
    assert row.ratio == pytest.approx(3.0) and row.ratio > LIMIT
    assert row.estimated["sparse_sign"] < row.estimated["sign"]
    fast = make_row("fast", 10**6, Link(1e-5, 1e12), CODECS, TIMES)
    assert (fast.chosen, fast.ratio) == ("dense", pytest.approx(1.5))
    lines = markdown([row, fast]).splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert lines[2].startswith("| slow | 1,000,000 | 300 (")
    assert lines[2].endswith("| sparse_sign | bf16 | 3.00 |")


def test_without_root_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(links, "measure", None)
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert links.main([]) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "not measured: network namespaces need root" in message


def test_missing_programs_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    monkeypatch.setattr(namespaces.shutil, "which", lambda name: None)
    assert problem() == "ip and tc not found: install iproute2"


@pytest.mark.skipif(problem() is not None, reason=f"no hosts: {problem()}")
def test_hosts_have_links_and_leave_nothing() -> None:
    def names() -> str:
        listed = ["ip", "netns", "list"]
        return subprocess.run(listed, capture_output=True, text=True).stdout

    hosts = Namespaces(3)
    try:
        hosts.__enter__()
    except OSError as error:
        pytest.skip(f"no namespaces: {error}")
    own = hosts.names[0]
    try:
        hosts.limit(1e8)
        shown = subprocess.run(
            ["tc", "-n", own, "qdisc", "show"], capture_output=True, text=True
        )
        assert "rate 100Mbit" in shown.stdout
        hosts.limit(None)
        child = hosts.start(2, ["cat", "/etc/hosts"], stdout=subprocess.PIPE)
        assert b"10.231.77.3" in child.communicate()[0]
        assert own in names()
    finally:
        hosts.__exit__(None, None, None)
    assert own not in names()
