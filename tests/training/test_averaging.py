"""From links to the axes that are exact, the axes that are compressed, and how."""

import dataclasses
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

import sfpo_jax as sfpo
from sfpo_jax import training
from sfpo_jax.collectives import Codec, Link
from sfpo_jax.parallel import Links
from sfpo_jax.training import (
    Axes,
    Communication,
    ConfigError,
    Memory,
    Optimizer,
    Sparsity,
    build,
    make_optimizer,
    settle,
    split_axes,
)
from sfpo_jax.training import _averaging as averaging

SHAPES = [(1024, 1024), (1024,)]
FAST, SLOW = "300GB/s", "12.5MB/s"
CODECS = {
    "dense": Codec(((0, 0.0),)),
    "bf16": Codec(((0, 1e-4),)),
    "int8": Codec(((0, 1e-4),)),
    "sign": Codec(((0, 5e-4),)),
    "sparse_sign": Codec(((0, 1.0),)),
    "low_rank": Codec(((0, 6e-4),)),
}


@pytest.fixture
def mesh() -> Mesh:
    return sfpo.make_mesh(node=2, data=4, devices=jax.devices()[:8])


def section(algorithm: str, enable: bool = True, **links: str) -> Communication:
    values: dict[str, Any] = {
        "compression": {"algorithm": algorithm},
        "topology_aware": {"enable": enable},
        "links": links,
    }
    return build(Communication, values)


@pytest.fixture(autouse=True)
def measured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, float]]:
    """What was asked for; what is not given is 1 GB/s, and codecs are known."""
    asked: list[dict[str, float]] = []

    def find(mesh: Mesh, given: dict[str, float], methods: Any) -> Links:
        asked.append(given)
        wide = [a for a in ("node", "data") if mesh.shape[a] > 1]
        return Links(
            {a: Link(1e-5, given.get(a, 1e9)) for a in wide},
            {a: "given" if a in given else "measured" for a in wide},
            {name: CODECS[name] for name in methods or ()},
        )

    monkeypatch.setattr(averaging, "find_links", find)
    return asked


@pytest.mark.parametrize(
    ("links", "algorithm", "expected"),
    [
        ({"node": SLOW, "data": FAST}, "1bit_adam", Axes(("node",), ("data",))),
        ({"node": FAST, "data": SLOW}, "int8", Axes(("data",), ("node",))),
        ({"node": SLOW, "data": "49GB/s"}, "int8", Axes(("node", "data"), ())),
        ({"node": SLOW, "data": "50GB/s"}, "int8", Axes(("node",), ("data",))),
        # 400 Gbit/s are 50 GB/s.
        ({"node": SLOW, "data": "400Gbit/s"}, "bf16", Axes(("node",), ("data",))),
        ({"node": FAST, "data": FAST}, "none", Axes(("node",), ())),
    ],
)
def test_a_named_algorithm_goes_over_the_slow_axes(
    mesh: Mesh, links: dict[str, str], algorithm: str, expected: Axes
) -> None:
    settled, _ = settle(section(algorithm, True, **links), mesh, SHAPES)
    assert split_axes(settled, mesh) == expected
    assert settled.compression.algorithm == algorithm


def test_without_topology_all_is_as_it_was(mesh: Mesh, measured: list) -> None:
    given = section("1bit_adam", enable=False, node=FAST, data=FAST)
    assert settle(given, mesh, SHAPES) == (given, [])
    assert split_axes(given, mesh) == Axes(("node",), ())
    flat = sfpo.make_mesh(data=8, devices=jax.devices()[:8])
    assert split_axes(given, flat) == Axes(("data",), ())
    assert measured == []


def test_fast_links_are_not_compressed_for(mesh: Mesh) -> None:
    given = section("1bit_adam", node=FAST, data=FAST)
    settled, reasons = settle(given, mesh, SHAPES)
    assert settled.compression.algorithm == "none"
    assert "all links reach 50GB/s" in reasons[-1]
    assert "false forces an algorithm" in reasons[-1]


@pytest.mark.parametrize(
    ("node", "algorithm"),
    [("12.5MB/s", "1bit_adam"), ("1GB/s", "int8"), ("40GB/s", "none")],
)
def test_auto_takes_the_fastest_and_says_why(
    mesh: Mesh, node: str, algorithm: str
) -> None:
    settled, reasons = settle(section("auto", node=node, data=FAST), mesh, SHAPES)
    assert settled.compression.algorithm == algorithm
    assert reasons[0].startswith("node: 2 ranks, ")
    # A quarter of the matrix, for it is cut over four devices; the vector is not.
    assert any("263,168 entries" in r for r in reasons)
    is_exact = any(r.startswith("reduced exactly and first") for r in reasons)
    assert is_exact == (algorithm != "none")


def test_auto_takes_factors_of_low_rank_where_it_may(mesh: Mesh) -> None:
    reasons = []
    for may, algorithm in ((False, "1bit_adam"), (True, "low_rank")):
        given = section("auto", node=SLOW, data=FAST)
        chosen = dataclasses.replace(given.compression, auto_low_rank=may)
        given = dataclasses.replace(given, compression=chosen)
        settled, reasons = settle(given, mesh, SHAPES)
        assert settled.compression.algorithm == algorithm
        assert any("low_rank" in reason for reason in reasons) == may
        assert settle(settled, mesh, SHAPES)[0] == settled
    # A quarter of the rows, (256, 1024): 2 * 1280 numbers and the vector's 1024.
    entries, sent = 263_168, 4 * (2 * 1280 + 1024)
    network = sent / 12.5e6 + 3 * 2 * 1e-5
    assert f"{entries:,} entries" in reasons[-2]
    assert f"network {1e3 * network:.3g} ms" in reasons[-2]


def test_auto_counts_an_exchange_for_as_many_steps(mesh: Mesh) -> None:
    given = section("auto", node="20GB/s", data=FAST)
    picked = []
    for every in (1, 16):
        chosen = dataclasses.replace(given.compression, sync_every=every)
        settled, _ = settle(
            dataclasses.replace(given, compression=chosen), mesh, SHAPES
        )
        picked.append(settled.compression.algorithm)
    # The codec of signs takes longer than the dense mean there, a 16th of it does not.
    assert picked == ["none", "1bit_adam"]


def test_auto_alone_measures_and_cuts_nothing(mesh: Mesh, measured: list) -> None:
    settled, reasons = settle(section("auto", enable=False), mesh, SHAPES)
    assert measured == [{}]
    assert split_axes(settled, mesh) == Axes(("node",), ())
    assert "1,049,600 entries over 2 ranks at 1 GB/s" in reasons[-1]


def test_what_was_measured_is_kept_for_a_resume(mesh: Mesh, measured: list) -> None:
    settled, _ = settle(section("auto", data=FAST), mesh, SHAPES)
    assert (settled.links.node, settled.links.data) == ("1GB/s", FAST)
    again, _ = settle(settled, mesh, SHAPES)
    assert again == settled
    assert measured[1] == {"node": 1e9, "data": 300e9}


def test_one_device_sends_nothing(measured: list) -> None:
    mesh = sfpo.make_mesh(devices=jax.devices()[:1])
    settled, reasons = settle(section("auto"), mesh, SHAPES)
    assert settled.compression.algorithm == "none"
    assert reasons == ["one device: nothing is sent"] and measured == []


def test_an_optimizer_is_not_made_of_auto() -> None:
    with pytest.raises(ValueError, match="still auto: `settle` replaces it"):
        make_optimizer(
            Optimizer(), Sparsity(), section("auto"), Memory(), steps=1, axis_name=None
        )


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"topology_aware": {"bandwidth_threshold": 50}},
            ["`communication.topology_aware.bandwidth_threshold` has no unit", "'50'"],
        ),
        (
            {"links": {"node": "12.5"}},
            ["`communication.links.node` has no unit", "'12.5'"],
        ),
        ({"links": {"node": "12.5GB"}}, ["`communication.links.node`", "'GB'", "GB/s"]),
        ({"links": {"data": "0GB/s"}}, ["`communication.links.data` must be positive"]),
        ({"links": {"rack": "1GB/s"}}, ["unknown key `links.rack`"]),
        (
            {"topology_aware": {"enabled": True}},
            ["did you mean `topology_aware.enable`"],
        ),
        ({"compression": {"algorithm": "Auto"}}, ["'auto'?"]),
        (
            {"compression": {"rank": 0}},
            ["`communication.compression.rank` must be at least 1", "got 0", "usual"],
        ),
        ({"compression": {"rank": 1.5}}, ["`compression.rank`", "whole number"]),
        (
            {"compression": {"auto_lowrank": True}},
            ["did you mean `compression.auto_low_rank`"],
        ),
    ],
)
def test_what_is_refused(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(training.Communication, values)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message, message
