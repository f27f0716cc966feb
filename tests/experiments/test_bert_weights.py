"""BERT's weights in the Hugging Face layout: a peer's outputs, and what misfits."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from experiments.bert_task import bert_shapes
from experiments.models.bert import BERT, BERTConfig
from experiments.models.bert_weights import load_bert, save_bert

# transformers 5.24.0's BertForPreTraining of normal random weights: these, its
# inputs, and its outputs, computed by PyTorch 2.13.0.
PEER = Path(__file__).with_name("bert_peer.safetensors")
CONFIG = BERTConfig(vocabulary=29, length=8, width=16, depth=2, heads=2, mlp_width=32)


def peer() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(weights, inputs and outputs)."""
    held = load_file(PEER)
    given = {k.removeprefix("peer."): v for k, v in held.items() if "peer." in k}
    return {k: v for k, v in held.items() if "peer." not in k}, given


def write(folder: Path, weights: dict[str, np.ndarray]) -> Path:
    save_file(weights, folder / "model.safetensors")
    return folder


def begun(config: BERTConfig, folder: Path) -> BERT:
    graph, params = nnx.split(BERT(config, rngs=nnx.Rngs(0)))
    return nnx.merge(graph, load_bert(folder, config, bert_shapes(config)).into(params))


def test_outputs_are_those_of_the_peer(tmp_path: Path) -> None:
    weights, given = peer()
    old = {
        k.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): v
        for k, v in weights.items()
    }
    bert = begun(CONFIG, write(tmp_path, old))
    inputs = (jnp.asarray(given[name]) for name in ("ids", "types", "is_live"))
    words, classes = nnx.jit(BERT.__call__)(bert, *inputs)
    live = given["is_live"]
    np.testing.assert_allclose(words[live], given["words"][live], atol=1e-4)
    np.testing.assert_allclose(classes, given["classes"], atol=1e-4)
    assert np.abs(given["words"]).max() > 1

    # What is written has the names and shapes of what was read.
    save_bert(tmp_path / "again.safetensors", CONFIG, nnx.state(bert))
    again = load_file(tmp_path / "again.safetensors")
    assert set(again) == set(weights)
    for name, array in weights.items():
        np.testing.assert_array_equal(again[name], array, err_msg=name)


def test_a_classifier_begins_with_a_new_head_and_may_be_shorter(tmp_path: Path) -> None:
    weights, _ = peer()
    config = dataclasses.replace(CONFIG, task="classify", length=5, classes=3)
    plain = {k.removeprefix("bert."): v for k, v in weights.items()}
    loaded = load_bert(write(tmp_path, plain), config, bert_shapes(config))
    assert loaded.fresh == ("classifier.bias", "classifier.weight")
    params = nnx.state(BERT(config, rngs=nnx.Rngs(0)))
    found = nnx.to_pure_dict(loaded.into(params))
    head = nnx.to_pure_dict(params)["head"]
    jax.tree.map(np.testing.assert_array_equal, found["head"], head)
    positions = weights["bert.embeddings.position_embeddings.weight"]
    np.testing.assert_array_equal(found["positions"], positions[:5])


def missing(weights: dict[str, np.ndarray]) -> None:
    del weights["bert.encoder.layer.1.attention.self.key.bias"]


def narrow(weights: dict[str, np.ndarray]) -> None:
    for name in ("query", "key"):
        name = f"bert.encoder.layer.0.attention.self.{name}.weight"
        weights[name] = weights[name][:8]


@pytest.mark.parametrize(
    ("change", "sizes", "words"),
    [
        (missing, {}, ["layer.1.attention.self.key.bias is missing"]),
        (
            narrow,
            {},
            [
                "layer.0.attention.self.key.weight must be [16, 16], got [8, 16]",
                "layer.0.attention.self.query.weight must be",
            ],
        ),
        (
            None,
            {"vocabulary": 31},
            ["word_embeddings.weight must be [31, 16], got"],
        ),
        (None, {"length": 9}, ["position_embeddings.weight must be [9, 16], got [8,"]),
        (None, {"depth": 1}, ["encoder.layer.1", "of no layer", "and 12 more"]),
        (None, {"heads": 4}, ["num_attention_heads 2", "not 4", "model.heads"]),
    ],
)
def test_what_does_not_fit_is_named(
    tmp_path: Path, change: Any, sizes: dict[str, int], words: list[str]
) -> None:
    weights, _ = peer()
    if change:
        change(weights)
    write(tmp_path, weights)
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 2}))
    config = dataclasses.replace(CONFIG, **sizes)
    with pytest.raises(ValueError) as error:
        load_bert(tmp_path, config, bert_shapes(config))
    assert "`pretrained.folder` must fit the section model" in str(error.value)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`pretrained.folder` must hold model\.safe"):
        load_bert(tmp_path, CONFIG, bert_shapes(CONFIG))
    (tmp_path / "model.safetensors").write_bytes(b"no weights at all")
    with pytest.raises(ValueError, match=r"`pretrained.folder` cannot be read, got "):
        load_bert(tmp_path, CONFIG, bert_shapes(CONFIG))
