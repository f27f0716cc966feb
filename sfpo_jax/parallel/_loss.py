"""Loss, aux and gradients of one rank's batch, in microbatches."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from sfpo_jax.collectives import is_float
from sfpo_jax.parallel._metrics import as_metrics

LossFn = Callable[..., Any]


def loss_and_grads(
    loss_fn: LossFn,
    params: Any,
    batch: Any,
    key: jax.Array | None,
    model_state: Any,
    microbatches: int,
) -> tuple[jax.Array, dict[str, jax.Array], Any, Any]:
    """(loss, aux, model state, gradients), means over the microbatches.

    The model state goes through the microbatches in turn. Gradients of several are
    accumulated in float32 and come back in the parameters' dtypes; that of an integer
    parameter is zeros.
    """

    def run(batch: Any, key: Any, model_state: Any) -> Any:
        extra = {} if key is None else {"key": key}
        if model_state is not None:
            extra["model_state"] = model_state

        def loss(params: Any) -> tuple[jax.Array, dict[str, Any]]:
            out = loss_fn(params, batch, **extra)
            value, aux = out if isinstance(out, tuple) else (out, {})
            return value, dict(aux)

        (value, aux), grads = jax.value_and_grad(loss, has_aux=True, allow_int=True)(
            params
        )
        if model_state is not None:
            if "model_state" not in aux:
                raise ValueError(
                    "`loss_fn` must return (loss, aux) with the new state in "
                    f'aux["model_state"], got aux with {sorted(aux) or "nothing"}.'
                )
            model_state = aux.pop("model_state")
        value, aux = as_metrics(value, aux)
        grads = jax.tree.map(_gradient, grads, params)
        return value, aux, model_state, grads

    if microbatches == 1:
        return run(batch, key, model_state)

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(microbatches, x.shape[0] // microbatches, *x.shape[1:])

    def body(carry: Any, part: Any) -> Any:
        total, model_state = carry
        index, batch = part
        own_key = None if key is None else jax.random.fold_in(key, index)
        value, aux, model_state, grads = run(batch, own_key, model_state)
        return (jax.tree.map(_add, total, grads), model_state), (value, aux)

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, _accumulator(p)), params)
    parts = (jnp.arange(microbatches), jax.tree.map(split, batch))
    (total, model_state), (values, auxes) = lax.scan(body, (zeros, model_state), parts)
    grads = jax.tree.map(lambda t, p: _finish(t, p, microbatches), total, params)
    value, aux = jax.tree.map(lambda x: jnp.mean(x, axis=0), (values, auxes))
    return value, aux, model_state, grads


def _accumulator(param: jax.Array) -> Any:
    is_narrow = is_float(param) and param.dtype.itemsize < 4
    return jnp.float32 if is_narrow or not is_float(param) else param.dtype


def _gradient(grad: Any, param: jax.Array) -> jax.Array:
    # Differentiation gives integers a float0, which holds nothing.
    return grad if is_float(param) else jnp.zeros_like(param)


def _add(total: jax.Array, grad: jax.Array) -> jax.Array:
    return total + grad.astype(total.dtype)


def _finish(total: jax.Array, param: jax.Array, microbatches: int) -> jax.Array:
    return (total / microbatches).astype(param.dtype)
