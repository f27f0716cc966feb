"""The layered models are the same functions as the models they come from."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.models.gpt import GPT, GPTConfig
from experiments.models.layered import Layered, layered_gpt, layered_vit
from experiments.models.vit import ViT, ViTConfig

SIZES: Any = {"width": 16, "heads": 2, "mlp_width": 32, "depth": 3}
KEY = jax.random.key(0)


def run(layered: Layered, batch: Any) -> Any:
    params = layered.init(KEY)
    x = layered.model.embed(params["outer"], batch, None)
    assert callable(layered.model.block)
    for i in range(3):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        x = layered.model.block(layer, x, None)
    return layered.model.loss(params["outer"], x, batch, None)


def test_the_gpt() -> None:
    config = GPTConfig(vocabulary=11, length=5, **SIZES)
    ids = jnp.arange(12, dtype=jnp.int32).reshape(2, 6) % 11
    logits = GPT(config, rngs=nnx.Rngs(KEY))(ids[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids[:, 1:])
    loss, aux = run(layered_gpt(config), ids)
    np.testing.assert_allclose(loss, losses.mean(), rtol=1e-6)
    right = jnp.argmax(logits, axis=-1) == ids[:, 1:]
    np.testing.assert_allclose(aux["accuracy"], np.mean(right))
    found = layered_gpt(config)
    np.testing.assert_allclose(found.predict(found.init(KEY), ids), logits, atol=1e-5)


def test_weights_in_half_precision() -> None:
    config = GPTConfig(
        vocabulary=11, length=5, dtype="bfloat16", param_dtype="bfloat16", **SIZES
    )
    ids = jnp.arange(12, dtype=jnp.int32).reshape(2, 6) % 11
    found = layered_gpt(config)
    params = found.init(KEY)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
    exact = layered_gpt(GPTConfig(vocabulary=11, length=5, **SIZES))
    jax.tree.map(
        lambda half, x: np.testing.assert_array_equal(half, x.astype(jnp.bfloat16)),
        params,
        exact.init(KEY),
    )
    logits = found.predict(params, ids)
    assert logits.dtype == jnp.float32
    wanted = exact.predict(exact.init(KEY), ids)
    np.testing.assert_allclose(logits, wanted, atol=0.1)


def test_the_vit() -> None:
    config = ViTConfig(image_size=8, patch_size=4, channels=1, classes=3, **SIZES)
    images = jax.random.normal(jax.random.key(1), (4, 8, 8, 1))
    labels = jnp.array([0, 1, 2, 1])
    logits = ViT(config, rngs=nnx.Rngs(KEY))(images)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    batch = {"image": images, "label": labels}
    loss, _ = run(layered_vit(config), batch)
    np.testing.assert_allclose(loss, losses.mean(), rtol=1e-6)
    found = layered_vit(config, lambda batch: (batch["image"], batch["label"]))
    np.testing.assert_allclose(found.predict(found.init(KEY), batch), logits, atol=1e-5)
