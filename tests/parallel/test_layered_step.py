"""The layered step against plain differentiation of unstacked layers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sfpo_jax as sfpo
from tests.parallel.layered_reference import (
    DEPTH,
    HIDDEN,
    MODEL,
    ROWS,
    WIDTH,
    Reference,
    batch_of,
    parameters,
    single,
)

RANKS, STEPS = 8, 20


def adamw(axis: Any) -> Any:
    del axis
    return optax.adamw(1e-3, weight_decay=0.1)


def onebit(axis: Any) -> Any:
    return sfpo.onebit_adam(
        1e-3, weight_decay=0.1, warmup_steps=4, refresh_every=5, axis_name=axis
    )


def low_rank(axis: Any) -> Any:
    return optax.chain(sfpo.low_rank_mean(2, axis), optax.adamw(1e-3))


def chain(axis: Any) -> Any:
    return optax.chain(
        sfpo.sparsify(0.6, error_feedback=True, axis_name=axis),
        sfpo.onebit_adam(1e-3, warmup_steps=4, axis_name=axis),
    )


def eightbit(axis: Any) -> Any:
    del axis
    return sfpo.adamw8bit(1e-3, weight_decay=0.1)


_known: dict[Any, Any] = {}


def reference(
    make: Callable[[Any], Any], axis: str | None, max_norm: float | None
) -> Any:
    """What the reference reaches, once for all tests that ask."""
    key = (make.__name__, axis, max_norm)
    if key not in _known:
        mesh = sfpo.make_mesh(node=2)
        reduces = (axis,) if axis else ()
        _known[key] = Reference(make(axis), mesh, reduces, max_norm).run(STEPS)
    return _known[key]


CASES: dict[str, tuple[Callable[[Any], Any], str | None, dict[str, Any]]] = {
    "adamw": (adamw, None, {}),
    "adamw, all saved": (adamw, None, {"recompute": "none"}),
    "adamw, clipped, 2 microbatches": (
        adamw,
        None,
        {"max_norm": 0.5, "microbatches": 2},
    ),
    "adamw, states sharded": (adamw, None, {"shard": "states"}),
    "adamw, weights sharded": (adamw, None, {"shard": "weights"}),
    "adamw, weights sharded over all, clipped": (
        adamw,
        None,
        {
            "shard": "weights",
            "shard_axes": ("node", "data"),
            "weight_prefetch": 2,
            "max_norm": 0.5,
            "recompute": ((1, "full"), (2, "none")),
        },
    ),
    "onebit_adam": (onebit, "data", {}),
    "onebit_adam between nodes, clipped": (onebit, "node", {"max_norm": 0.5}),
    "low_rank_mean and adamw": (low_rank, "data", {}),
    "sparsify and onebit_adam, layers treated in three ways": (
        chain,
        "data",
        {
            "skip_nonfinite": True,
            "recompute": ((1, "none"), (1, ()), (1, "full")),
        },
    ),
    "adamw8bit": (eightbit, None, {"recompute": ()}),
}


@pytest.mark.parametrize(
    "case",
    # Where an axis is compressed, two phases are compiled, here and for the reference.
    [
        pytest.param(case, marks=pytest.mark.slow if axis else ())
        for case, (_, axis, _) in CASES.items()
    ],
)
def test_it_equals_plain_differentiation(case: str) -> None:
    make, axis, options = CASES[case]
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wanted, losses, norms = reference(make, axis, options.get("max_norm"))
        step = sfpo.make_layered_train_step(
            MODEL, make(axis), sfpo.make_mesh(node=2), **options
        )
        state = step.init(parameters())
        for i in range(STEPS):
            state, metrics = step(state, batch_of(i))
            assert float(metrics["loss"]) == pytest.approx(losses[i], rel=1e-9)
            assert float(metrics["grad_norm"]) == pytest.approx(norms[i], rel=1e-9)
            assert float(metrics["row"]) == pytest.approx((ROWS - 1) / 2)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-9),
            state.params,
            wanted,
        )


def test_states_of_a_sharded_step_lie_one_part_a_device() -> None:
    tx = sfpo.adamw8bit(1e-3)
    mesh = sfpo.make_mesh()
    step = sfpo.make_layered_train_step(MODEL, tx, mesh, shard="weights")
    shapes = step.init_shapes(jax.tree.map(np.float32, parameters()))
    up = shapes.params["layers"]["up"]
    assert up.sharding.shard_shape(up.shape) == (DEPTH, WIDTH // RANKS, HIDDEN)
    mu = shapes.opt_state.layers.tx.mu["up"].values
    assert mu.shape == (DEPTH, RANKS, WIDTH // RANKS, HIDDEN)
    assert mu.sharding.shard_shape(mu.shape) == (DEPTH, 1, WIDTH // RANKS, HIDDEN)
    # Too small to be cut: every device has it, and a state for all of it.
    bias = shapes.params["layers"]["bias"]
    assert bias.sharding.is_fully_replicated


@pytest.mark.slow
def test_quantised_states_do_not_depend_on_how_they_are_sharded() -> None:
    reached = []
    for shard in ("none", "states", "weights"):
        with jax.enable_x64(True):
            tx = sfpo.adamw8bit(1e-3, nu_dtype="int8")
            mesh = sfpo.make_mesh()
            step = sfpo.make_layered_train_step(MODEL, tx, mesh, shard=shard)
            state = step.init(parameters())
            # Later, rounding at random would differ between the shards.
            state, _ = step(state, batch_of(0))
            reached.append(jax.tree.map(np.asarray, state.params))
    for other in reached[1:]:
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-9),
            reached[0],
            other,
        )


@pytest.mark.parametrize("rounding", ["stochastic", "error_term"])
@pytest.mark.slow
def test_bfloat16_weights_follow_those_of_float32(rounding: str) -> None:
    """Steps far under a bfloat16's unit, which the nearest would lose altogether."""

    def run(dtype: Any, rounding: str | None) -> Any:
        mesh = sfpo.make_mesh()
        step = sfpo.make_layered_train_step(
            MODEL, optax.sgd(1e-4), mesh, rounding=rounding
        )
        params = jax.tree.map(lambda x: jnp.asarray(x, dtype), parameters())
        state = step.init(params)
        for _ in range(30):
            state, _ = step(state, jax.tree.map(single, batch_of(0)))
        return jax.tree.map(np.float32, state.params)

    wanted = run(jnp.float32, None)
    start = jax.tree.map(
        lambda x: np.float32(jnp.asarray(x, jnp.bfloat16)), parameters()
    )
    nearest = run(jnp.bfloat16, None)
    rounded = run(jnp.bfloat16, rounding)

    def moved(params: Any) -> np.ndarray:
        return (params["layers"]["up"] - start["layers"]["up"]).reshape(-1)

    def alike(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ b / (b @ b))

    exact = np.float32(parameters()["layers"]["up"])
    true = (wanted["layers"]["up"] - exact).reshape(-1)
    assert abs(alike(moved(rounded), true) - 1) < 0.2
    assert alike(moved(nearest), true) < 0.5


def test_shards_are_rounded_apart_and_whole_weights_alike() -> None:
    """Equal weights and gradients: only what is drawn tells shards from each other."""
    model = sfpo.LayeredModel(
        embed=lambda outer, batch, key: batch["x"],
        block=lambda layer, x, key: (
            x + sum(jnp.sum(p.astype(jnp.float32)) for p in layer.values())
        ),
        loss=lambda outer, x, batch, key: jnp.mean(x),
    )
    step = sfpo.make_layered_train_step(
        model,
        optax.sgd(2**-10),
        sfpo.make_mesh(),
        rounding="stochastic",
        shard="weights",
    )
    layers = {"cut": jnp.ones((1, RANKS * 4096)), "whole": jnp.ones((1, 64))}
    layers = jax.tree.map(lambda p: p.astype(jnp.bfloat16), layers)
    state = step.init({"outer": {}, "layers": layers})
    state, _ = step(state, {"x": jnp.zeros(RANKS)})
    cut, whole = (
        [np.float32(part.data) for part in state.params["layers"][name].global_shards]
        for name in layers
    )
    for place, part in enumerate(cut):
        assert part.shape == (1, 4096) and 0.2 < np.mean(part < 1) < 0.3
        assert not any(np.array_equal(part, other) for other in cut[:place])
    for part in whole[1:]:
        np.testing.assert_array_equal(part, whole[0])


def test_dropout_repeats_in_recomputation() -> None:
    """With one key, both ways to get a gradient see the same dropped entries."""
    reached = []
    for recompute in ("full", "none"):
        with jax.enable_x64(True):
            step = sfpo.make_layered_train_step(
                MODEL,
                optax.sgd(0.1),
                sfpo.make_mesh(),
                has_key=True,
                microbatches=2,
                recompute=recompute,
                max_norm=0.5,
            )
            state = step.init(parameters(), jax.random.key(3))
            first = state.params["outer"]["in"].copy()
            state, metrics = step(state, batch_of(0))
            reached.append((state.params["outer"]["in"], metrics["grad_norm"]))
            assert not np.array_equal(first, reached[-1][0])
    np.testing.assert_allclose(*[p for p, _ in reached], rtol=0, atol=1e-12)
    np.testing.assert_allclose(*[n for _, n in reached], rtol=1e-12)


@pytest.mark.parametrize("kind", ["skip_nonfinite", "max_norm", "by layer"])
def test_a_step_that_is_not_finite_is_skipped(kind: str) -> None:
    options = {"skip_nonfinite": {"skip_nonfinite": True}, "max_norm": {"max_norm": 1}}
    step = sfpo.make_layered_train_step(
        MODEL, optax.adam(0.1), sfpo.make_mesh(), **options.get(kind, {})
    )
    with jax.numpy_dtype_promotion("standard"):
        state = step.init(jax.tree.map(np.float32, parameters()))
        before = jax.tree.map(np.asarray, (state.params, state.opt_state))
        bad = jax.tree.map(single, batch_of(0))
        bad["x"][3] = np.nan
        state, metrics = step(state, bad)
        jax.tree.map(
            np.testing.assert_array_equal, (state.params, state.opt_state), before
        )
        assert int(metrics["skipped"]) == 1 and int(state.step) == 1
        state, metrics = step(state, jax.tree.map(single, batch_of(0)))
        assert int(metrics["skipped"]) == 1 and np.isfinite(metrics["loss"])


def make(**options: Any) -> Any:
    return sfpo.make_layered_train_step(
        MODEL, options.pop("tx", optax.sgd(0.1)), sfpo.make_mesh(), **options
    )


def uneven() -> Any:
    params = parameters()
    params["layers"]["bias"] = params["layers"]["bias"][:2]
    return params


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (lambda: make(recompute="some"), '`recompute` must be "full", "none" or'),
        (lambda: make(shard="states", shard_axes=("rows",)), "must name batch axes"),
        (lambda: make(max_norm=0.0), "`max_norm` must lie in"),
        (lambda: make(rounding="up"), "`kind` must be None"),
        (lambda: make().init({"w": np.ones(3)}), '`params` must be {"outer"'),
        (lambda: make().init(uneven()), r"\['down'\] has 3 .* \['bias'\]"),
        (lambda: make(has_key=True).init(parameters()), "`key` is missing"),
        (
            lambda: make(recompute={"encoder": "none"}).init(parameters()),
            r"must be one choice, as the model has one stack, got \['encoder'\]",
        ),
        (
            lambda: make(recompute=[(1, "full"), (2, "some")]).init(parameters()),
            '`recompute` must be "full", "none" or',
        ),
        (
            lambda: make(recompute=[(2, "full"), (3, "none")]).init(parameters()),
            "about 5 layers, the stack has 3",
        ),
        (
            lambda: make(
                tx=optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
            ).init(jax.tree.map(np.float32, parameters())),
            r"cannot run layer by layer: the update of \['down'\] .*`max_norm=`",
        ),
        (
            lambda: sfpo.stack_layers([{"w": np.ones(3)}, {"w": np.ones(4)}]),
            r"`layers\[1\]` does not stack .*\['w'\] is float64\[4\] there",
        ),
        (
            lambda: sfpo.stack_layers([{"w": np.ones(3)}, {"b": np.ones(3)}]),
            r"they differ in \['b'\], \['w'\]",
        ),
    ],
)
def test_bad_input_is_named(run: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run()
