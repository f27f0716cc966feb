"""BERT: its published size, padding that nobody reads, and its layered form."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from experiments.models.bert import BERT, BERTConfig
from experiments.models.layered import apply_layers, layered_bert
from sfpo_jax.training import PADDING

TINY = BERTConfig(
    vocabulary=13, length=6, width=16, depth=2, heads=2, mlp_width=32, classes=3
)
KEY = jax.random.key(0)
CALL = nnx.jit(BERT.__call__)


def batch() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, 13, (3, 6)), jnp.int32)
    labels = jnp.full((3, 6), PADDING, jnp.int32).at[:, 2].set(ids[:, 2])
    return {
        "ids": ids,
        "types": jnp.asarray(rng.integers(0, 2, (3, 6)), jnp.int32),
        "is_live": jnp.arange(6)[None] < jnp.array([6, 4, 3])[:, None],
        "labels": labels.at[0, 5].set(ids[0, 5]),
        "class": jnp.array([0, 2, 1]),
    }


def call(model: BERT, batch: dict[str, Any], **how: Any) -> Any:
    return CALL(model, batch["ids"], batch["types"], batch["is_live"], **how)


def test_bert_large_has_its_published_size() -> None:
    shapes = nnx.eval_shape(lambda: nnx.state(BERT(BERTConfig(), rngs=nnx.Rngs(0))))
    # BertForPreTraining, bert-large-uncased, of Hugging Face's transformers.
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == 336_226_108
    heads = ("words", "norm_words", "word_bias", "head")
    rest = [shapes[name] for name in shapes if name not in heads]
    # BertModel, its pooler included.
    assert sum(leaf.size for leaf in jax.tree.leaves(rest)) == 335_141_888
    # BertForSequenceClassification.
    head = jax.tree.leaves(shapes["head"])
    assert sum(leaf.size for leaf in (*jax.tree.leaves(rest), *head)) == 335_143_938


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_float32_whatever_the_arithmetic(dtype: str) -> None:
    config = dataclasses.replace(TINY, dtype=dtype)
    words, classes = call(BERT(config, rngs=nnx.Rngs(0)), batch())
    assert (words.shape, words.dtype) == ((3, 6, 13), jnp.float32)
    assert (classes.shape, classes.dtype) == ((3, 3), jnp.float32)
    assert bool(jnp.isfinite(words).all() and jnp.isfinite(classes).all())


def test_padding_is_read_by_nobody_and_all_else_is() -> None:
    model, data = BERT(TINY, rngs=nnx.Rngs(0)), batch()
    words, classes = call(model, data)
    # Example 1 has four live tokens.
    other = data | {"ids": data["ids"].at[1, 5].add(1) % 13}
    found, found_classes = call(model, other)
    np.testing.assert_array_equal(found_classes, classes)
    np.testing.assert_array_equal(found[1, :5], words[1, :5])
    other = data | {"ids": data["ids"].at[1, 3].add(1) % 13}
    assert float(jnp.abs(call(model, other)[1][1] - classes[1]).max()) > 1e-6
    other = data | {"types": 1 - data["types"]}
    assert float(jnp.abs(call(model, other)[0] - words).max()) > 1e-4


def test_dropout_acts_with_a_key_only() -> None:
    model = BERT(dataclasses.replace(TINY, dropout=0.5), rngs=nnx.Rngs(0))
    plain, dropped = call(model, batch()), call(model, batch(), key=KEY)
    np.testing.assert_array_equal(plain[0], call(model, batch())[0])
    assert float(jnp.abs(plain[0] - dropped[0]).max()) > 1e-3


def test_longer_sequences_are_refused() -> None:
    ids = jnp.zeros((1, 7), jnp.int32)
    with pytest.raises(ValueError, match=r"at most 6 tokens a sequence, got 7: raise"):
        BERT(TINY, rngs=nnx.Rngs(0))(ids, ids, ids == 0)


def test_the_layered_model_is_the_same_function() -> None:
    layered, data = layered_bert(TINY), batch()
    words, classes = call(BERT(TINY, rngs=nnx.Rngs(KEY)), data)
    params = layered.init(KEY)
    found, found_classes = jax.jit(layered.predict)(params, data)
    np.testing.assert_allclose(found, words, atol=1e-5)
    np.testing.assert_allclose(found_classes, classes, atol=1e-5)

    def run(params: Any) -> Any:
        model: Any = layered.model
        stream = apply_layers(model, params, data)
        return model.loss(params["outer"], stream, data, None)

    loss, aux = jax.jit(run)(params)
    is_hidden = np.asarray(data["labels"]) != PADDING
    cost = optax.softmax_cross_entropy_with_integer_labels
    wanted = cost(words[is_hidden], data["ids"][is_hidden]).mean()
    wanted += cost(classes, data["class"]).mean()
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    right = jnp.argmax(words, axis=-1) == data["labels"]
    np.testing.assert_allclose(aux["accuracy"], right[is_hidden].mean(), rtol=1e-6)
