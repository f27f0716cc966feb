"""Training steps of large models, as functions of devices that need not exist.

GPT models are trained in
bfloat16 by Adam with an int8 first and a factored second moment, weights rounded
stochastically, gradients clipped by the exact global norm, unless a name says
otherwise; embeddings are tied and trained, attention is XLA's.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh

import sfpo_jax as sfpo
from experiments.models.gpt import GPTConfig
from experiments.models.layered import Layered, layered_gpt
from experiments.models.vit import ViT, ViTConfig

# Enough that a linear layer, the costliest, is never computed twice; attention is.
SAVED = ("qkv", "middle", "hidden")
ONE: Mapping[str, int] = {"data": 1}

Build = Callable[[Mesh], tuple[Any, ...]]


class Program(NamedTuple):
    """One row of the table.

    Attributes:
      name: for `--programs`.
      title: what it is.
      build: mesh -> (step, state, batch), shapes.
      mesh_shape: axes and sizes.
      published: GB that SFPO's publication gives, None for no figure.
      bound: GB that it must not exceed, None for what is only compared.
      reference: the program whose FLOPs its own are compared with.
    """

    name: str
    title: str
    build: Build
    mesh_shape: Mapping[str, int] = ONE
    published: float | None = None
    bound: float | None = None
    reference: str | None = None


def gpt(depth: int = 40, width: int = 5120) -> GPTConfig:
    """GPT-3 13B (Brown et al. 2020, table 2.1), or another depth and width."""
    return GPTConfig(
        vocabulary=50304,
        length=2048,
        width=width,
        depth=depth,
        heads=width // 128,
        mlp_width=4 * width,
        is_tied=True,
        attention="xla",
        dtype="bfloat16",
    )


def adam(**changes: Any) -> optax.GradientTransformation:
    """The optimizer of the GPT rows."""
    options = {"mu_dtype": "int8", "nu_dtype": "factored", "weight_decay": 0.1}
    return sfpo.adamw8bit(1e-4, **{**options, **changes})


def onebit_between_hosts() -> optax.GradientTransformation:
    """1-bit Adam between hosts, all its state in bytes."""
    return sfpo.onebit_adam(
        1e-4,
        weight_decay=0.1,
        warmup_steps=1000,
        axis_name="node",
        mu_dtype="int8",
        nu_dtype="int8",
        error_dtype="int8",
    )


def layered(
    make: Callable[[], Layered],
    batch: Any,
    tx: Callable[[], optax.GradientTransformation],
    dtype: Any = jnp.bfloat16,
    **options: Any,
) -> Build:
    """The layered step of a model."""

    def build(mesh: Mesh) -> tuple[Any, ...]:
        model = make()
        step = sfpo.make_layered_train_step(model.model, tx(), mesh, **options)
        return step, step.init_shapes(params_of(model, dtype)), batch

    return build


def layered_gpt_step(
    config: GPTConfig,
    windows: int,
    tx: Callable[[], optax.GradientTransformation] = adam,
    **changes: Any,
) -> Build:
    """The layered step of a GPT on `windows` of 2,048 tokens, over all devices."""
    options = {"max_norm": 1.0, "rounding": "stochastic", **changes}
    make = functools.partial(layered_gpt, config)
    return layered(make, windows_of(config, windows), tx, **options)


def scanned(
    make: Callable[[], Layered],
    batch: Any,
    tx: Callable[[], optax.GradientTransformation],
    dtype: Any = jnp.float32,
    recompute: bool = False,
) -> Build:
    """What is written today: `value_and_grad` over a scan of layers, then Optax."""

    def build(mesh: Mesh) -> tuple[Any, ...]:
        made = make()
        model = made.model
        assert callable(model.block)
        block: Any = jax.checkpoint(model.block) if recompute else model.block

        def loss(params: Any, batch: Any) -> Any:
            x = model.embed(params["outer"], batch, None)

            def body(x: Any, layer: Any) -> Any:
                return block(layer, x, None), None

            x, _ = lax.scan(body, x, params["layers"])
            return model.loss(params["outer"], x, batch, None)

        step = sfpo.make_train_step(loss, tx(), mesh)
        return step, step.init_shapes(params_of(made, dtype)), batch

    return build


def unrolled_vit(config: ViTConfig, batch: Any) -> Build:
    """The plain step of the ViT as it is written, layer after layer."""

    def build(mesh: Mesh) -> tuple[Any, ...]:
        model = nnx.eval_shape(lambda: ViT(config, rngs=nnx.Rngs(0)))
        graph, params = nnx.split(model)

        def loss(params: Any, batch: Any) -> jax.Array:
            logits = nnx.merge(graph, params)(batch["image"])
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits, batch["label"]
            )
            return losses.mean()

        step = sfpo.make_train_step(loss, optax.adamw(1e-4), mesh)
        return step, step.init_shapes(params), batch

    return build


def images_of(config: ViTConfig, count: int) -> Any:
    """A batch of images and labels, shapes."""
    size = (count, config.image_size, config.image_size, config.channels)
    return {
        "image": jax.ShapeDtypeStruct(size, jnp.float32),
        "label": jax.ShapeDtypeStruct((count,), jnp.int32),
    }


def params_of(model: Layered, dtype: Any) -> Any:
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)


def windows_of(config: GPTConfig, count: int) -> Any:
    return jax.ShapeDtypeStruct((count, config.length + 1), jnp.int32)
