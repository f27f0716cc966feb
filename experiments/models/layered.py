"""The transformers as layered models: equal blocks in one stack.

`make_layered_train_step` takes what these return; parameters are the same numbers as
those of `ViT` and `GPT` by `split_layers`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import lax

from experiments.models.gpt import GPT, GPTConfig
from experiments.models.transformer import cast_weights
from experiments.models.vit import ViT, ViTConfig
from experiments.scores import mean_score
from sfpo_jax import LayeredModel, stack_layers

# A batch -> what the model reads of it, and the labels.
Unpack = Callable[[Any], tuple[jax.Array, jax.Array]]


class Layered(NamedTuple):
    """A layered model and its parameters.

    Attributes:
      model: for `make_layered_train_step`.
      init: key -> {"outer": ..., "layers": ...}, in the dtype of the weights.
      predict: (parameters, batch) -> float32 logits, without dropout.
    """

    model: LayeredModel
    init: Callable[[jax.Array], Any]
    predict: Callable[[Any, Any], jax.Array]


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


def apply_layers(model: LayeredModel, params: Any, batch: Any) -> Any:
    """x after the last layer, in one program for all layers; no dropout, no gradient.

    Args:
      model: the model's functions.
      params: {"outer": ..., "layers": ...}.
      batch: what `model.embed` reads.
    """
    x = model.embed(params["outer"], batch, None)
    stacks = model.by_name(params["layers"])
    for name, block in model.blocks().items():

        def turn(x: Any, layer: Any, block: Callable[..., Any] = block) -> Any:
            return block(layer, x, None), None

        x, _ = lax.scan(turn, x, stacks[name])
    return x


def _layered(
    create: Callable[[jax.Array], Any],
    embed: Callable[..., jax.Array],
    head: Callable[..., jax.Array],
    unpack: Unpack,
) -> Layered:
    """From functions of a model without its blocks: before them, and after."""
    graphs: list[Any] = []

    def init(key: jax.Array) -> Any:
        found, params = split_layers(create(key))
        graphs[:] = found
        return params

    jax.eval_shape(init, jax.random.key(0))
    graph, outer_graph = graphs

    def embed_batch(outer: Any, batch: Any, key: jax.Array | None) -> jax.Array:
        return embed(nnx.merge(outer_graph, outer), unpack(batch)[0], key)

    def logits(outer: Any, x: jax.Array) -> jax.Array:
        return head(nnx.merge(outer_graph, outer), x)

    model = LayeredModel(
        embed=embed_batch,
        block=lambda layer, x, key: nnx.merge(graph, layer)(x, key),
        loss=lambda outer, x, batch, key: mean_score(
            logits(outer, x), unpack(batch)[1]
        ),
    )
    return Layered(
        model,
        init,
        lambda params, batch: logits(
            params["outer"], apply_layers(model, params, batch)
        ),
    )


def layered_gpt(config: GPTConfig) -> Layered:
    """A GPT whose batches are windows int32[B, length + 1]."""
    return _layered(
        lambda key: cast_weights(GPT(config, rngs=nnx.Rngs(key)), config.param_dtype),
        GPT.embed,
        GPT.predict,
        lambda windows: (windows[:, :-1], windows[:, 1:]),
    )


def _from_dict(batch: Any) -> tuple[jax.Array, jax.Array]:
    return batch["image"], batch["label"]


def layered_vit(config: ViTConfig, unpack: Unpack = _from_dict) -> Layered:
    """A ViT.

    Args:
      config: the sizes.
      unpack: batch -> (float images [B, H, W, C], labels int32[B]); by default of
        batches {"image": ..., "label": ...}.
    """
    return _layered(
        lambda key: ViT(config, rngs=nnx.Rngs(key)), ViT.embed, ViT.classify, unpack
    )
