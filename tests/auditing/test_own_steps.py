"""The project's own steps do what they say; the auditor sees where they are not asked.

Compiled for the CPU, and for an A100 where its compiler is there.
"""

from typing import Any

import pytest

import sfpo_jax as sfpo
from tests.auditing.own_steps import OPTIMIZERS, PARAMS, builder, mesh_shape
from tests.memory.programs import needs_gpu_compiler

# Each optimizer, each step and each way to shard once; the others with --full.
OFTEN = {
    ("plain", "sfpo", "none"),
    ("plain", "adamw8bit", "weights"),
    ("layered", "onebit_adam", "weights"),
    ("layered", "dense", "states"),
}
OFTEN_ON_GPU = {("plain", "onebit_adam", "none"), ("layered", "dense", "none")}
ALL = [
    (kind, optimizer, shard)
    for kind in ("plain", "layered")
    for optimizer in OPTIMIZERS
    for shard in ("none", "states", "weights")
]


def cases(often: set[tuple[str, str, str]]) -> list[Any]:
    return [
        pytest.param(*case, marks=() if case in often else pytest.mark.full)
        for case in ALL
    ]


@pytest.mark.parametrize(("kind", "optimizer", "shard"), cases(OFTEN))
@pytest.mark.slow
def test_silent_on_the_devices_at_hand(kind: str, optimizer: str, shard: str) -> None:
    build = builder(kind, optimizer, shard)
    report = sfpo.audit(build, mesh_shape=mesh_shape(shard))
    assert report.ok, str(report)


@needs_gpu_compiler
@pytest.mark.parametrize(("kind", "optimizer", "shard"), cases(OFTEN_ON_GPU))
def test_silent_on_an_a100(kind: str, optimizer: str, shard: str) -> None:
    build = builder(kind, optimizer, shard)
    report = sfpo.audit(build, device="a100-80gb", mesh_shape=mesh_shape(shard))
    assert report.ok and report.notes == (), str(report)
    assert report.compiler == "gpu"


@pytest.mark.parametrize(
    "device",
    [
        None,
        pytest.param("a100-80gb", marks=[needs_gpu_compiler, pytest.mark.full]),
    ],
)
def test_a_plain_dense_step_is_neither_compressed_nor_released(device: Any) -> None:
    report = sfpo.audit(
        builder("plain", "dense", "none"),
        device=device,
        mesh_shape={"data": 2},
        compressed_axes=["data"],
        releases_gradients=True,
    )
    found = {finding.kind: finding for finding in report.findings}
    assert sorted(found) == ["gradients", "reduction"]
    outer = 4 * PARAMS["outer"]["tokens"].size
    stacks = 4 * sum(x.size for x in PARAMS["layers"].values())
    # Over two ranks an all-reduce sends what it reduces.
    assert outer + stacks <= found["reduction"].bytes < 1.01 * (outer + stacks)
    assert "over 'data'" in found["reduction"].message
    assert found["gradients"].bytes == stacks


def test_a_layered_dense_step_sends_layer_by_layer() -> None:
    report = sfpo.audit(
        builder("layered", "dense", "none"),
        mesh_shape={"data": 2},
        compressed_axes=["data"],
    )
    (finding,) = report.findings
    total = 4 * sum(x.size for part in PARAMS.values() for x in part.values())
    assert finding.kind == "reduction"
    assert total <= finding.bytes < 1.01 * total
