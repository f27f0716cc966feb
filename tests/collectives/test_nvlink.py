"""NVLink from replies of `nvidia-smi nvlink --status` as machines gave them."""

import subprocess
from typing import Any

import pytest

from sfpo_jax.collectives import nvlink_bandwidth, parse_nvlinks, read_nvlinks

A100 = "".join(
    f"GPU {gpu}: NVIDIA A100-SXM4-80GB (UUID: GPU-{gpu}5b5ce1b-0000-0000)\n"
    + "".join(f"\t Link {link}: 25 GB/s\n" for link in range(12))
    for gpu in range(8)
)
H100 = "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-abcdefab-cdef)\n" + "".join(
    f"\t Link {link}: 26.562 GB/s\n" for link in range(18)
)
# A bridge that lost a link, beside a card that has both.
BRIDGED = """\
GPU 0: Quadro RTX 8000 (UUID: GPU-1)
\t Link 0: 25.781 GB/s
\t Link 1: <inactive>
GPU 1: Quadro RTX 8000 (UUID: GPU-2)
\t Link 0: 25.781 GB/s
\t Link 1: 25.781 GB/s
"""
WITHOUT = """\
GPU 0: Tesla T4 (UUID: GPU-1)
\t Link 0: Not supported
"""


@pytest.mark.parametrize(
    ("reply", "gpus", "bandwidth"),
    [
        (A100, 8, 300e9),
        (H100, 1, 478.116e9),
        (BRIDGED, 2, 25.781e9),
        (WITHOUT, 1, None),
        ("GPU 0: NVIDIA GeForce RTX 4090 (UUID: GPU-1)\n", 1, None),
        ("GPU 0: NVIDIA H100 80GB HBM3\n    Link 0: 0 GB/s\n", 1, None),
        ("No devices were found\n", 0, None),
        ("", 0, None),
    ],
)
def test_a_reply(reply: str, gpus: int, bandwidth: float | None) -> None:
    assert len(parse_nvlinks(reply)) == gpus
    found = nvlink_bandwidth(reply)
    assert found == (None if bandwidth is None else pytest.approx(bandwidth))


def test_links_that_are_down_are_counted() -> None:
    first, second = parse_nvlinks(BRIDGED)
    assert (first.name, first.active, first.inactive) == ("Quadro RTX 8000", 1, 1)
    assert (second.gpu, second.active, second.inactive) == (1, 2, 0)


def test_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert read_nvlinks() == ""


@pytest.mark.parametrize("status", [0, 9])
def test_the_driver_is_asked(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    def run(command: list[str], **options: Any) -> Any:
        assert command[1:] == ["nvlink", "--status"] and options["timeout"]
        return subprocess.CompletedProcess(command, status, BRIDGED, "")

    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", run)
    assert read_nvlinks() == (BRIDGED if status == 0 else "")


def test_a_driver_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **options: Any) -> Any:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(subprocess, "run", run)
    assert read_nvlinks() == ""
