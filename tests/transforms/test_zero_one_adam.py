"""0/1 Adam against its equations, 1-bit Adam, and what it promises of the wire."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import sfpo_jax as sfpo
from sfpo_jax.transforms import reshare, takes_local_steps
from tests.oracle import Codec
from tests.oracle_local import ZeroOneAdam
from tests.ranks import Ranks, assert_alike, data_mesh

SHAPES: list[tuple[int, ...]] = [(4099,), (2, 3), (), (2049,)]
DECAYED = [True, False, True, False]
WARMUP, STEPS, UNUSED, BLOCK = 6, 30, 500, 256


def rate(step: Any) -> Any:
    """Powers of two: the same number in every precision."""
    return jnp.where(step < 20, 2.0**-6, 2.0**-7)


def gradients(ranks: int) -> Callable[[int, int, list[Any]], list[np.ndarray]]:
    """(step, rank, parameters) -> noise of its own and a pull to zero."""
    rng = np.random.default_rng(ranks)
    noise = [rng.normal(size=(7, ranks, *shape)) for shape in SHAPES]

    def at(step: int, rank: int, params: list[Any]) -> list[np.ndarray]:
        grads = [
            n[step % 7, rank] + 0.1 * np.asarray(p)
            for n, p in zip(noise, params, strict=True)
        ]
        grads[3][:UNUSED] = 0.0
        return grads

    return at


def start() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [np.asarray(rng.normal(size=shape)) for shape in SHAPES]


def drifts(state: Any, ranks: int) -> list[list[np.ndarray]]:
    """By rank and leaf."""
    leaves = [np.asarray(d) for d in state.drift.tree]
    return [
        [d.reshape(-1, *shape)[i] for d, shape in zip(leaves, SHAPES, strict=True)]
        for i in range(ranks)
    ]


@pytest.mark.parametrize(
    ("ranks", "double_every", "density", "refresh"),
    [(None, None, 1.0, 4), (3, None, 1.0, None), (2, 4, 0.3, 5)],
)
def test_it_follows_the_equations(
    ranks: int | None, double_every: int | None, density: float, refresh: int | None
) -> None:
    count, at = ranks or 1, gradients(ranks or 1)
    codec = Codec(density, relaxation=1.5)
    oracle = ZeroOneAdam(
        start(),
        count,
        lambda step: float(rate(step)),
        WARMUP,
        lambda since: 3 if double_every is None else min(3, 2 ** (since // 4)),
        decay=0.1,
        decayed=DECAYED,
        codec=codec,
        nu_floor=0.01,
        refresh=refresh,
    )
    with jax.enable_x64(True):
        tx = sfpo.zero_one_adam(
            rate,
            weight_decay=0.1,
            warmup_steps=WARMUP,
            sync_every=3,
            double_every=double_every,
            refresh_every=refresh,
            axis_name=None if ranks is None else "data",
            compressor=sfpo.compression.sparse_sign(density, relaxation=1.5),
            mask=DECAYED,
        )
        run = Ranks(tx, [jnp.asarray(p) for p in start()], ranks)
        for step in range(STEPS):
            oracle.step([at(step, i, oracle.local[i]) for i in range(count)])
            shared = [np.asarray(p) for p in run.params]
            local = [
                [p - d for p, d in zip(shared, own, strict=True)]
                for own in drifts(run.state, count)
            ]
            grads = [at(step, i, local[i]) for i in range(count)]
            run.step([np.stack(leaf) for leaf in zip(*grads, strict=True)])
            for found, wanted in zip(run.params, oracle.shared, strict=True):
                np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9)
        assert run.traces == 1
        assert_alike((run.params, run.state.nu, run.state.count, run.state.rates))
        for i, own in enumerate(drifts(run.state, count)):
            for j, drift in enumerate(own):
                wanted = oracle.shared[j] - oracle.local[i][j]
                np.testing.assert_allclose(drift, wanted, rtol=0, atol=1e-9)


def test_synchronised_each_step_it_is_onebit_adam() -> None:
    at, reached = gradients(2), []
    # With b1 = 0.5 the corrections, which 1-bit Adam applies behind the residuals, are
    # 1 to the last bit when the variance freezes.
    shared = {"b1": 0.5, "warmup_steps": 60, "axis_name": "data"}
    for make in (
        lambda: sfpo.onebit_adam(2.0**-6, **shared),
        lambda: sfpo.zero_one_adam(2.0**-6, sync_every=1, **shared),
    ):
        with jax.enable_x64(True):
            run = Ranks(make(), [jnp.asarray(p) for p in start()], 2)
            for step in range(80):
                params = [np.asarray(p) for p in run.params]
                grads = [at(step, i, params) for i in range(2)]
                run.step([np.stack(leaf) for leaf in zip(*grads, strict=True)])
            reached.append([np.asarray(p) for p in run.params])
    for a, b in zip(*reached, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)


def loss_fn(params: Any, batch: Any) -> Any:
    hidden = jnp.tanh(batch["x"] @ params["in"])
    return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


def problem() -> tuple[Any, Any]:
    rng = np.random.default_rng(1)
    params = {
        "in": rng.normal(size=(8, 256)).astype(np.float32) / 3,
        "out": rng.normal(size=(256, 8)).astype(np.float32) / 16,
    }
    x = rng.normal(size=(64, 8)).astype(np.float32)
    return params, {"x": x, "y": np.sin(2 * x)}


LAYERED = sfpo.LayeredModel(
    embed=lambda outer, batch, key: batch,
    block=lambda layer, x, key: x @ layer["w"],
    loss=lambda outer, x, batch, key: jnp.mean(x),
)


def local(sync_every: int, axis_name: Any = "data", **options: Any) -> Any:
    return sfpo.zero_one_adam(
        1e-2,
        warmup_steps=20,
        sync_every=sync_every,
        axis_name=axis_name,
        compressor=sfpo.compression.sign(block_size=BLOCK, relaxation=1.5),
        **options,
    )


@pytest.fixture(scope="module")
def trained() -> tuple[Any, list[Any], list[float]]:
    """A step, the states it went through, and its losses."""
    params, batch = problem()
    step = sfpo.make_train_step(loss_fn, local(4), sfpo.make_mesh())
    state, states, losses = step.init(params), [], []
    for _ in range(120):
        state, metrics = step(state, batch)
        states.append(jax.device_get(state))
        losses.append(float(metrics["loss"]))
    assert step.differing(state) == []
    return step, states, losses


def test_parameters_move_when_ranks_agree(trained: Any) -> None:
    _, states, losses = trained
    weights = [state.params["in"].tobytes() for state in states]
    moved = [a != b for a, b in itertools.pairwise(weights)]
    assert all(moved[:19])  # the warm-up
    after = [place + 2 for place, has in enumerate(moved) if has and place >= 19]
    assert after == list(range(24, 121, 4))
    assert losses[-1] < 0.35 * losses[19]
    # In between the ranks are apart, and no two alike.
    drift = states[26].opt_state.drift.tree["in"]
    assert drift.shape == (8, 8, 256)
    assert len({row.tobytes() for row in drift}) == 8
    assert not states[27].opt_state.drift.tree["in"].any()


def test_only_a_synchronisation_sends_anything(trained: Any) -> None:
    step, _, _ = trained
    params, batch = problem()
    state = step.init_shapes(params)
    scalars, bits, dense = (
        step.wire_bytes(state, batch, phase)["data"]
        for phase in ("local", "compressed", "warmup")
    )
    assert scalars <= 64
    entries = 2 * 8 * 256
    payload = entries / 8 + 4 * entries / BLOCK
    np.testing.assert_allclose(bits - scalars, 2 * 7 / 8 * payload, rtol=0.01)
    np.testing.assert_allclose(dense - scalars, 2 * 7 / 8 * entries * 4, rtol=0.01)


@pytest.mark.parametrize("ranks", [2, 3])
def test_other_hosts_go_on_from_the_mean_of_drifts(trained: Any, ranks: int) -> None:
    _, states, _ = trained
    params, _ = problem()
    with jax.set_mesh(data_mesh(ranks)):
        template = jax.eval_shape(local(4).init, params)
    old = states[26].opt_state
    new = reshare(old, template)
    for name in ("drift", "mu", "worker_error"):
        before, after = (getattr(x, name).tree["in"] for x in (old, new))
        assert (len(before), len(after)) == (8, ranks)
        gap = np.abs(before.mean(0) - np.asarray(after).mean(0)).max()
        assert 0 < np.abs(before).max() and gap <= 1e-6 * np.abs(before).max()
    assert int(new.since) == int(old.since) == 3


def test_a_gradient_that_is_not_finite_moves_nobody() -> None:
    params, batch = problem()
    step = sfpo.make_train_step(loss_fn, local(3, nu_floor=0.0), sfpo.make_mesh())
    state = step.init(params)
    for _ in range(21):
        state, _ = step(state, batch)
    before = jax.device_get(state.opt_state)
    bad = {**batch, "y": batch["y"].copy()}
    bad["y"][0] = np.nan
    state, metrics = step(state, bad)
    assert int(metrics["skipped"]) == 1
    assert before.drift.tree["in"].any()
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.opt_state))


def test_it_goes_behind_a_mask_and_into_groups() -> None:
    params, batch = problem()
    tx = optax.chain(
        sfpo.sparsify(0.5, error_feedback=True, min_size=4, axis_name="data"),
        optax.multi_transform(
            {"slow": local(2), "fast": local(2)}, {"in": "slow", "out": "fast"}
        ),
    )
    step = sfpo.make_train_step(loss_fn, tx, sfpo.make_mesh())
    state, losses = step.init(params), []
    assert takes_local_steps(state.opt_state)
    for _ in range(60):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.5 * losses[20]


def test_local_params_are_those_of_a_rank() -> None:
    params, _ = problem()
    params = jax.tree.map(jnp.asarray, params)
    tx, mesh = local(4), data_mesh(2)
    with jax.set_mesh(mesh):
        state = tx.init(params)
    drift = jax.tree.map(
        lambda d: d + jnp.arange(2.0).reshape(2, 1, 1), state.drift.tree
    )
    state = state._replace(drift=state.drift._replace(tree=drift))
    found = jax.shard_map(
        lambda p, s: sfpo.local_params(p, s)["in"][None],
        mesh=mesh,
        in_specs=(PartitionSpec(), sfpo.state_specs(state, "data")),
        out_specs=PartitionSpec("data"),
        check_vma=False,
    )(params, state)
    np.testing.assert_array_equal(found[0], params["in"])
    np.testing.assert_array_equal(found[1], params["in"] - 1)
    # Where nothing drifts, nothing is copied.
    assert sfpo.local_params(params, optax.adam(0.1).init(params)) == params


@pytest.mark.parametrize(
    "make",
    [
        lambda tx, mesh: sfpo.make_train_step(loss_fn, tx, mesh, staleness=1),
        lambda tx, mesh: sfpo.make_train_step(loss_fn, tx, mesh, shard="states"),
        lambda tx, mesh: sfpo.make_layered_train_step(LAYERED, tx, mesh),
    ],
)
def test_steps_over_parts_of_weights_refuse_it(make: Callable[..., Any]) -> None:
    params: Any = {"outer": {}, "layers": {"w": jnp.zeros((2, 4, 4))}}
    with pytest.raises(ValueError, match="steps of their own"):
        make(local(2, "node"), sfpo.make_mesh(node=2)).init_shapes(params)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sync_every": 0}, "`sync_every` must be"),
        ({"sync_every": 2.5}, "`sync_every` must be a whole number"),
        ({"sync_every": 2, "double_every": 0}, "`double_every` must be"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        sfpo.zero_one_adam(0.1, warmup_steps=2, **options)
    with pytest.raises(ValueError, match="needs them"):
        tx = sfpo.zero_one_adam(0.1, warmup_steps=2, sync_every=2, weight_decay=0.1)
        tx.update(jnp.ones(2), tx.init(jnp.ones(2)))
