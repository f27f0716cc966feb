"""Pretraining a BERT, or classifying texts with it: parameters, loss and test."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from experiments.bert_sections import Lora
from experiments.models.bert import BERT, BERTConfig
from experiments.models.bert_weights import FILE, save_bert
from experiments.models.layered import bert_labels, layered_bert, split_layers
from experiments.models.operator import operator_specs
from experiments.models.transformer import cast_weights
from experiments.scores import (
    mean_score,
    pretraining_score,
    pretraining_total,
    total_score,
)
from experiments.task import Task, make_scored_task
from sfpo_jax import Operator, lora

ADAPTERS = "adapters.safetensors"


def make_bert_task(
    model: BERTConfig,
    *,
    recompute: bool = False,
    operator: Operator | None = None,
    begin: Callable[[Any], Any] | None = None,
) -> Task:
    """The task whose batches are those of `pretraining_batches`, or of a classifier.

    The test of pretraining counts hidden words, that of a classifier texts.

    Args:
      model: sizes of the network and which of the two it does.
      recompute: compute the activations inside each block again in the backward pass.
      operator: how large products are shared over the axis `op`.
      begin: random parameters -> those to begin with; None: as they are.
    """
    is_pretraining = model.task == "pretrain"

    def create(key: jax.Array) -> BERT:
        bert = BERT(model, recompute=recompute, rngs=nnx.Rngs(key))
        if operator is not None:
            bert.set_attributes(operator=operator)
        return cast_weights(bert, model.param_dtype)

    shapes = nnx.eval_shape(lambda: create(jax.random.key(0)))
    graph, _ = nnx.split(shapes)

    def class_score(logits: Any, labels: Any, operator: Operator | None) -> Any:
        del operator  # each of its ranks has the logits of whole texts
        return mean_score(logits, labels)

    task = make_scored_task(
        lambda key: nnx.split(create(key))[1],
        lambda params, batch, key: _logits(nnx.merge(graph, params), batch, key),
        lambda batch: bert_labels(model, batch),
        layered=layered_bert(model, operator),
        has_key=model.dropout > 0,
        specs=None if operator is None else operator_specs(shapes),
        operator=operator,
        score=pretraining_score if is_pretraining else class_score,
        total=pretraining_total if is_pretraining else total_score,
    )
    layered, random = task.layered, task.init
    assert layered is not None

    def init(seed: int) -> Any:
        return begin(random(seed)) if begin else random(seed)

    def layered_init(seed: int) -> Any:
        return split_layers(nnx.merge(graph, init(seed)))[1]

    def save(folder: Path, params: Any, frozen: Any) -> None:
        del frozen
        save_bert(folder / FILE, model, params)

    if begin:
        layered = layered._replace(init=layered_init)
    return task._replace(init=init, layered=layered, save=save)


def make_adapter_task(
    model: BERTConfig,
    adapters: Lora,
    *,
    recompute: bool = False,
    begin: Callable[[Any], Any] | None = None,
) -> Task:
    """A classifier of which adapters and the head are trained, and all else is frozen.

    Its `save` writes the adapters, and the model with them merged into its weights.

    Args:
      model: sizes of the network, a classifier.
      adapters: which layers get some.
      recompute: as in `make_bert_task`.
      begin: as in `make_bert_task`.

    Raises:
      ValueError: patterns that match nothing.
    """
    base = make_bert_task(model, recompute=recompute, begin=begin)
    plain = nnx.eval_shape(lambda: BERT(model, recompute=recompute, rngs=nnx.Rngs(0)))
    plain_graph, _ = nnx.split(plain)

    def adapted(params: Any, seed: int) -> lora.Split:
        bert = nnx.merge(plain_graph, params)
        # Not the key that the other parameters come from.
        key = jax.random.fold_in(jax.random.key(seed), 2)
        rngs = nnx.Rngs(key)
        lora.attach(bert, adapters.rank, match=adapters.match, rngs=rngs)
        return lora.split(bert, also=adapters.also)

    def parts(seed: int) -> lora.Split:
        return adapted(base.init(seed), seed)

    try:
        graph, shapes, _ = nnx.eval_shape(lambda: adapted(base.shapes, 0))
    except ValueError as error:
        raise ValueError(f"`lora.match`: {error}") from None

    def loss_fn(
        params: Any, batch: Any, key: jax.Array | None = None, *, frozen: Any
    ) -> Any:
        bert = nnx.merge(graph, params, frozen)
        return mean_score(_logits(bert, batch, key), bert_labels(model, batch))

    def test(params: Any, batch: Any, *, frozen: Any) -> Any:
        bert = nnx.merge(graph, params, frozen)
        return total_score(_logits(bert, batch, None), bert_labels(model, batch))

    def save(folder: Path, params: Any, frozen: Any) -> None:
        lora.save(folder / ADAPTERS, params)
        bert = nnx.merge(graph, params, frozen, copy=True)
        lora.merge(bert)
        save_bert(folder / FILE, model, nnx.state(bert, nnx.Param))

    return Task(
        init=lambda seed: parts(seed).trained,
        loss_fn=loss_fn,
        test=jax.jit(test),
        has_key=base.has_key,
        shapes=shapes,
        frozen=lambda seed: parts(seed).frozen,
        save=save,
    )


def bert_shapes(model: BERTConfig) -> Any:
    """The parameters of a BERT as ShapeDtypeStructs."""

    def create() -> Any:
        return nnx.state(cast_weights(BERT(model, rngs=nnx.Rngs(0)), model.param_dtype))

    return nnx.eval_shape(create)


def _logits(bert: BERT, batch: Any, key: jax.Array | None) -> Any:
    return bert(batch["ids"], batch["types"], batch["is_live"], key=key)
