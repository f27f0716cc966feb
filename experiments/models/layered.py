"""The transformers as layered models: equal blocks in one stack.

`make_layered_train_step` takes what these return; parameters are the same numbers as
those of `ViT`, `GPT` and `BERT` by `split_layers`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax import lax

from experiments.models.bert import BERT, BERTConfig
from experiments.models.gpt import GPT, GPTConfig
from experiments.models.operator import operator_specs
from experiments.models.transformer import cast_weights
from experiments.models.vit import ViT, ViTConfig
from experiments.scores import mean_score, pretraining_score
from sfpo_jax import LayeredModel, Operator, stack_layers

# A batch -> what the model reads of it, and the labels.
Unpack = Callable[[Any], tuple[Any, Any]]


class Layered(NamedTuple):
    """A layered model and its parameters.

    Attributes:
      model: for `make_layered_train_step`.
      init: key -> {"outer": ..., "layers": ...}, in the dtype of the weights.
      predict: (parameters, batch) -> float32 logits, without dropout.
      specs: PartitionSpecs over the operator's axis of {"outer": ..., "layers": ...},
        those of layers without the axis of the stack.
    """

    model: LayeredModel
    init: Callable[[jax.Array], Any]
    predict: Callable[[Any, Any], Any]
    specs: Any


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
    embed: Callable[..., Any],
    head: Callable[..., Any],
    unpack: Unpack,
    operator: Operator | None,
    score: Callable[..., Any] = mean_score,
) -> Layered:
    """From functions of a model without its blocks: before them, and after."""
    graphs: list[Any] = []

    def whole(key: jax.Array) -> Any:
        model = create(key)
        if operator is not None:
            model.set_attributes(operator=operator)
        return model

    def init(key: jax.Array) -> Any:
        found, params = split_layers(whole(key))
        graphs[:] = found
        return params

    jax.eval_shape(init, jax.random.key(0))
    graph, outer_graph = graphs

    def embed_batch(outer: Any, batch: Any, key: jax.Array | None) -> Any:
        return embed(nnx.merge(outer_graph, outer), unpack(batch)[0], key)

    def logits(outer: Any, x: Any) -> Any:
        return head(nnx.merge(outer_graph, outer), x)

    model = LayeredModel(
        embed=embed_batch,
        block=lambda layer, x, key: nnx.merge(graph, layer)(x, key),
        loss=lambda outer, x, batch, key: score(logits(outer, x), unpack(batch)[1]),
    )
    return Layered(
        model,
        init,
        lambda params, batch: logits(
            params["outer"], apply_layers(model, params, batch)
        ),
        _layer_specs(nnx.eval_shape(lambda: whole(jax.random.key(0))), operator),
    )


def _layer_specs(model: Any, operator: Operator | None) -> Any:
    axis = (operator or Operator()).axis_name
    layers = operator_specs(model.blocks[0], axis)
    model.blocks = nnx.List([])
    return {"outer": operator_specs(model, axis), "layers": layers}


def layered_gpt(config: GPTConfig, operator: Operator | None = None) -> Layered:
    """A GPT whose batches are windows int32[B, length + 1].

    Args:
      config: the sizes.
      operator: how large products are shared. The loss of a rank is then its part of
        the tokens' sum, so weighted that the mean over ranks is that over tokens.
    """
    return _layered(
        lambda key: cast_weights(GPT(config, rngs=nnx.Rngs(key)), config.param_dtype),
        GPT.embed,
        GPT.predict,
        lambda windows: (windows[:, :-1], windows[:, 1:]),
        operator,
        functools.partial(mean_score, operator=operator),
    )


def layered_bert(config: BERTConfig, operator: Operator | None = None) -> Layered:
    """A BERT in pretraining, or as a classifier.

    Args:
      config: the sizes and the task.
      operator: as in `layered_gpt`; a classifier's ranks each have the whole loss.

    Batches are {"ids", "types": int32[B, L], "is_live": bool[B, L], "class": int32[B]},
    and in pretraining "labels": int32[B, L], PADDING where the word was not hidden.
    """
    is_pretraining = config.task == "pretrain"
    score = functools.partial(pretraining_score, operator=operator)

    def embed(bert: BERT, batch: Any, key: jax.Array | None) -> Any:
        return bert.embed(batch["ids"], batch["types"], batch["is_live"], key)

    return _layered(
        lambda key: cast_weights(BERT(config, rngs=nnx.Rngs(key)), config.param_dtype),
        embed,
        BERT.predict,
        lambda batch: (batch, bert_labels(config, batch)),
        operator,
        score if is_pretraining else mean_score,
    )


def bert_labels(config: BERTConfig, batch: Any) -> Any:
    """What the logits of a BERT are scored against, of a batch of `layered_bert`."""
    is_pretraining = config.task == "pretrain"
    return (batch["labels"], batch["class"]) if is_pretraining else batch["class"]


def _from_dict(batch: Any) -> tuple[jax.Array, jax.Array]:
    return batch["image"], batch["label"]


def layered_vit(
    config: ViTConfig,
    unpack: Unpack = _from_dict,
    operator: Operator | None = None,
) -> Layered:
    """A ViT.

    Args:
      config: the sizes.
      unpack: batch -> (float images [B, H, W, C], labels int32[B]); by default of
        batches {"image": ..., "label": ...}.
      operator: how large products are shared; every rank then has the whole loss.
    """
    return _layered(
        lambda key: ViT(config, rngs=nnx.Rngs(key)),
        ViT.embed,
        ViT.classify,
        unpack,
        operator,
    )
