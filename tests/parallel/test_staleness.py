"""Updates that come a step late: what they are made of, and what a state keeps."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sfpo_jax as sfpo
from sfpo_jax.compression import int8
from sfpo_jax.training import CheckpointError, Checkpoints
from tests.parallel import test_operator_split as split
from tests.ranks import assert_alike, compiled_programs, copies

RANKS, STEPS = 8, 10


@pytest.fixture
def wide_numbers() -> Iterator[None]:
    """Float64, and the promotion that Optax's optimizers need."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        yield


def loss_fn(params: Any, batch: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ params["up"] + params["bias"])
    return jnp.mean((hidden @ params["down"] - batch["y"]) ** 2)


def parameters() -> Any:
    rng = np.random.default_rng(0)
    return {
        "up": rng.normal(size=(16, 2048)) / 4,
        "bias": rng.normal(size=(1, 2048)),
        "down": rng.normal(size=(2048, 16)) / 45,
    }


def batch_of(step: int) -> Any:
    rng = np.random.default_rng(step)
    return {"x": rng.normal(size=(16, 16)), "y": rng.normal(size=(16, 16))}


@jax.jit
def gradients(params: Any, batch: Any) -> Any:
    """Of each rank, led by an axis of them; on one device, of the plain loss."""
    parts = jax.tree.map(lambda x: x.reshape(RANKS, -1, *x.shape[1:]), batch)
    return jax.vmap(jax.grad(loss_fn), (None, 0))(params, parts)


def norm_of(grads: Any) -> float:
    return float(np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(grads)) / RANKS))


def assert_close(found: Any, wanted: Any) -> None:
    """Parameters are of the order of 1, and ten steps round some thousand times."""
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), found, wanted
    )


@pytest.mark.usefixtures("wide_numbers")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"shard": "states"},
        {"shard": "weights"},
        {"microbatches": 2, "max_norm": 0.5},
    ],
    ids=["whole", "states", "weights", "clipped"],
)
def test_each_gradient_is_applied_a_step_after_it_was_made(options: Any) -> None:
    tx = optax.adamw(1e-2)
    step = sfpo.make_train_step(loss_fn, tx, sfpo.make_mesh(), staleness=1, **options)
    params = jax.tree.map(jnp.asarray, parameters())
    state, held, waiting = step.init(params), tx.init(params), None
    for i in range(STEPS):
        made = jax.tree.map(np.asarray, gradients(params, batch_of(i)))
        norm = 0.0
        if waiting is not None:
            norm = norm_of(waiting)
            scale = min(1, options.get("max_norm", np.inf) / norm)
            mean = jax.tree.map(lambda g, by=scale: by * g.mean(0), waiting)
            updates, held = tx.update(mean, held, params)
            params = optax.apply_updates(params, updates)
        waiting = made
        state, metrics = step(state, batch_of(i))
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-12)
    assert_close(state.params, params)
    assert_close(jax.tree.leaves(state.pending), jax.tree.leaves(waiting))
    if "shard" not in options:
        assert_alike(state.params)


def given(params: Any, batch: Any) -> Any:
    """A loss whose gradient is a rank's part of the batch, whatever the parameters."""
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(batch), strict=True)
    return sum((jnp.vdot(p, g[0]) for p, g in pairs), jnp.zeros([], jnp.float64))


def masked() -> Any:
    """A chain that decides on its phase inside, and has no halves."""
    return optax.chain(
        sfpo.sparsify(0.5, error_feedback=True, axis_name="data"), onebit()
    )


def onebit() -> Any:
    return sfpo.onebit_adam(1e-2, warmup_steps=3, refresh_every=4, axis_name="data")


def rounded() -> Any:
    mean = sfpo.compressed_mean(int8(), "data", error_feedback=True)
    return optax.chain(mean, optax.adam(1e-2))


@pytest.mark.usefixtures("wide_numbers")
@pytest.mark.parametrize("make", [onebit, masked, rounded])
@pytest.mark.slow
def test_compressing_late_is_compressing_what_was_made_before(make: Any) -> None:
    """The plain step, given each gradient a step later, is the same to rounding."""
    mesh = sfpo.make_mesh()
    late = sfpo.make_train_step(loss_fn, make(), mesh, staleness=1)
    plain = sfpo.make_train_step(given, make(), mesh)
    state, other, waiting = late.init(parameters()), plain.init(parameters()), None
    for i in range(STEPS):
        made = gradients(jax.tree.map(np.asarray, other.params), batch_of(i))
        if waiting is not None:
            other, _ = plain(other, waiting)
        waiting = made
        state, _ = late(state, batch_of(i))
    assert_close(state.params, other.params)
    assert compiled_programs(late._jitted) == 1
    # Residuals, too: what is lost stays with the rank that lost it.
    assert_close(jax.tree.leaves(state.opt_state), jax.tree.leaves(other.opt_state))
    assert_alike(state.params)
    for phase in ("warmup", "compressed") if make is not rounded else (None,):
        sent = late.wire_bytes(state, batch_of(0), phase)["data"]
        wanted = plain.wire_bytes(other, waiting, phase)["data"]
        # But for scalars: the loss, the norm, whether all is finite.
        assert abs(sent - wanted) < 100


@pytest.mark.usefixtures("wide_numbers")
def test_operators_may_be_split() -> None:
    reached = []
    for sizes in ((2, 2, 1), (2, 2, 2)):
        step = split.plain(split.mesh_of(*sizes), optax.adamw(1e-2), staleness=1)
        state, seen = split.train(step)
        reached.append((jax.tree.map(np.asarray, state.params), seen))
    assert_close(reached[1][0], reached[0][0])
    assert seen[0]["grad_norm"] == 0 and seen[1]["grad_norm"] > 0
    # One for each rank of the batch, and behind it of the operators.
    assert {x.shape[:2] for x in jax.tree.leaves(state.pending)} == {(4, 2)}


@pytest.mark.slow
def test_all_at_once_ranks_agree() -> None:
    """Signs between nodes, shards inside, split products, clipping, and late."""
    tx = sfpo.sfpo(2e-2, 12, warmup_steps=2, axis_name="node", min_size=16)
    mesh = split.mesh_of(2, 2, 2)
    step = split.plain(mesh, tx, shard="states", staleness=1)
    state, seen = split.train(step, np.float32)
    assert seen[-1]["loss"] < seen[0]["loss"]
    assert int(optax.tree.get(state.opt_state, "freeze").step.max()) == 2
    assert step.differing(state) == []


def with_statistics(params: Any, batch: Any, model_state: Any) -> Any:
    new = 0.5 * model_state + 0.5 * jnp.mean(batch["x"], axis=0)
    return jnp.mean((batch["x"] - params[None]) ** 2), {"model_state": new}


def test_the_first_step_changes_nothing_and_what_is_not_finite_is_skipped() -> None:
    step = sfpo.make_train_step(
        with_statistics,
        sfpo.adamw8bit(0.1),
        sfpo.make_mesh(),
        staleness=1,
        has_model_state=True,
    )
    state = step.init(jnp.ones(8), model_state=jnp.zeros(8))
    batches = [{"x": np.full((16, 8), i, np.float32)} for i in range(1, 6)]
    batches[1]["x"][3, 2] = np.inf
    moved, kept, skipped = [], [], []
    for batch in batches:
        before = copies((state.params, state.opt_state)), copies(state.model_state)
        state, metrics = step(state, batch)
        moved.append(copies((state.params, state.opt_state)) != before[0])
        kept.append(copies(state.model_state) == before[1])
        skipped.append(int(metrics["skipped"]))
    # Of the second batch: nothing is left in the model's state, nor a step later.
    assert kept == [False, True, False, False, False]
    assert moved == [False, True, False, True, True]
    assert skipped == [0, 0, 1, 1, 1]
    assert int(state.step) == 5 and np.isfinite(state.params).all()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_largest_rate_is_one_over_the_curvature(momentum: float) -> None:
    """Of a quadratic, with and without a mean of the gradients, as the docs say."""
    rate, curvatures = 0.5, jnp.array([0.9, 1.1]) / 0.5

    def quadratic(x: Any, batch: Any) -> Any:
        return jnp.sum(curvatures * x**2) / 2 + 0 * jnp.sum(batch)

    tx = optax.chain(optax.ema(momentum, debias=False), optax.sgd(rate))
    mesh = sfpo.make_mesh(devices=jax.devices()[:1])
    step = sfpo.make_train_step(quadratic, tx, mesh, staleness=1)
    state, batch = step.init(jnp.ones(2)), jnp.zeros(1)
    # The slower of the two shrinks or grows by sqrt(b + (1 - b) 0.9), or 1.1, a step.
    shrinks = (momentum + (1 - momentum) * 0.9) ** 0.5
    for _ in range(int(np.log(1e-3) / np.log(shrinks))):
        state, _ = step(state, batch)
    small, large = np.abs(state.params)
    assert small < 0.05 and large > 20


def late_state(ranks: int, op: int = 1) -> Any:
    """Before the first step, but with gradients that wait as if after it."""
    specs = {"w": jax.sharding.PartitionSpec(None, "op")} if op > 1 else None
    mesh = sfpo.make_mesh(op=op, devices=jax.devices()[: ranks * op])
    step = sfpo.make_train_step(
        lambda params, batch: jnp.mean(batch @ params["w"]),
        optax.sgd(0.5),
        mesh,
        operator_specs=specs,
        staleness=1,
    )
    state = step.init({"w": jnp.ones((3, 4))})
    rng = np.random.default_rng(ranks)
    values = jax.tree.map(
        lambda x: jax.device_put(rng.normal(size=x.shape).astype(x.dtype), x.sharding),
        state.pending,
    )
    return step, state._replace(pending=values)


def test_a_run_goes_on_from_a_checkpoint_to_the_bit(tmp_path: Path) -> None:
    step, state = late_state(8)
    state, _ = step(state, jnp.ones((8, 3)))
    Checkpoints(tmp_path).save(1, {"train": state})
    found = Checkpoints(tmp_path).restore({"train": late_state(8)[1]})
    assert found is not None
    batch = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    ahead, _ = step(state, batch)
    again, _ = step(found.state["train"], batch)
    assert copies(ahead) == copies(again)
    assert (ahead.params["w"] != 1).all()


@pytest.mark.parametrize(("ranks", "op"), [(2, 1), (8, 1), (3, 1), (2, 2), (1, 2)])
def test_what_waits_keeps_its_mean_with_other_ranks(
    tmp_path: Path, ranks: int, op: int
) -> None:
    _, old = late_state(4, op)
    Checkpoints(tmp_path).save(1, {"train": old})
    found = Checkpoints(tmp_path).restore({"train": late_state(ranks, op)[1]})
    assert found is not None
    before = np.asarray(old.pending.tree["w"])
    new = np.asarray(found.state["train"].pending.tree["w"])
    assert new.shape == (ranks, *before.shape[1:])
    np.testing.assert_allclose(new.mean(0), before.mean(0), rtol=0, atol=1e-6)


def test_a_state_without_delay_is_what_it_was(tmp_path: Path) -> None:
    step = sfpo.make_train_step(loss_fn, optax.sgd(0.1), sfpo.make_mesh())
    state = step.init({"w": jnp.ones((3, 4))})
    assert state.pending == ()
    Checkpoints(tmp_path).save(1, {"train": state})
    with pytest.raises(CheckpointError, match=r"has no `\['train'\].pending"):
        Checkpoints(tmp_path).restore({"train": late_state(8)[1]})


@pytest.mark.parametrize("staleness", [-1, 2])
def test_other_delays_are_refused(staleness: int) -> None:
    with pytest.raises(
        ValueError, match=rf"`staleness` must be 0 or 1, got {staleness}"
    ):
        sfpo.make_train_step(
            loss_fn, optax.sgd(0.1), sfpo.make_mesh(), staleness=staleness
        )
