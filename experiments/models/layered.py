"""The transformers as layered models: equal blocks in one stack.

`make_layered_train_step` takes what these return; parameters are the same numbers as
those of `ViT` and `GPT` by `split_layers`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from experiments.models.gpt import GPT, GPTConfig
from experiments.models.vit import ViT, ViTConfig
from sfpo_jax import LayeredModel, stack_layers


class Layered(NamedTuple):
    """A layered model and its parameters.

    Attributes:
      model: for `make_layered_train_step`.
      init: key -> {"outer": ..., "layers": ...}, float32.
    """

    model: LayeredModel
    init: Callable[[jax.Array], Any]


def split_layers(model: Any) -> tuple[Any, Any]:
    """(graphs, parameters) of a model with `blocks`: its blocks stacked, the rest.

    The graphs are of one block and of the model without blocks.
    """
    blocks = list(model.blocks)
    graph, _ = nnx.split(blocks[0])
    stack = stack_layers([nnx.state(block) for block in blocks])
    model.blocks = nnx.List([])
    outer_graph, outer = nnx.split(model)
    return (graph, outer_graph), {"outer": outer, "layers": stack}


def _layered(
    create: Callable[[jax.Array], Any],
    embed: Callable[..., jax.Array],
    loss: Callable[..., Any],
) -> Layered:
    """From functions of a model without its blocks."""
    graphs: list[Any] = []

    def init(key: jax.Array) -> Any:
        found, params = split_layers(create(key))
        graphs[:] = found
        return params

    jax.eval_shape(init, jax.random.key(0))
    graph, outer_graph = graphs
    return Layered(
        LayeredModel(
            embed=lambda outer, batch, key: embed(
                nnx.merge(outer_graph, outer), batch, key
            ),
            block=lambda layer, x, key: nnx.merge(graph, layer)(x, key),
            loss=lambda outer, x, batch, key: loss(
                nnx.merge(outer_graph, outer), x, batch
            ),
        ),
        init,
    )


def layered_gpt(config: GPTConfig) -> Layered:
    """A GPT whose batches are windows int32[B, length + 1]."""

    def loss(model: GPT, x_BxLxD: jax.Array, ids_BxM: jax.Array) -> Any:
        logits = model.predict(x_BxLxD)
        targets = ids_BxM[:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        is_correct = jnp.argmax(logits, axis=-1) == targets
        return losses.mean(), {"accuracy": is_correct.astype(jnp.float32).mean()}

    return _layered(
        lambda key: GPT(config, rngs=nnx.Rngs(key)),
        lambda model, ids, key: model.embed(ids[:, :-1], key),
        loss,
    )


def layered_vit(config: ViTConfig) -> Layered:
    """A ViT whose batches are {"image": [B, H, W, C], "label": int32[B]}."""

    def loss(model: ViT, x_BxLxD: jax.Array, batch: Any) -> Any:
        logits, labels = model.classify(x_BxLxD), batch["label"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        is_correct = jnp.argmax(logits, axis=-1) == labels
        return losses.mean(), {"accuracy": is_correct.astype(jnp.float32).mean()}

    return _layered(
        lambda key: ViT(config, rngs=nnx.Rngs(key)),
        lambda model, batch, key: model.embed(batch["image"], key),
        loss,
    )
