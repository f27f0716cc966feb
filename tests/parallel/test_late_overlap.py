"""What a late update sends runs under the passes of the next gradient, on GPUs."""

import functools
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
from tests.parallel.wide_mlp import DEPTH, TOKENS, block, embed, loss, onebit, shapes

LARGE = 100_000  # bytes; scalars and scales are less
# Of the passes: two of each layer and the head forward, twice that backward, and some
# of which XLA makes one.
FORWARD, ALL = 2 * DEPTH + 1, 6 * DEPTH


def loss_fn(params: Any, batch: Any) -> jax.Array:
    x = embed(params["outer"], batch, None)
    for i in range(DEPTH):
        layer = {name: stack[i] for name, stack in params["layers"].items()}
        x = block(layer, x, None)
    return loss(params["outer"], x, batch, None)


@functools.cache
def compiled(name: str, shard: Any, staleness: int) -> str:
    """The step for eight A100s."""
    tx = onebit("data") if name == "one bit" else optax.adamw(1e-3)
    mesh = planning_mesh(find_device("a100-80gb"), {"data": 8})
    step = sfpo.make_train_step(loss_fn, tx, mesh, shard=shard, staleness=staleness)
    batch = jax.ShapeDtypeStruct((8, TOKENS), jnp.int32)
    with jax.numpy_dtype_promotion("standard"):  # Optax's own AdamW
        return step.compiled_text(step.init_shapes(shapes(512)), batch)


def large(text: str) -> list[Overlap]:
    return [x for x in overlaps(text, {"data": 8}) if x.sent >= LARGE]


@needs_gpu_compiler
@pytest.mark.parametrize(
    ("name", "shard", "wanted"),
    [
        ("dense", "none", {"all-reduce": ALL}),
        # The gradients under the forward pass, the new weights under the other.
        ("dense", "states", {"reduce-scatter": FORWARD, "all-gather": ALL - FORWARD}),
        # Bits there and back; the warm-up has one transfer for both passes.
        (
            "one bit",
            "none",
            {"all-reduce": ALL, "all-to-all": FORWARD, "all-gather": ALL - FORWARD},
        ),
    ],
    ids=["dense", "states", "one bit"],
)
def test_every_large_transfer_has_a_pass_to_run_under(
    name: str, shard: Any, wanted: dict[str, int]
) -> None:
    found = large(compiled(name, shard, 1))
    assert {x.opcode for x in found} == set(wanted)
    for x in found:
        assert x.products >= wanted[x.opcode], x


@needs_gpu_compiler
def test_without_delay_nothing_hides_the_last() -> None:
    assert min(x.products for x in large(compiled("dense", "none", 0))) == 0


@needs_gpu_compiler
def test_weights_are_written_where_they_lie() -> None:
    text = compiled("dense", "none", 1)
    assert not re.search(rf"= f32\[(1,)?{DEPTH},\d+,\d+\]\S* copy\(", text)
