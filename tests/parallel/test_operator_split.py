"""Both training steps with parameters cut over the operator axis."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import sfpo_jax as sfpo

DEPTH, WIDTH, HIDDEN, TOKENS = 3, 4, 16, 8
STEPS = 4


def parameters() -> Any:
    rng = np.random.default_rng(0)
    return {
        "outer": {"in": rng.normal(size=(3, WIDTH)), "out": rng.normal(size=WIDTH)},
        "layers": {
            "gain": 1 + 0.1 * rng.normal(size=(DEPTH, WIDTH)),
            "up": rng.normal(size=(DEPTH, WIDTH, HIDDEN)) / 2,
            "bias": rng.normal(size=(DEPTH, HIDDEN)),
            "down": rng.normal(size=(DEPTH, HIDDEN, WIDTH)) / 4,
        },
    }


SPECS = {
    "outer": {"in": P(), "out": P()},
    "layers": {"gain": P(), "up": P(None, "op"), "bias": P("op"), "down": P("op")},
}


def batch_of(step: int) -> Any:
    rng = np.random.default_rng(step)
    return {"x": rng.normal(size=(8, TOKENS, 3)), "y": rng.normal(size=(8, TOKENS))}


def own_tokens(x: jax.Array) -> jax.Array:
    size = x.shape[1] // lax.axis_size("op")
    return lax.dynamic_slice_in_dim(x, lax.axis_index("op") * size, size, 1)


def embed(outer: Any, batch: Any, key: Any) -> jax.Array:
    del key
    return own_tokens(batch["x"] @ outer["in"])


def block(layer: Any, x: jax.Array, key: Any) -> jax.Array:
    del key
    h = lax.all_gather(x * layer["gain"][None, None], "op", axis=1, tiled=True)
    h = jnp.tanh(h @ layer["up"] + layer["bias"][None, None])
    return x + lax.psum_scatter(
        h @ layer["down"], "op", scatter_dimension=1, tiled=True
    )


def loss(outer: Any, x: jax.Array, batch: Any, key: Any) -> jax.Array:
    del key
    return jnp.mean((x @ outer["out"] - own_tokens(batch["y"])) ** 2)


def whole_loss(params: Any, batch: Any) -> jax.Array:
    x = embed(params["outer"], batch, None)
    for i in range(DEPTH):
        layer = {name: stack[i] for name, stack in params["layers"].items()}
        x = block(layer, x, None)
    return loss(params["outer"], x, batch, None)


MODEL = sfpo.LayeredModel(embed, block, loss)
STACKED = {
    "outer": SPECS["outer"],
    "layers": jax.tree.map(lambda spec: P(None, *spec), SPECS["layers"]),
}


def plain(mesh: Any, tx: Any, **options: Any) -> Any:
    return sfpo.make_train_step(
        whole_loss, tx, mesh, max_norm=1.0, operator_specs=STACKED, **options
    )


def layered(mesh: Any, tx: Any, **options: Any) -> Any:
    return sfpo.make_layered_train_step(
        MODEL, tx, mesh, max_norm=1.0, operator_specs=SPECS, **options
    )


def train(step: Any, dtype: Any = np.float64) -> tuple[Any, list[dict[str, float]]]:
    state = step.init(jax.tree.map(dtype, parameters()))
    seen = []
    for i in range(STEPS):
        state, metrics = step(state, jax.tree.map(dtype, batch_of(i)))
        seen.append({name: float(x) for name, x in metrics.items()})
    return state, seen


def mesh_of(node: int, data: int, op: int) -> Any:
    return sfpo.make_mesh(node, data, op, devices=jax.devices()[: node * data * op])


@pytest.fixture(scope="module")
def single() -> Any:
    """What one device trains; the gradient is clipped in every step."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        state, seen = train(plain(mesh_of(1, 1, 1), optax.adamw(1e-2)))
    # The norm of one rank's gradient is that of the mean: the same for all meshes
    # without a batch axis only.
    assert min(metrics["grad_norm"] for metrics in seen) > 1
    return jax.tree.map(np.asarray, state.params), seen


@pytest.mark.parametrize("make", [plain, layered])
@pytest.mark.parametrize("op", [4, 8])
def test_split_operators_train_as_whole_ones(make: Any, op: int, single: Any) -> None:
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        state, seen = train(make(mesh_of(1, 1, op), optax.adamw(1e-2)))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12),
        (state.params, seen),
        single,
    )
    up = state.params["layers"]["up"]
    assert up.sharding.shard_shape(up.shape) == (DEPTH, WIDTH, HIDDEN // op)


@pytest.mark.parametrize("make", [plain, layered])
@pytest.mark.slow
def test_three_axes_with_compression_between_nodes(make: Any) -> None:
    """All ranks hold the same of what they share, and the loss falls."""
    tx = sfpo.onebit_adam(2e-2, warmup_steps=2, axis_name="node")
    state, seen = train(make(mesh_of(2, 2, 2), tx), np.float32)
    assert seen[-1]["loss"] < seen[0]["loss"]
    for name, leaf in state.params["layers"].items():
        by_place: dict[Any, list[np.ndarray]] = {}
        for part in leaf.addressable_shards:
            by_place.setdefault(str(part.index), []).append(np.asarray(part.data))
        assert len(by_place) == (1 if name == "gain" else 2)
        for copies in by_place.values():
            assert all(np.array_equal(copies[0], other) for other in copies)


def test_statistics_of_a_rank_s_own_tokens_are_averaged() -> None:
    def loss(params: Any, batch: Any, model_state: Any) -> Any:
        del model_state
        mean = jnp.mean(own_tokens(batch["x"]))
        return jnp.mean(params["w"] ** 2), {"model_state": {"mean": mean}}

    step = sfpo.make_train_step(
        loss,
        optax.sgd(0.1),
        mesh_of(1, 2, 2),
        has_model_state=True,
        operator_specs={"w": P("op")},
    )
    batch = jax.tree.map(np.float32, batch_of(0))
    zero = {"mean": jnp.zeros([])}
    state, _ = step(step.init({"w": jnp.ones(4)}, model_state=zero), batch)
    np.testing.assert_allclose(
        state.model_state["mean"], batch["x"].mean(), rtol=1e-5, atol=1e-7
    )
    assert step.differing(state) == []


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_by_all() -> None:
    def loss_fn(params: Any, batch: Any) -> jax.Array:
        value = whole_loss(params, batch)
        return jnp.where(lax.axis_index("op") == 1, value / batch["z"].min(), value)

    step = sfpo.make_train_step(
        loss_fn,
        sfpo.adamw8bit(1e-2),
        mesh_of(1, 2, 2),
        operator_specs=STACKED,
    )
    state = step.init(jax.tree.map(np.float32, parameters()))
    before = jax.tree.map(np.asarray, state.params)
    batch = jax.tree.map(np.float32, {**batch_of(0), "z": np.zeros(8)})
    state, metrics = step(state, batch)
    assert int(metrics["skipped"]) == 1
    jax.tree.map(np.testing.assert_array_equal, state.params, before)


def test_a_transformation_that_mixes_leaves_is_refused() -> None:
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    step = plain(mesh_of(1, 1, 2), tx)
    with pytest.raises(ValueError, match=r"with operators split.*`max_norm=`"):
        step.init(jax.tree.map(np.float32, parameters()))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (P(None, None, "op"), r"axis 2 of \['outer'\]\['in'\].*\[3, 4\].*divide"),
        (P("op"), r"cuts axis 0 .* of shape \[3, 4\], into 2 parts"),
        (P("data"), r'may name the axis "op" once, got .*\'data\''),
        (None, r"a PartitionSpec for each parameter, got None"),
    ],
)
def test_specs_that_do_not_fit_are_named(spec: Any, message: str) -> None:
    specs = {**STACKED, "outer": {"in": spec, "out": P()}}
    step = sfpo.make_train_step(
        whole_loss, optax.sgd(0.1), mesh_of(1, 1, 2), operator_specs=specs
    )
    with pytest.raises(ValueError, match=message):
        step.init(jax.tree.map(np.float32, parameters()))


@pytest.mark.parametrize("shard", ["states", "weights"])
def test_shards_are_cut_from_one_ranks_part(shard: Any) -> None:
    """FSDP beside the operator level: `up` is cut along both of its axes."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        h = jnp.tanh(batch["x"] @ params["up"])
        y = h @ params["down"]
        if batch["op"].size:
            y = lax.psum(y, "op")
        return jnp.mean((y - batch["y"]) ** 2)

    rng = np.random.default_rng(1)
    params = {
        "up": rng.normal(size=(16, 4096)) / 4,
        "down": rng.normal(size=(4096, 2)) / 64,
    }
    specs = {"up": P(None, "op"), "down": P("op")}
    batch = {"x": rng.normal(size=(4, 16)), "y": rng.normal(size=(4, 2))}
    reached = []
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        kinds: list[tuple[Any, Any]] = [
            (mesh_of(1, 1, 1), "none"),
            (mesh_of(1, 2, 2), shard),
        ]
        for mesh, kind in kinds:
            step = sfpo.make_train_step(
                loss_fn,
                optax.adamw(1e-2),
                mesh,
                shard=kind,
                operator_specs=specs,
            )
            is_split = np.zeros((4, int(kind != "none")))
            state = step.init(params)
            for _ in range(2):
                state, _ = step(state, {**batch, "op": is_split})
            reached.append(state)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12),
        *(state.params for state in reached),
    )
    up, down = (reached[1].params[name] for name in ("up", "down"))
    assert up.sharding.shard_shape(up.shape) == (
        (8, 2048) if shard == "weights" else (16, 2048)
    )
    mu = reached[1].opt_state[0].mu["up"]
    assert mu.sharding.shard_shape(mu.shape) == (1, 8, 2048)
    assert down.sharding.shard_shape(down.shape)[0] in (1024, 2048)
