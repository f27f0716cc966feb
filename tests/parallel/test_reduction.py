"""Which axes a transformation reduces over is found by tracing it."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import sfpo_jax as sfpo
from sfpo_jax.parallel._reduction import reduced_axes

BATCH_AXES = ("node", "data")
PARAMS = {"w": jnp.zeros((40, 30)), "b": jnp.zeros(3, jnp.bfloat16)}


def onebit(axis_name: Any, **arguments: Any) -> Any:
    return sfpo.onebit_adam(0.1, warmup_steps=3, axis_name=axis_name, **arguments)


def chain(axis_name: Any) -> Any:
    return optax.chain(
        sfpo.clip_by_global_norm(1.0, axis_name),
        sfpo.sparsify(0.5, error_feedback=True, axis_name=axis_name),
        onebit(axis_name, weight_decay=0.1),
    )


def averaged(axis_name: Any, inner: Any) -> Any:
    return optax.chain(sfpo.compressed_mean(sfpo.compression.sign(), axis_name), inner)


def injected(axis_name: Any) -> Any:
    return optax.inject_hyperparams(sfpo.onebit_adam)(
        learning_rate=0.1, warmup_steps=3, axis_name=axis_name
    )


BOTH = ("node", "data")
CASES = {
    "adam": (optax.adam(0.1), ()),
    "sgd": (optax.sgd(0.1), ()),
    "clip, adamw": (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), ()),
    "no axis": (onebit(None), ()),
    # Agreement on a scalar is no reduction of the gradient.
    "sparsify": (optax.chain(sfpo.sparsify(0.5, axis_name="data"), optax.sgd(0.1)), ()),
    "clip": (sfpo.clip_by_global_norm(1.0, BOTH), ()),
    "onebit data": (onebit("data"), ("data",)),
    "onebit node": (onebit("node"), ("node",)),
    "onebit both": (onebit(BOTH), BOTH),
    "packed data": (onebit("data", mu_dtype="packed"), ("data",)),
    "packed node": (onebit("node", mu_dtype="packed"), ("node",)),
    "packed both": (onebit(BOTH, mu_dtype="packed"), BOTH),
    "zero_one data": (
        sfpo.zero_one_adam(0.1, warmup_steps=3, sync_every=2, axis_name="data"),
        ("data",),
    ),
    "no feedback": (onebit("node", error_feedback=False), ("node",)),
    "chain data": (chain("data"), ("data",)),
    "chain both": (chain(BOTH), BOTH),
    "sfpo": (sfpo.sfpo(0.1, 10, axis_name="node"), ("node",)),
    "mean, sgd": (averaged("data", optax.sgd(0.1)), ("data",)),
    "mean, adam": (averaged(BOTH, optax.adam(0.1)), BOTH),
    "a plain mean": (
        optax.chain(
            optax.stateless(lambda g, _: jax.lax.pmean(g, "node")), optax.adam(0.1)
        ),
        ("node",),
    ),
    "inject_hyperparams": (injected("data"), ("data",)),
    "inject_hyperparams, both": (injected(BOTH), BOTH),
}


def find(tx: Any, mesh: Any, params: Any = None) -> tuple[str, ...]:
    extended = optax.with_extra_args_support(tx)
    with jax.numpy_dtype_promotion("standard"):
        return reduced_axes(extended, params or PARAMS, mesh, BATCH_AXES)


@pytest.mark.parametrize("name", CASES)
def test_the_axes_are_found(name: str) -> None:
    tx, expected = CASES[name]
    assert find(tx, sfpo.make_mesh(node=2)) == expected


def test_integers_are_no_updates() -> None:
    params = {**PARAMS, "n": jnp.zeros(2, jnp.int32), "empty": jnp.zeros((0, 3))}
    assert find(chain("data"), sfpo.make_mesh(node=2), params) == ("data",)


def test_an_axis_of_one_rank_needs_no_reduction() -> None:
    mesh = sfpo.make_mesh(node=1)
    assert find(onebit(BOTH), mesh) == ("data",)
    assert find(onebit("node"), mesh) == ()


@pytest.mark.parametrize(
    "tx",
    [
        optax.MultiSteps(onebit("data"), 2),
        optax.MultiSteps(sfpo.low_rank_mean(2, "data"), 2),
        optax.chain(averaged("data", optax.identity()), onebit("node")),
    ],
    ids=["MultiSteps", "MultiSteps, low rank", "two axes"],
)
def test_what_cannot_be_found_out_is_refused(tx: Any) -> None:
    with pytest.raises(ValueError) as error:
        find(tx, sfpo.make_mesh(node=2))
    message = str(error.value)
    assert "`tx`" in message
    assert "`axis_name`" in message and "`reduces=`" in message
    assert "\n" not in message
