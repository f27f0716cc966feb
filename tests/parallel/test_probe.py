"""The probe on devices that stand in: what it returns is usable, whatever the machine.

Times are no test; that they are finite, positive and kept is.
"""

import json
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

import sfpo_jax as sfpo
from sfpo_jax import __main__ as command_line
from sfpo_jax.collectives import Codec, Link, methods
from sfpo_jax.parallel import Links, _links, _probe, find_links

NVLINK = "GPU 0: NVIDIA A100-SXM4-80GB\n\t Link 0: 25 GB/s\n\t Link 1: 25 GB/s\n"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_probe, "_FIRST", 1 << 12)
    monkeypatch.setattr(_probe, "_LARGEST", 1 << 12)
    monkeypatch.setattr(_probe, "_CODEC_SIZES", (1 << 10, 1 << 12))
    monkeypatch.setattr(_probe, "_REPEATS", 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def mesh() -> Mesh:
    return sfpo.make_mesh(node=2, data=2, devices=jax.devices()[:4])


def kept(tmp_path: Path) -> dict[str, Any]:
    (file,) = (tmp_path / "sfpo_jax" / "links").iterdir()
    return json.loads(file.read_text())


@pytest.mark.slow
def test_measured_once_and_kept(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = methods(rank=2, shapes=[(64, 64)], is_masked=True)
    few = {name: known[name] for name in ("dense", "int8", "sign", "low_rank")}
    found = find_links(mesh, methods=few)
    assert list(found.links) == ["node", "data"]
    assert set(found.sources.values()) == {"measured"}
    for link in found.links.values():
        assert link.exchange is not None
        assert 0 < link.latency < 10
        assert 0 < link.bandwidth < 1e15 and 0 < link.exchange < 1e15
    for codec in found.codecs.values():
        assert [n for n, _ in codec.points] == [1 << 10, 1 << 12]
        assert all(0 <= seconds < 10 for _, seconds in codec.points)
    assert len(kept(tmp_path)) == 2 + 4
    assert "codec low_rank(2)" in kept(tmp_path)
    assert "codec sign(2048), masked" in kept(tmp_path)
    # Not measured again, and numbers come back as they were.
    with monkeypatch.context() as patch:
        patch.setattr(_links, "probe_link", None)
        patch.setattr(_links, "probe_codecs", None)
        assert find_links(mesh, methods=few) == found
    # But for another mesh, or when asked to.
    asked = []

    def probe(mesh: Mesh, axis: str) -> Link:
        asked.append(axis)
        return Link(1e-3, 1e6, 5e5)

    monkeypatch.setattr(_links, "probe_link", probe)
    assert find_links(mesh, fresh=True).links["node"] == Link(1e-3, 1e6, 5e5)
    find_links(sfpo.make_mesh(data=4, devices=jax.devices()[:4]))
    assert asked == ["node", "data", "data"]


def test_a_damaged_cache_is_measured_over(
    mesh: Mesh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_links, "probe_link", lambda mesh, axis: Link(1e-3, 1e6, 5e5))
    find_links(mesh)
    (file,) = (tmp_path / "sfpo_jax" / "links").iterdir()
    for text in ("[1", "[1, 2]", "{}"):
        file.write_text(text)
        assert find_links(mesh).links["data"].bandwidth == 1e6
    assert set(kept(tmp_path)) == {"link node", "link data"}


def test_processes_agree_on_the_slowest(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_links, "probe_link", lambda mesh, axis: Link(1e-3, 1e6, 5e5))
    assert find_links(mesh).links["node"] == Link(1e-3, 1e6, 5e5)

    def agreed(values: list[float]) -> list[float]:
        # Of another process, whose link takes longer to begin and carries more.
        other = [2e-3, -2e6, -2e5] if len(values) == 3 else values
        return [max(pair) for pair in zip(values, other, strict=True)]

    monkeypatch.setattr(_links, "agreed", agreed)
    assert find_links(mesh).links["node"] == Link(2e-3, 1e6, 2e5)


def test_given_then_nvlink_then_the_probe(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_links, "probe_link", lambda mesh, axis: Link(1e-3, 1e6, 5e5))
    monkeypatch.setattr(_links, "read_nvlinks", lambda: NVLINK)
    found = find_links(mesh, {"node": 12.5e9})
    assert found.sources == {"node": "given", "data": "NVLink"}
    assert found.links["node"].bandwidth == 12.5e9
    assert found.links["data"].bandwidth == 50e9
    # A host without NVLink: what crosses it is measured.
    monkeypatch.setattr(_links, "read_nvlinks", lambda: "")
    assert find_links(mesh, {"node": 12.5e9}).sources["data"] == "measured"


def test_axes_of_one_rank_have_no_link() -> None:
    mesh = sfpo.make_mesh(devices=jax.devices()[:1])
    assert find_links(mesh, {"node": 1e9}) == Links({}, {}, {})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nodes": 1e9}, "the axis 'nodes', which the mesh has not: .* node, data, op"),
        ({"node": 0.0}, "positive bandwidths, got 0.0 for 'node'"),
    ],
)
def test_what_cannot_be_given(mesh: Mesh, given: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_links(mesh, given)


def run(*arguments: str) -> int:
    return command_line.main(["links", *arguments])


def test_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codecs = {
        name: Codec(((0, 0.0), (10**6, 0.0 if name == "dense" else 1e-5)))
        for name in methods()
    }
    monkeypatch.setattr(
        _links,
        "probe_codecs",
        lambda mesh, axis, link, methods: {name: codecs[name] for name in methods},
    )
    monkeypatch.setattr(_links, "probe_link", lambda mesh, axis: Link(1e-3, 1e6, 5e5))
    given = ("--given", "node=12.5MB/s", "--given", "data=300GB/s")
    assert run("--mesh", "node=2,data=2", *given) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 devices (cpu)"
    assert lines[1].split() == [
        *("axis", "ranks", "latency", "bandwidth"),
        *("1", "M", "16", "M", "100", "M"),
    ]
    assert lines[2].split()[:8] == [
        *("node", "2", "10.0", "us", "12.5", "MB/s", "given", "slow")
    ]
    assert lines[2].split()[8:] == ["sparse_sign"] * 3
    picks = ["dense", "sparse_sign", "sparse_sign"]
    assert lines[3].split()[5:] == ["GB/s", "given", "fast", *picks]
    assert "at least 50 GB/s" in lines[4]
    assert lines[5].startswith("node: sparse_sign: 1,000,000 entries over 2 ranks")
    assert run("--mesh", "node=2,data=2", *given, "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["node"]["picks"] == dict.fromkeys(
        ("1000000", "16000000", "100000000"), "sparse_sign"
    )


def test_the_command_on_one_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_links, "probe_codecs", None)
    assert run("--mesh", "data=1") == 0
    assert "no axis has more than one rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--mesh", "node=4,data=4"),
            "`mesh` node=4,data=4 needs 16 devices, there are 8",
        ),
        (("--mesh", "nodes=2"), "`mesh` has the axis 'nodes': take node, data, op"),
        (("--mesh", "data=0"), "`mesh` has the part 'data=0'"),
        (("--threshold", "50"), "`threshold` has no unit, got '50': write a bandwidth"),
        (("--given", "node"), "`given` must be AXIS=BANDWIDTH, got 'node'"),
        (("--given", "node=12"), "`given node` has no unit, got '12'"),
        (("--given", "rack=1GB/s"), "the axis 'rack', which the mesh has not"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert words in err
