"""Arrays on the host: the same training, to the bit, with less on the device."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sfpo_jax as sfpo
from sfpo_jax.collectives import overlaps
from sfpo_jax.memory import find_device, planning_mesh
from sfpo_jax.parallel import Offload
from sfpo_jax.parallel._offload import check_offload
from tests.memory.programs import needs_gpu_compiler

ALL: tuple[Offload, ...] = ("states", "weights", "activations")
MESH = sfpo.make_mesh(devices=jax.devices()[:2])
DEPTH, WIDTH, HIDDEN, ROWS = 4, 64, 1024, 2048  # 256 KiB a layer, and more


def block(layer: Any, x: Any, key: Any) -> Any:
    del key
    return x + jnp.tanh(x @ layer["up"] + layer["bias"][None]) @ layer["down"]


MODEL = sfpo.LayeredModel(
    embed=lambda outer, batch, key: batch["x"] @ outer["in"],
    block=block,
    loss=lambda outer, x, batch, key: jnp.mean((x @ outer["in"].T - batch["y"]) ** 2),
)


def parameters() -> Any:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[-2])).astype(np.float32)

    return {
        "outer": {"in": normal(4, WIDTH)},
        "layers": {
            "up": normal(DEPTH, WIDTH, HIDDEN),
            "bias": normal(DEPTH, 1, HIDDEN)[:, 0],
            "down": normal(DEPTH, HIDDEN, WIDTH),
        },
    }


def batch_of(step: int) -> Any:
    x = np.random.default_rng(step).normal(size=(ROWS, 4)).astype(np.float32)
    return {"x": x, "y": np.sin(3 * x)}


def on_host(tree: Any) -> list[tuple[int, ...]]:
    leaves = jax.tree.leaves(tree)
    return [x.shape for x in leaves if x.sharding.memory_kind == "pinned_host"]


CASES: dict[str, Any] = {
    "momentum": (lambda: optax.sgd(1e-2, momentum=0.9), {"max_norm": 1.0}),
    # Two phases, and a worker error for each rank.
    "one bit": (
        lambda: sfpo.onebit_adam(1e-2, warmup_steps=2, axis_name="data"),
        {"recompute": "none", "microbatches": 2},
    ),
    "sharded": (
        lambda: optax.sgd(1e-2, momentum=0.9),
        {"shard": "weights", "recompute": [(1, "none"), (3, "full")]},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_it_trains_alike_to_the_bit(case: str) -> None:
    make_tx, options = CASES[case]
    reached = []
    for offload in ((), ALL):
        step = sfpo.make_layered_train_step(
            MODEL, make_tx(), MESH, offload=offload, **options
        )
        state = step.init(parameters())
        before = on_host(state)
        for number in range(3):
            state, _ = step(state, batch_of(number))
        assert on_host(state) == before
        assert step.differing(state) == []
        reached.append((before, jax.device_get(state)))
    (nothing, plain), (moved, offloaded) = reached
    assert not nothing
    # Of the parameters the two matrices; of the states those of their shape.
    assert len(moved) >= 4 and all(shape[0] == DEPTH for shape in moved)
    assert (DEPTH, HIDDEN) not in moved
    jax.tree.map(np.testing.assert_array_equal, plain, offloaded)


def test_parameters_given_on_the_device_stay_there() -> None:
    params = jax.tree.map(jnp.asarray, parameters())
    step = sfpo.make_layered_train_step(
        MODEL,
        optax.sgd(0.1),
        sfpo.make_mesh(devices=jax.devices()[:1]),
        offload=("weights",),
    )
    state = step.init(params)
    state, _ = step(state, batch_of(0))
    assert len(on_host(state.params)) == 2 and not on_host(params)
    np.testing.assert_array_equal(params["layers"]["up"], parameters()["layers"]["up"])


@needs_gpu_compiler
def test_a_gpu_holds_a_few_layers_and_copies_under_products() -> None:
    mesh = planning_mesh(find_device("a100-80gb"), {"data": 2})
    depth = 12
    params = jax.eval_shape(parameters)
    params["layers"] = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((depth, *x.shape[1:]), x.dtype), params["layers"]
    )
    batch = jax.eval_shape(lambda: batch_of(0))

    def build(mesh: Any, offload: tuple[Offload, ...]) -> Any:
        step = sfpo.make_layered_train_step(
            MODEL, optax.sgd(1e-2, momentum=0.9), mesh, offload=offload, max_norm=1.0
        )
        return step, step.init_shapes(params), batch

    plain, moved = (
        sfpo.plan(
            functools.partial(build, offload=offload),
            device="a100-80gb",
            mesh_shape={"data": 2},
            compiler="gpu",
            cache=False,
        )
        for offload in ((), ALL)
    )
    # Two matrices of weights, their momentum, and x as each layer gets it: not a byte
    # more, so no stack is copied.
    matrices = depth * 2 * WIDTH * HIDDEN * 4
    assert moved.host_bytes == 2 * matrices + depth * ROWS // 2 * WIDTH * 4
    assert plain.host_bytes == 0
    assert plain.argument_bytes - moved.argument_bytes == 2 * matrices
    assert "in host memory" in str(moved)

    step, state, batch = build(mesh, ALL)
    text = step.compiled_text(state, batch)
    copies = [x for x in overlaps(text, dict(mesh.shape)) if x.axis == "host"]
    inside = [x for x in copies if x.turns > 1]
    assert {x.opcode for x in inside} == {"to host", "from host"}
    # Forward: weights there, x back. Backward twice: weights, x; in the second besides
    # momentum there, and both back.
    assert len(inside) >= 3 + 3 + 9
    assert all(x.products > 0 for x in inside)


def test_what_cannot_be_offloaded_is_named() -> None:
    said = "`offload` must be of states, weights, activations, got 'moments'"
    with pytest.raises(ValueError, match=said):
        check_offload(["states", "moments"])
