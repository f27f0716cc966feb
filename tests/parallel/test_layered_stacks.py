"""Several stacks in a layered step: an encoder that feeds a decoder."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import sfpo_jax as sfpo
from tests.parallel.layered_reference import batch_of, single


def encoder_decoder() -> tuple[sfpo.LayeredModel, Any]:
    """Two stacks; the decoder's layers read what the encoder's left."""
    rng = np.random.default_rng(1)
    model = sfpo.LayeredModel(
        embed=lambda outer, batch, key: {
            "memory": batch["x"] @ outer["in"],
            "h": batch["y"] @ outer["in"],
        },
        block={
            "encoder": lambda layer, x, key: {
                **x,
                "memory": x["memory"] + jnp.tanh(x["memory"] @ layer["w"]),
            },
            "decoder": lambda layer, x, key: {
                **x,
                "h": x["h"] + jnp.tanh(x["h"] @ layer["w"] + x["memory"] @ layer["u"]),
            },
        },
        loss=lambda outer, x, batch, key: jnp.mean((x["h"] - 1) ** 2),
    )
    layers = {
        "encoder": {"w": rng.normal(size=(2, 6, 6))},
        "decoder": {"w": rng.normal(size=(3, 6, 6)), "u": rng.normal(size=(3, 6, 6))},
    }
    return model, {"outer": {"in": rng.normal(size=(4, 6))}, "layers": layers}


def test_an_encoder_feeds_a_decoder() -> None:
    model, params = encoder_decoder()
    with jax.enable_x64(True):
        step = sfpo.make_layered_train_step(model, optax.sgd(0.1), sfpo.make_mesh())
        state, metrics = step(step.init(params), batch_of(0))

        def whole(params: Any) -> jax.Array:
            x = model.embed(params["outer"], batch_of(0), None)
            for name, block in model.blocks().items():
                stack = params["layers"][name]
                for i in range(len(stack["w"])):
                    layer = jax.tree.map(lambda s, i=i: s[i], stack)
                    x = block(layer, x, None)
            return model.loss(params["outer"], x, batch_of(0), None)

        value, grads = jax.value_and_grad(whole)(jax.tree.map(jnp.asarray, params))
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-12)
        jax.tree.map(
            lambda new, old, g: np.testing.assert_allclose(
                new, old - 0.1 * g, atol=1e-12
            ),
            state.params,
            params,
            grads,
        )


def test_what_no_layer_changes_is_saved_once() -> None:
    model, params = encoder_decoder()
    step = sfpo.make_layered_train_step(model, optax.sgd(0.1), sfpo.make_mesh())
    state = step.init_shapes(jax.tree.map(np.float32, params))
    batch = jax.tree.map(single, batch_of(0))
    text = step.lower(state, batch).as_text()
    # h in each of 3 layers; the memory in each of the encoder's 2, and once after.
    assert "tensor<3x1x2x6xf32>" in text
    assert text.count("stablehlo.while") == 4
    loops = [line for line in text.splitlines() if "stablehlo.while" in line]
    assert all(line.count("3x1x2x6xf32") <= 2 for line in loops)
