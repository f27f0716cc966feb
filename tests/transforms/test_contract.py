"""One table of all transformations, one list of promises that each of them keeps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import sfpo_jax as sfpo
from tests.ranks import Ranks, assert_alike, assert_rows_alike, compiled_programs


class Row(NamedTuple):
    """One transformation."""

    make: Callable[..., Any]
    numbers: dict[str, Any]  # that `optax.inject_hyperparams` may trace
    others: dict[str, Any]
    reduces: bool = True  # its updates are alike on all ranks

    def build(self, axis_name: str | None) -> Any:
        return self.make(**self.numbers, **self.others, axis_name=axis_name)


def chain(learning_rate: Any, sparsity: Any, axis_name: Any) -> Any:
    return optax.chain(
        sfpo.sparsify(sparsity, error_feedback=True, min_size=4, axis_name=axis_name),
        sfpo.onebit_adam(learning_rate, warmup_steps=2, axis_name=axis_name),
    )


def averaged(
    learning_rate: Any, weight_decay: Any, b1: Any, b2: Any, eps: Any, axis_name: Any
) -> Any:
    """Alone it is local: its updates are alike where the gradients are."""
    int8 = sfpo.compression.int8()
    mean = sfpo.compressed_mean(int8, axis_name, error_dtype="int8")
    adamw = sfpo.adamw8bit(learning_rate, b1, b2, eps, weight_decay)
    return optax.chain(mean, adamw)


ADAM = {"b1": 0.8, "b2": 0.9, "eps": 1e-6}
RATED = {"learning_rate": 0.1, "weight_decay": 0.1, **ADAM}
WARMUP = {"warmup_steps": 2}
ROWS = {
    "sparsify": Row(sfpo.sparsify, {"sparsity": 0.5}, {"min_size": 4}, False),
    "sparsify, momentum": Row(
        sfpo.sparsify, {"sparsity": 0.5, "momentum": 0.9}, {"min_size": 4}, False
    ),
    "clip_by_global_norm": Row(sfpo.clip_by_global_norm, {"max_norm": 1.0}, {}, False),
    "compressed_mean": Row(
        sfpo.compressed_mean, {}, {"compressor": sfpo.compression.sign()}
    ),
    # What shapes depend on cannot be traced, and Optax's integers compile twice.
    "low_rank_mean": Row(
        sfpo.low_rank_mean, {}, {"rank": 1, "min_compression": 1.5, "seed": 3}
    ),
    "scale_by_onebit_adam": Row(sfpo.scale_by_onebit_adam, ADAM, WARMUP),
    "onebit_adam": Row(sfpo.onebit_adam, RATED, WARMUP),
    "onebit_adam, packed": Row(
        sfpo.onebit_adam, RATED, {"mu_dtype": "packed", **WARMUP}
    ),
    "onebit_adam, int8": Row(
        sfpo.onebit_adam,
        RATED,
        {"mu_dtype": "int8", "nu_dtype": "int8", "error_dtype": "int8", **WARMUP},
    ),
    "zero_one_adam": Row(sfpo.zero_one_adam, RATED, {"sync_every": 2, **WARMUP}),
    "adamw8bit": Row(averaged, RATED, {}),
    # The rule of "auto" is made for one b2 and one run, which cannot be traced.
    "onebit_adam, auto": Row(
        sfpo.onebit_adam,
        {"learning_rate": 0.1},
        {"warmup_steps": "auto", "total_steps": 10, "b2": 0.5},
    ),
    "sfpo": Row(
        sfpo.sfpo,
        RATED,
        {"total_steps": 10, "min_size": 4, "refresh_every": 3, **WARMUP},
    ),
    "sfpo, int8": Row(
        sfpo.sfpo,
        RATED,
        {
            "total_steps": 10,
            "min_size": 4,
            "nu_dtype": "factored",
            "error_dtype": "int8",
            "refresh_every": 3,
            **WARMUP,
        },
    ),
    "chain": Row(chain, {"learning_rate": 0.1, "sparsity": 0.5}, {}),
}
EXTRA: dict[str, Any] = {"value": 1.0, "grad": None, "what else there is": "x"}


def parameters() -> dict[str, jax.Array]:
    """Every dtype, and shapes: scalar, empty, prime, several blocks."""
    return {
        "scalar": jnp.ones([], jnp.float32),
        "empty": jnp.zeros((0, 3), jnp.float32),
        "prime": jnp.ones(2053, jnp.bfloat16),
        "half": jnp.ones((2, 3), jnp.float16),
        "large": jnp.ones((4, 1025), jnp.float32),
        "int": jnp.arange(4),
        "bool": jnp.ones(2, jnp.bool_),
    }


def gradients(params: Any, seed: int, *leading: int) -> Any:
    """Normal where floating, zero where not."""
    rng = np.random.default_rng(seed)

    def grad(p: Any) -> jax.Array:
        shape = (*leading, *p.shape)
        if not jnp.issubdtype(p.dtype, jnp.floating):
            return jnp.zeros(shape, p.dtype)
        return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(p.dtype)

    return jax.tree.map(grad, params)


def types(tree: Any) -> Any:
    """Shapes and dtypes, weak types told apart."""
    return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)


@pytest.fixture(params=ROWS)
def row(request: pytest.FixtureRequest) -> Row:
    return ROWS[request.param]


def test_it_works_in_shard_map(row: Row) -> None:
    params = parameters()
    run = Ranks(row.build("data"), params, 8, reduces=row.reduces, extra_args=EXTRA)
    before = types(run.state)
    for step in range(5):
        grads = gradients(params, step, 8)
        updates = run.step(grads)
        for name, update in updates.items():
            assert update.dtype == params[name].dtype, name
            assert update.shape == (8, *params[name].shape), name
            assert np.isfinite(update.astype(jnp.float32)).all(), name
            if not jnp.issubdtype(update.dtype, jnp.floating):
                np.testing.assert_array_equal(update, grads[name])
            elif update.size:
                assert np.asarray(update).any(), name
        assert types(run.state) == before
        if row.reduces:
            assert_rows_alike(updates)
            assert_alike(run.params)
    assert run.traces == compiled_programs(run.update) == 1


def test_it_works_with_the_checks_of_shard_map(row: Row) -> None:
    # They are made while tracing; what is compiled afterwards is the same.
    params = parameters()
    run = Ranks(
        row.build("data"),
        params,
        8,
        reduces=row.reduces,
        check_vma=True,
        extra_args=EXTRA,
    )
    arguments = gradients(params, 0, 8), run.state, params
    if row in (ROWS["onebit_adam, packed"], ROWS["zero_one_adam"]):
        with pytest.raises(TypeError, match="check_vma=False"):
            jax.eval_shape(run.update, *arguments)
        return
    _, state, _ = jax.eval_shape(run.update, *arguments)
    assert types(state) == types(run.state)


def test_its_state_is_stable_under_cond(row: Row) -> None:
    params, tx = parameters(), row.build(None)

    def maybe(flag: jax.Array, grads: Any, state: Any) -> Any:
        def update() -> Any:
            return tx.update(grads, state, params, **EXTRA)

        return jax.lax.cond(flag, update, lambda: (grads, state))

    state = tx.init(params)
    _, new = jax.eval_shape(maybe, jnp.bool_(True), gradients(params, 0), state)
    assert types(new) == types(state)


def test_it_takes_trees_of_two_precisions(row: Row) -> None:
    with jax.enable_x64(True):
        params = {"single": jnp.ones(9, jnp.float32), "double": jnp.ones(9)}
        assert params["double"].dtype == jnp.float64
        tx = row.build(None)
        state = tx.init(params)
        updates, new = jax.eval_shape(tx.update, params, state, params)
    assert types(new) == types(state)
    assert types(updates) == types(params)


def test_it_works_under_multi_steps_and_inject_hyperparams(row: Row) -> None:
    params = {"w": jnp.ones((30, 40)), "b": jnp.ones(7, jnp.bfloat16)}
    static = {**row.others, "axis_name": None}
    injected = optax.inject_hyperparams(row.make, static_args=tuple(static))
    tx: Any = optax.MultiSteps(injected(**row.numbers, **static), 2)
    plain = row.build(None)
    # Optax itself needs the promotion that the tests forbid elsewhere.
    with jax.numpy_dtype_promotion("standard"):
        state, update = tx.init(params), jax.jit(tx.update)
        grads = gradients(params, 1)
        expected, _ = jax.jit(plain.update)(grads, plain.init(params), params)
        for step in range(6):
            updates, state = update(grads, state, params)
            for name, u in updates.items():
                found = np.asarray(u, np.float32)
                assert u.dtype == params[name].dtype
                assert found.any() == (step % 2 == 1), name
                if step == 1:
                    e = np.asarray(expected[name], np.float32)
                    # The numbers are float32 now, and 1 - b2 loses three digits; the
                    # mean of two equal gradients is rounded to the leaf's dtype.
                    rtol = 1e-5 if name == "w" else 2.0**-7
                    np.testing.assert_allclose(found, e, rtol=rtol, err_msg=name)
        assert compiled_programs(update) == 1


class Linear(nnx.Module):
    """The smallest NNX model with a state that is no parameter."""

    def __init__(self) -> None:
        self.layer = nnx.Linear(30, 40, rngs=nnx.Rngs(0))
        self.calls = nnx.BatchStat(jnp.zeros([]))


def test_it_works_with_an_nnx_optimizer(row: Row) -> None:
    model = Linear()
    optimizer = nnx.Optimizer(model, row.build(None), wrt=nnx.Param)
    before = jax.tree.map(jnp.copy, nnx.state(model, nnx.Param))

    def step(model: Any, optimizer: Any, x: Any) -> None:
        grads = nnx.grad(lambda model: jnp.mean(model.layer(x) ** 2))(model)
        optimizer.update(model, grads)

    # Traced, as under `nnx.jit`, then run once for the row that is advertised.
    graph, state = nnx.split((model, optimizer))

    def pure(state: Any, x: Any) -> Any:
        model, optimizer = nnx.merge(graph, state)
        step(model, optimizer, x)
        return nnx.state((model, optimizer))

    new = jax.eval_shape(pure, state, jnp.ones((2, 30)))
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, state)
    if row is ROWS["chain"]:
        nnx.jit(step)(model, optimizer, jnp.ones((2, 30)))
        after = nnx.state(model, nnx.Param)
        assert all(
            np.any(np.asarray(a) != np.asarray(b))
            for a, b in zip(
                jax.tree.leaves(after), jax.tree.leaves(before), strict=True
            )
        )


def test_it_works_with_a_linen_train_state(row: Row) -> None:
    model = flax.linen.Dense(40)
    params = model.init(jax.random.key(0), jnp.ones((2, 30)))
    state: Any = flax.training.train_state.TrainState.create(
        apply_fn=model.apply, params=params, tx=row.build(None)
    )

    def step(state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jnp.mean(state.apply_fn(p, x) ** 2))(state.params)
        return state.apply_gradients(grads=grads)

    new = jax.eval_shape(step, state, jnp.ones((2, 30)))
    assert types(new.opt_state) == types(state.opt_state)
    if row is ROWS["chain"]:
        moved = jax.jit(step)(state, jnp.ones((2, 30)))
        kernel = moved.params["params"]["kernel"]
        assert np.any(np.asarray(kernel != params["params"]["kernel"]))
