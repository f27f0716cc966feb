"""A small network with named values, by itself and as a layered model."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_name

import sfpo_jax as sfpo
from sfpo_jax.memory import Recorder, recomputed
from sfpo_jax.memory._recompute_graph import Graph

WIDTH, ROWS = 64, 1024


def loss_fn(params: Any, x: Any) -> Any:
    """Layers of their own widths; each is a product, a curve, a product."""
    for layer in params:
        x = block(layer, x, None)
    return jnp.mean(x**2), {"mean": jnp.mean(x)}


def block(layer: Any, x: Any, key: Any) -> Any:
    del key
    hidden = checkpoint_name(x @ layer["up"], "hidden")
    # Names inside of what is jitted count like others.
    turn = jax.jit(lambda h: checkpoint_name(jax.nn.gelu(h) @ layer["down"], "turn"))
    return checkpoint_name(x + jnp.sin(turn(hidden)), "block")


def params_of(hidden: Sequence[int], dtype: Any = jnp.float32) -> Any:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, dtype)

    return [{"up": normal(WIDTH, h), "down": normal(h, WIDTH)} for h in hidden]


def two_names(params: Any, x: Any) -> Any:
    """The same network, with two names a layer."""
    for layer in params:
        hidden = checkpoint_name(x @ layer["up"], "hidden")
        turn = jax.nn.gelu(hidden) @ layer["down"]
        x = checkpoint_name(x + jnp.sin(turn), "block")
    return jnp.mean(x**2)


def graph_of(fn: Any, hidden: Sequence[int]) -> Graph:
    recorder = Recorder()
    x = jnp.zeros((ROWS, WIDTH))
    jax.eval_shape(recomputed(fn, recorder), params_of(hidden), x)
    assert recorder.graph is not None
    return recorder.graph


MODEL = sfpo.LayeredModel(
    embed=lambda outer, batch, key: batch @ outer,
    block=block,
    loss=lambda outer, x, batch, key: jnp.mean(x**2),
)
DEPTH = 5


def layered_step(**options: Any) -> Any:
    """(step, state, batch) on one device, shapes."""
    mesh = sfpo.make_mesh(devices=jax.devices()[:1])
    step = sfpo.make_layered_train_step(MODEL, optax.sgd(0.1), mesh, **options)

    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    layers = {"up": shape(DEPTH, WIDTH, 128), "down": shape(DEPTH, 128, WIDTH)}
    params = {"outer": shape(WIDTH, WIDTH), "layers": layers}
    return step, step.init_shapes(params), shape(2 * ROWS, WIDTH)


def plain_build(mesh: Any) -> Any:
    """(step, state, batch) of the same network, its layers one after another."""
    step = sfpo.make_train_step(loss_fn, optax.sgd(0.1), mesh)
    shapes = jax.eval_shape(lambda: params_of([256] * DEPTH))
    x = jax.ShapeDtypeStruct((8192, WIDTH), jnp.float32)
    return step, step.init_shapes(shapes), x
