"""Pretraining a BERT, or classifying texts with it: parameters, loss and test."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from experiments.models.bert import BERT, BERTConfig
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
from sfpo_jax import Operator


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

    def logits(params: Any, batch: Any, key: jax.Array | None) -> Any:
        bert = nnx.merge(graph, params)
        return bert(batch["ids"], batch["types"], batch["is_live"], key=key)

    def class_score(logits: Any, labels: Any, operator: Operator | None) -> Any:
        del operator  # each of its ranks has the logits of whole texts
        return mean_score(logits, labels)

    task = make_scored_task(
        lambda key: nnx.split(create(key))[1],
        logits,
        lambda batch: bert_labels(model, batch),
        layered=layered_bert(model, operator),
        has_key=model.dropout > 0,
        specs=None if operator is None else operator_specs(shapes),
        operator=operator,
        score=pretraining_score if is_pretraining else class_score,
        total=pretraining_total if is_pretraining else total_score,
    )
    if begin is None or task.layered is None:
        return task

    def init(seed: int) -> Any:
        return begin(task.init(seed))

    def layered_init(seed: int) -> Any:
        return split_layers(nnx.merge(graph, init(seed)))[1]

    return task._replace(init=init, layered=task.layered._replace(init=layered_init))
