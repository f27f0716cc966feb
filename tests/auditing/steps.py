"""Steps with one planted fault each, small enough to compile in a moment."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

import sfpo_jax as sfpo
from sfpo_jax.transforms import dequantize, quantize
from tests.memory.programs import shape

WIDTH, DEPTH, BATCH = 64, 4, 16
ENTRIES = WIDTH**2
BFLOAT16 = {
    "mu": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.bfloat16),
    "count": jax.ShapeDtypeStruct((), jnp.int32),
}
INT8 = jax.eval_shape(lambda: {"mu": quantize(jnp.zeros((WIDTH, WIDTH)))})
GRADS = shape(WIDTH, WIDTH)
STACK, X = shape(DEPTH, WIDTH, WIDTH), shape(BATCH, WIDTH)
RATE = jnp.float32(0.1)


def line_of(function: Any, words: str) -> str:
    """ "file:line" of the line of a function that has these words."""
    lines, first = inspect.getsourcelines(function)
    number = next(i for i, line in enumerate(lines) if words in line)
    return f"{inspect.getsourcefile(function)}:{first + number}"


# ---- state in and out ------------------------------------------------------


def keeps(state: Any, grads: Any) -> Any:
    mu = jnp.float32(0.9) * state["mu"].astype(jnp.float32) + grads
    return {"mu": mu.astype(jnp.bfloat16), "count": state["count"] + 1}, mu.sum()


def widens(state: Any, grads: Any) -> Any:
    mu = jnp.float32(0.9) * state["mu"].astype(jnp.float32) + grads  # widened
    return {"mu": mu, "count": state["count"] + 1}, mu.sum()


def dequantizes(state: Any, grads: Any) -> Any:
    return {"mu": dequantize(state["mu"]) + grads}  # widened


def build_keeps(mesh: Any) -> Any:
    del mesh
    return jax.jit(keeps, donate_argnums=0), BFLOAT16, GRADS


def build_widens(mesh: Any) -> Any:
    del mesh
    return jax.jit(widens, donate_argnums=0), BFLOAT16, GRADS


# ---- loops over layers -----------------------------------------------------


def releases(params: Any, x: Any) -> Any:
    """Moves each layer where it lies."""

    def turn(i: Any, carry: Any) -> Any:
        params, x = carry
        layer = params[i]
        return params.at[i].set(layer - RATE * (x.T @ x)), jnp.tanh(x @ layer)

    return lax.fori_loop(0, DEPTH, turn, (params, x))  # the loop


def skips(params: Any, x: Any) -> Any:
    """The same, with a conditional that hands the stack on."""

    def turn(i: Any, carry: Any) -> Any:
        params, x = carry
        layer = params[i]
        params = lax.cond(
            x.sum() > 0,
            lambda params: params.at[i].set(layer - RATE * (x.T @ x)),
            lambda params: params,
            params,
        )
        return params, jnp.tanh(x @ layer)

    return lax.fori_loop(0, DEPTH, turn, (params, x))  # the loop


def mean_loss(params: Any, x: Any) -> Any:
    x, _ = lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, params)  # loop
    return jnp.mean(x**2)


def descends(params: Any, x: Any) -> Any:
    """Takes a whole gradient, for its norm."""
    grads = jax.grad(mean_loss)(params, x)
    return params - RATE * grads / jnp.sqrt(jnp.sum(grads**2))


# ---- the host's memory -----------------------------------------------------


def there_and_back(x: Any) -> Any:
    away = jax.device_put(jnp.sin(x), jax.memory.Space.Host)  # away
    return jnp.tanh(x @ x.T) @ x + jax.device_put(away, jax.memory.Space.Device)


def offloads(name: str) -> Any:
    """The gradient of a stack whose layers' inputs are called "input"."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[name],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def block(x: Any, layer: Any) -> Any:
        x = checkpoint_name(x, "input")
        return jnp.tanh(jnp.tanh(x @ layer) @ layer), None

    def loss(layers: Any, x: Any) -> Any:
        x, _ = lax.scan(jax.checkpoint(block, policy=policy), x, layers)
        return jnp.mean(x**2)

    return jax.jit(jax.grad(loss))


def scales(state: Any) -> Any:
    mu = jax.device_put(state["mu"], jax.memory.Space.Device)
    return {"mu": jnp.float32(2) * mu}  # scaled


# ---- reductions ------------------------------------------------------------


def placed(mesh: Any, tree: Any, specs: Any) -> Any:
    return jax.tree.map(
        lambda x, spec: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
        ),
        tree,
        specs,
    )


def build_dense_before_signs(mesh: Any) -> Any:
    """Averages the gradient before the transformation that is to send its signs."""
    tx = sfpo.compressed_mean(sfpo.compression.sign(), axis_name="data")

    def step(params: Any, opt_state: Any, x: Any) -> Any:
        grads = lax.pmean(jax.grad(mean_loss)(params, x), "data")  # dense
        updates, opt_state = tx.update(grads, opt_state, params)
        return params - RATE * updates, opt_state

    with jax.set_mesh(mesh):
        opt_state = jax.eval_shape(tx.init, STACK)
    whole, split = PartitionSpec(), PartitionSpec("data")
    specs = sfpo.state_specs(opt_state, "data")
    run = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(whole, specs, split),
        out_specs=(whole, specs),
        check_vma=False,
    )
    args = zip((STACK, opt_state, X), (whole, specs, split), strict=True)
    args = [placed(mesh, *arg) for arg in args]
    return jax.jit(run, donate_argnums=(0, 1)), *args


def build_signs_without_axis(mesh: Any) -> Any:
    """Leaves it to the compiler to reduce, which does so before anything is packed."""
    tx = sfpo.compressed_mean(sfpo.compression.sign(), axis_name=None)

    def step(params: Any, opt_state: Any, x: Any) -> Any:
        grads = jax.grad(mean_loss)(params, x)
        updates, opt_state = tx.update(grads, opt_state, params)
        return params - RATE * updates, opt_state

    opt_state = jax.eval_shape(tx.init, STACK)
    whole, split = PartitionSpec(), PartitionSpec("data")
    specs = jax.tree.map(lambda _: whole, opt_state)
    args = zip((STACK, opt_state, X), (whole, specs, split), strict=True)
    args = [placed(mesh, *arg) for arg in args]
    return jax.jit(step, donate_argnums=(0, 1)), *args


def build_planted(mesh: Any) -> Any:
    """Momentum in bfloat16 as it is often written, with four faults."""

    def step(params: Any, mu: Any, x: Any) -> Any:
        grads = lax.pmean(jax.grad(mean_loss)(params, x), "data")
        norm = jnp.sqrt(jnp.sum(grads**2))
        mu = jnp.float32(0.9) * mu.astype(jnp.float32) + grads / norm
        return params - RATE * mu, mu

    whole, split = PartitionSpec(), PartitionSpec("data")
    run = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(whole, whole, split),
        out_specs=(whole, whole),
        check_vma=False,
    )
    mu = jax.ShapeDtypeStruct(STACK.shape, jnp.bfloat16)
    args = zip((STACK, mu, X), (whole, whole, split), strict=True)
    return jax.jit(run, donate_argnums=(0, 1)), *(placed(mesh, *arg) for arg in args)
