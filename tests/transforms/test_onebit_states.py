"""1-bit Adam whose states are bytes: its equations, its wire, where its state lies."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import sfpo_jax as sfpo
from sfpo_jax.training import Checkpoints
from sfpo_jax.transforms import Quantized, is_quantized
from tests import oracle_states
from tests.oracle import OnebitAdam
from tests.ranks import Ranks, assert_alike, copies, data_mesh

WARMUP, STEPS, RANKS = 5, 12, 2
# On the wire: 9 rows of 2,048, ten over two ranks. The second leaf is too small for
# bytes, but its server error lies among the rows of the first.
SHAPES = [(32, 512), (2048,)]
INT8: dict[str, Any] = {"mu_dtype": "int8", "nu_dtype": "int8", "error_dtype": "int8"}


class Narrow(OnebitAdam):
    """Everything that is kept from step to step goes through a byte."""

    def step(self, grads: Any) -> None:
        is_warmup = self.count < self.warmup
        super().step(grads)
        self.m[0] = round_trip(self.m[0])
        if is_warmup:
            chance = oracle_states.random_units([self.count], SHAPES[0])
            kept = oracle_states.quantize(self.v[0], False, chance)
            self.v[0] = oracle_states.dequantize(kept, False)
            return
        for error in self.mean.worker:
            error[0] = round_trip(error[0])
        for i, error in enumerate(self.mean.server):
            rows = round_trip(error.reshape(-1, 2048))
            self.mean.server[i] = rows.reshape(error.shape)


def round_trip(x: np.ndarray) -> np.ndarray:
    return oracle_states.dequantize(oracle_states.quantize(x))


def gradients(step: int, ranks: int = RANKS) -> list[np.ndarray]:
    """[ranks, ...] a leaf, of sizes that differ; some entries never have any."""
    rng = np.random.default_rng(step)
    grads = []
    for i, shape in enumerate(SHAPES):
        sizes = np.exp(np.random.default_rng(i).normal(size=shape))
        g = rng.normal(size=(ranks, *shape)) * sizes
        g[:, :3] = 0.0
        grads.append(g)
    return grads


def test_it_follows_the_equations() -> None:
    params = [np.asarray(np.random.default_rng(9).normal(size=s)) for s in SHAPES]
    oracle = Narrow(params, RANKS, lambda _: 2.0**-6, WARMUP, weight_decay=0.1)
    with jax.enable_x64(True):
        tx = sfpo.onebit_adam(
            2.0**-6,
            weight_decay=0.1,
            warmup_steps=WARMUP,
            axis_name="data",
            nu_floor=0.0,
            **INT8,
        )
        run = Ranks(tx, [jnp.asarray(p) for p in params], RANKS)
        for step in range(STEPS):
            grads = gradients(step)
            oracle.step([[g[i] for g in grads] for i in range(RANKS)])
            run.step(grads)
        state = run.state
        assert_alike((run.params, state.mu, state.nu))
        for found, expected in zip(run.params, oracle.params, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
        mu, nu = state.mu[0], state.nu[0]
        assert all(map(is_quantized, (mu, nu)))
        v = oracle_states.dequantize(mu_of(nu), False)
        np.testing.assert_allclose(v, oracle.v[0], rtol=1e-9)
        m = oracle_states.dequantize(mu_of(mu))
        np.testing.assert_allclose(m, oracle.m[0], rtol=1e-9, atol=1e-15)
        for i in range(RANKS):
            own = jax.tree.map(lambda x, i=i: x[i], state.worker_error.tree[0])
            error = oracle_states.dequantize(mu_of(own))
            np.testing.assert_allclose(
                error, oracle.mean.worker[i][0], rtol=1e-9, atol=1e-15
            )


def mu_of(node: Quantized) -> oracle_states.Bytes:
    return oracle_states.Bytes(np.asarray(node.values), np.asarray(node.scales))


def test_the_warmup_is_adamw8bit() -> None:
    params: Any = [jnp.ones(s) for s in SHAPES]
    kinds: dict[str, Any] = {"mu_dtype": "int8", "nu_dtype": "int8"}
    ours = sfpo.onebit_adam(0.1, weight_decay=0.1, warmup_steps=9, **kinds)
    theirs = sfpo.adamw8bit(0.1, weight_decay=0.1, **kinds)
    run, other = Ranks(ours, params, None), Ranks(theirs, params, None)
    for step in range(3):
        grads = [jnp.asarray(g, jnp.float32) for g in gradients(step, 1)]
        run.step(grads)
        other.step(grads)
        for a, b in zip(run.params, other.params, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "kinds",
    [
        INT8,
        {**INT8, "nu_dtype": "factored"},
        {"mu_dtype": "packed", "nu_dtype": "int8"},
    ],
    ids=["int8", "factored", "packed"],
)
def test_training_stays_close_and_the_variance_frozen(kinds: dict[str, Any]) -> None:
    # A quadratic: narrow states must not keep it from its minimum.
    target = [np.random.default_rng(1).normal(size=s) for s in SHAPES]
    ends = []
    plain: dict[str, Any] = {}
    for chosen in (plain, kinds):
        tx = sfpo.onebit_adam(
            0.02, b2=0.99, warmup_steps=20, axis_name="data", **chosen
        )
        run = Ranks(tx, [jnp.zeros(s) for s in SHAPES], 8)
        frozen = None
        for step in range(60):
            noise = gradients(step % 7, 8)
            grads = [
                jnp.asarray(np.asarray(p) - t + 0.3 * n, jnp.float32)
                for p, t, n in zip(run.params, target, noise, strict=True)
            ]
            run.step(grads)
            if step == 19:
                frozen = copies(run.state.nu)
        assert copies(run.state.nu) == frozen
        errors = [
            float(np.mean((np.asarray(p) - t) ** 2))
            for p, t in zip(run.params, target, strict=True)
        ]
        ends.append(errors)
    for narrow, wide in zip(ends[1], ends[0], strict=True):
        assert narrow < 1.1 * wide + 1e-3, ends


def test_the_wire_is_the_same() -> None:
    def loss_fn(params: Any, batch: Any) -> Any:
        return sum(jnp.mean(batch) * jnp.sum(p * p) for p in jax.tree.leaves(params))

    sent = []
    batch = np.ones(RANKS, np.float32)
    plain: dict[str, Any] = {}
    for kinds in (plain, INT8):
        tx = sfpo.onebit_adam(0.1, warmup_steps=3, axis_name="data", **kinds)
        mesh = sfpo.make_mesh(devices=jax.devices()[:RANKS])
        step = sfpo.make_train_step(loss_fn, tx, mesh)
        state = step.init([jnp.zeros(s) for s in SHAPES])
        text = step.compiled_text(state, batch)
        step.compiled_text = lambda state, batch, text=text: text
        sent.append(
            [step.wire_bytes(state, batch, phase) for phase in ("warmup", "compressed")]
        )
    assert sent[0] == sent[1] and sent[0][0]["data"] > 20 * sent[0][1]["data"]


def test_its_state_is_saved_and_restored(tmp_path: Path) -> None:
    tx = sfpo.onebit_adam(
        0.1,
        warmup_steps=1,
        axis_name="data",
        **{**INT8, "nu_dtype": "factored"},
    )
    run = Ranks(tx, [jnp.ones(s) for s in SHAPES], RANKS)
    for step in range(2):
        run.step([jnp.asarray(g, jnp.float32) for g in gradients(step)])
    checkpoints = Checkpoints(tmp_path / "run")
    checkpoints.save(2, {"opt_state": run.state}, {"taken": 2}, {"loss": []})
    blank = jax.tree.map(
        lambda x: jax.device_put(jnp.zeros_like(x), x.sharding), run.state
    )
    restored: Any = Checkpoints(tmp_path / "run").restore({"opt_state": blank})
    state = restored.state["opt_state"]
    assert jax.tree.structure(state) == jax.tree.structure(run.state)
    assert copies(state) == copies(run.state)


def test_residuals_of_bytes_lie_along_the_axis() -> None:
    mesh = data_mesh(8)
    params = [jnp.zeros(s) for s in SHAPES]
    tx = sfpo.sfpo(0.1, 10, axis_name="data", error_dtype="int8", nu_dtype="int8")
    with jax.set_mesh(mesh):
        state = jax.eval_shape(tx.init, params)
        specs = sfpo.state_specs(state, "data")
        placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        made: Any = jax.jit(tx.init, out_shardings=placed)(params)
    for node in (made.sparsify.residual.tree[0], made.onebit_adam.worker_error.tree[0]):
        assert repr(node) == "Quantized(int8[8, 32, 512], blocks of 256)"
        assert node.scales.shape == (8, 32, 2)
        for array in (node.values, node.scales):
            assert array.addressable_shards[0].data.shape[0] == 1
    assert made.onebit_adam.nu[0].values.sharding.is_fully_replicated
