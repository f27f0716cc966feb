"""The training steps whose memory is traded for arithmetic, and what they are beside.

Each is a function of a mesh of devices that need not exist. All are float32 AdamW on
one device, but for the GPT, which is trained in bfloat16 as in `memory_programs`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

import sfpo_jax as sfpo
from experiments.bench.memory_programs import (
    Build,
    adam,
    gpt,
    images_of,
    layered,
    layered_gpt_step,
)
from experiments.models.layered import layered_vit
from experiments.models.resnet import Recompute, ResNetConfig, make_classifier
from experiments.models.vit import ViT, ViTConfig

_RESNET_BATCH, _VIT_BATCH = 256, 98
_VIT = dataclasses.replace(ViTConfig(), attention="xla")


class Case(NamedTuple):
    """One program.

    Attributes:
      name: for `--programs`.
      title: what it is.
      build: mesh -> (step, state, batch), a step that keeps all.
      blocks: the same with `jax.checkpoint` around each block, the usual way.
      bounds: (share of memory to save, at most so many extra FLOPs), promises.
      whole: one checkpoint around all that keeps what blocks return; None to leave out.
    """

    name: str
    title: str
    build: Build
    blocks: Build
    bounds: tuple[tuple[float, float], ...] = ()
    whole: Build | None = None


def resnet(recompute: Recompute) -> Build:
    """ResNet-50 on images of 224 pixels, batch statistics in its state."""

    def build(mesh: Mesh) -> tuple[Any, ...]:
        net = make_classifier(ResNetConfig(), recompute=recompute)
        step = sfpo.make_train_step(
            net.loss_fn, optax.adamw(1e-3), mesh, has_model_state=True
        )
        params, stats = jax.eval_shape(net.init, jax.random.key(0))
        batch = images_of(_VIT, _RESNET_BATCH)
        return step, step.init_shapes(params, model_state=stats), batch

    return build


def whole_resnet(mesh: Mesh) -> tuple[Any, ...]:
    """The same under a single checkpoint with a policy."""
    net = make_classifier(ResNetConfig())
    policy = jax.checkpoint_policies.save_only_these_names("block")

    def loss_fn(params: Any, batch: Any, *, model_state: Any) -> Any:
        def run(params: Any, batch: Any, model_state: Any) -> Any:
            return net.loss_fn(params, batch, model_state=model_state)

        return jax.checkpoint(run, policy=policy)(params, batch, model_state)

    step = sfpo.make_train_step(loss_fn, optax.adamw(1e-3), mesh, has_model_state=True)
    params, stats = jax.eval_shape(net.init, jax.random.key(0))
    shapes = step.init_shapes(params, model_state=stats)
    return step, shapes, images_of(_VIT, _RESNET_BATCH)


def vit(recompute: bool) -> Build:
    """ViT-L/16 by the plain step, its layers one after another."""

    def build(mesh: Mesh) -> tuple[Any, ...]:
        model = nnx.eval_shape(lambda: ViT(_VIT, recompute=recompute, rngs=nnx.Rngs(0)))
        graph, params = nnx.split(model)

        def loss(params: Any, batch: Any) -> jax.Array:
            logits = nnx.merge(graph, params)(batch["image"])
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits, batch["label"]
            )
            return losses.mean()

        step = sfpo.make_train_step(loss, optax.adamw(1e-4), mesh)
        return step, step.init_shapes(params), images_of(_VIT, _VIT_BATCH)

    return build


def layered_vit_step(recompute: str) -> Build:
    """ViT-L/16 by the layered step."""
    return layered(
        functools.partial(layered_vit, _VIT),
        images_of(_VIT, _VIT_BATCH),
        lambda: sfpo.adamw8bit(1e-4, weight_decay=0.1),
        jnp.float32,
        recompute=recompute,
    )


def layered_gpt_blocks(recompute: str) -> Build:
    """12 blocks as wide as those of GPT-3 2.7B, on 8 windows of 2,048 tokens."""
    config = dataclasses.replace(gpt(depth=12, width=2560), heads=32)
    return layered_gpt_step(config, 8, adam, max_norm=None, recompute=recompute)


def cases() -> list[Case]:
    """All programs."""
    size = "float32, 224 px"

    def case(name: str, title: str, make: Callable[[Any], Build], ways: Any) -> Case:
        keeps, checkpoints = ways
        return Case(name, title, make(keeps), make(checkpoints))

    ways = "none", "full"
    return [
        case(
            "gpt",
            "12 GPT blocks of width 2,560, layered step",
            layered_gpt_blocks,
            ways,
        ),
        case("resnet50", f"ResNet-50, {size}, batch 256", resnet, ways)._replace(
            bounds=((0.3, 0.10), (0.7, 0.35)), whole=whole_resnet
        ),
        case(
            "vit_l_layered",
            f"ViT-L/16, {size}, batch 98, layered step",
            layered_vit_step,
            ways,
        ),
        case("vit_l", f"ViT-L/16, {size}, batch 98, plain step", vit, (False, True)),
    ]
