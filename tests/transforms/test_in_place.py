"""Parameters moved in place are those that updates would have made."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sfpo_jax as sfpo
from sfpo_jax.transforms import InPlaceTransformation, apply_gradients

STEPS = 8


def _params(dtype: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "matrix": jnp.asarray(rng.standard_normal((70, 64)), dtype),
        "bias": jnp.asarray(rng.standard_normal(5), dtype),
        "empty": jnp.zeros((0, 3), dtype),
        "count": jnp.arange(3),
    }


def _grads(params: Any, step: int) -> Any:
    def grad(p: jax.Array) -> jax.Array:
        if not jnp.issubdtype(p.dtype, jnp.floating):
            return jnp.zeros_like(p)
        noise = np.random.default_rng(step).standard_normal(p.shape)
        nan = np.where(step == 5, np.nan, 0)
        return jnp.asarray(noise + nan, p.dtype)

    return jax.tree.map(grad, params)


def _onebit(**changes: Any) -> InPlaceTransformation:
    arguments: dict[str, Any] = {"warmup_steps": 3, "weight_decay": 0.1, **changes}
    mask = {"matrix": True, "bias": False, "empty": True, "count": False}
    return sfpo.onebit_adam(0.01, mask=mask, **arguments)


@pytest.mark.parametrize(
    ("tx", "dtype"),
    [
        (_onebit(), jnp.float32),
        (_onebit(), jnp.bfloat16),
        (_onebit(mu_dtype="packed"), jnp.float32),
        (_onebit(compressor=sfpo.compression.int8()), jnp.float32),
        (_onebit(weight_decay=0.0), jnp.float32),
        (sfpo.sfpo(0.01, 16, weight_decay=0.1, warmup_steps=3), jnp.float32),
        (sfpo.adamw8bit(0.01, weight_decay=0.1), jnp.float32),
        (sfpo.adamw8bit(0.01), jnp.bfloat16),
    ],
    ids=[
        "float32",
        "bfloat16",
        "packed",
        "int8",
        "no decay",
        "sfpo",
        "adamw8bit",
        "adamw8bit, bfloat16",
    ],
)
def test_in_place_is_update_and_add(tx: InPlaceTransformation, dtype: Any) -> None:
    @jax.jit
    def both(params: Any, state: Any, grads: Any) -> Any:
        updates, new = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), new

    @jax.jit
    def moved(params: Any, state: Any, grads: Any) -> Any:
        return apply_gradients(tx, grads, state, params)

    def dtype_of(x: jax.Array) -> Any:
        return x.dtype

    params = _params(dtype)
    state = tx.init(params)
    for step in range(STEPS):
        grads = _grads(params, step)
        want, want_state = both(params, state, grads)
        got, state = moved(params, state, grads)
        jax.tree.map(
            lambda a, b: (
                np.testing.assert_allclose(
                    np.asarray(a, np.float32),
                    np.asarray(b, np.float32),
                    rtol=1e-2,
                    atol=1e-4,
                )
                if a.dtype == jnp.bfloat16
                else np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
            ),
            got,
            want,
        )
        assert jax.tree.map(jnp.shape, state) == jax.tree.map(jnp.shape, want_state)
        assert jax.tree.map(dtype_of, got) == jax.tree.map(dtype_of, params)
        if step == 5:
            same = jax.tree.map(lambda a, b: bool((a == b).all()), got, params)
            assert all(jax.tree.leaves(same)), "a step that was skipped moved something"
        params = got


def test_any_other_transformation_updates_and_adds() -> None:
    tx = optax.sgd(1.0)
    params = jnp.ones(3)
    new, _ = apply_gradients(tx, params, tx.init(params), params)
    assert (new == 0).all()


def scale(updates: Any, state: Any, params: Any = None) -> Any:
    return 2 * updates, state


def test_copies_and_pickles_are_whole() -> None:
    functions: Any = (str, scale, len)
    tx = InPlaceTransformation(*functions)
    for made in (copy.copy(tx), copy.deepcopy(tx), pickle.loads(pickle.dumps(tx))):
        assert type(made) is InPlaceTransformation
        assert made == tx and made.apply is len


def test_a_pair_with_changes_keeps_nothing_of_the_old() -> None:
    made = _onebit()._replace(init=optax.identity().init, update=scale)
    new, _ = apply_gradients(made, jnp.ones(3), made.init(jnp.ones(3)), jnp.ones(3))
    assert (new == 3).all()


def test_optax_takes_it_for_its_own() -> None:
    tx = _onebit()
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    assert optax.with_extra_args_support(tx) is tx
    init, update = tx
    assert (init, update) == (tx.init, tx.update)
