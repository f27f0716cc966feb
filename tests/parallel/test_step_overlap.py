"""Transfers of the layered step run under the products of other layers, on GPUs."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import sfpo_jax as sfpo
from sfpo_jax.collectives import Overlap, overlaps
from sfpo_jax.memory import find_device, planning_mesh
from tests.memory.programs import needs_gpu_compiler
from tests.parallel.wide_mlp import MODEL, TOKENS, onebit, shapes

# Bits of one layer's shard on one of eight devices: 2 * 1 M / 8 / 4 bytes, half sent.
LARGE = 32_000


def compiled(tx: Any, mesh_shape: dict[str, int], **options: Any) -> str:
    """The step for eight A100s."""
    mesh = planning_mesh(find_device("a100-80gb"), mesh_shape)
    step = sfpo.make_layered_train_step(MODEL, tx, mesh, **options)
    batch = jax.ShapeDtypeStruct((8, TOKENS), jnp.int32)
    with jax.numpy_dtype_promotion("standard"):  # Optax's own AdamW
        return step.compiled_text(step.init_shapes(shapes(512)), batch)


def large(text: str, mesh_shape: dict[str, int]) -> list[Overlap]:
    """Transfers in the backward loops; there is one for each phase."""
    sizes = {"node": 1, "data": 1, "op": 1} | mesh_shape
    return [x for x in overlaps(text, sizes) if x.turns > 1 and x.sent >= LARGE]


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("tx", "mesh_shape", "options", "wanted"),
    [
        (optax.adamw(1e-3), {"data": 8}, {}, {"all-reduce data"}),
        (
            optax.adamw(1e-3),
            {"data": 8},
            {"shard": "states"},
            {"reduce-scatter data", "all-gather data"},
        ),
        (
            onebit("data"),
            {"data": 8},
            {},
            {"all-reduce data", "all-to-all data", "all-gather data"},
        ),
        (
            onebit("node"),
            {"node": 2, "data": 4},
            # A turn each for scattering, bits there, bits back, and new weights.
            {"shard": "states", "pipeline_depth": 4},
            {
                "all-reduce node",
                "reduce-scatter data",
                "all-gather data",
                "all-to-all node",
                "all-gather node",
            },
        ),
    ],
    ids=["dense", "sharded", "one bit", "one bit between hosts"],
)
def test_every_large_transfer_runs_under_a_product(
    tx: Any, mesh_shape: dict[str, int], options: Any, wanted: set[str]
) -> None:
    text = compiled(tx, mesh_shape, **options)
    # No stack of all layers is copied, in the loops or outside.
    assert not re.search(r"= f32\[8,(512,2048|2048,512)\]\S* copy\(", text)
    found = large(text, mesh_shape)
    assert {f"{x.opcode} {x.axis}" for x in found} == wanted
    assert not [x for x in found if x.products == 0]
