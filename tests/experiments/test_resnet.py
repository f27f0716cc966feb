"""ResNet: its published size, where its strides lie, and statistics as state."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sfpo_jax as sfpo
from experiments.models.resnet import Recompute, ResNetConfig, make_classifier

TINY = ResNetConfig(classes=3, channels=1, width=4, stages=(1, 2))
KEY = jax.random.key(0)


def batch(size: int = 8) -> dict[str, jax.Array]:
    labels = jnp.arange(size, dtype=jnp.int32) % 3
    noise = jax.random.normal(jax.random.key(1), (size, 16, 16, 1))
    shade = labels.astype(jnp.float32)[:, None, None, None]
    return {"image": 0.1 * noise + shade, "label": labels}


@functools.cache
def initial() -> tuple[Any, Any]:
    """Parameters and statistics of the tiny network."""
    return jax.jit(make_classifier(TINY).init)(KEY)


@functools.cache
def grads(recompute: Recompute) -> Any:
    net = make_classifier(TINY, recompute=recompute)
    params, stats = initial()
    grad = jax.jit(jax.value_and_grad(net.loss_fn, has_aux=True))
    return grad(params, batch(), model_state=stats)


def test_resnet_50_has_its_published_size_and_shapes() -> None:
    net = make_classifier(ResNetConfig(dtype="bfloat16"))
    params, stats = jax.eval_shape(net.init, KEY)
    # torchvision's resnet50 counts the same.
    assert sum(x.size for x in jax.tree.leaves(params)) == 25_557_032
    assert sum(x.size for x in jax.tree.leaves(stats)) == 53_120
    dtypes = {x.dtype for x in jax.tree.leaves((params, stats))}
    assert dtypes == {jnp.dtype("float32")}
    images = jax.ShapeDtypeStruct((2, 224, 224, 3), jnp.float32)
    logits = jax.eval_shape(net.predict, params, stats, images)
    assert (logits.shape, logits.dtype) == ((2, 1000), jnp.float32)


def test_the_stride_lies_in_the_3_x_3_convolution() -> None:
    net = make_classifier(ResNetConfig())
    params, stats = jax.eval_shape(net.init, KEY)
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    jaxpr = jax.make_jaxpr(net.predict)(params, stats, images)
    found = [
        (eqn.invars[1].aval.shape[:2], eqn.params["window_strides"][0])
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "conv_general_dilated"
    ]
    assert len(found) == 53
    strided = [size for size, stride in found if stride == 2]
    # The stem; then in three stages the 3 x 3 convolution and the shortcut.
    assert sorted(strided) == [(1, 1)] * 3 + [(3, 3)] * 3 + [(7, 7)]


def test_every_block_begins_as_the_identity() -> None:
    params, _ = initial()
    for block in params["blocks"].values():
        assert not block["expand"]["norm"]["scale"][...].any()
        assert block["reduce"]["norm"]["scale"][...].all()


def test_statistics_move_towards_those_of_the_batch() -> None:
    (_, aux), _ = grads("none")
    params, stats = initial()
    kernel = params["stem"]["conv"]["kernel"][...]
    x = jax.lax.conv_general_dilated(
        batch()["image"],
        kernel,
        (2, 2),
        ((3, 3), (3, 3)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    found = aux["model_state"]["stem"]["norm"]
    mean, var = np.mean(x, (0, 1, 2)), np.var(x, (0, 1, 2))
    np.testing.assert_allclose(found["mean"][...], 0.1 * mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found["var"][...], 0.9 + 0.1 * var, rtol=1e-4)
    # A test leaves them as they are, and is the same for a batch in parts.
    images = batch()["image"]
    predict = jax.jit(make_classifier(TINY).predict)
    whole = predict(params, stats, images)
    part = predict(params, stats, images[:2])
    np.testing.assert_allclose(whole[:2], part, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("recompute", ["full", ("conv",)])
def test_recomputing_changes_no_gradient(recompute: Recompute) -> None:
    (loss, aux), got = grads(recompute)
    (wanted_loss, wanted_aux), wanted = grads("none")
    np.testing.assert_allclose(loss, wanted_loss, rtol=1e-6)
    for a, b in [(got, wanted), (aux["model_state"], wanted_aux["model_state"])]:
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), a, b
        )


def test_a_policy_saves_the_convolutions_of_the_blocks() -> None:
    def saved(recompute: Recompute) -> int:
        net = make_classifier(TINY, recompute=recompute)
        params, stats = jax.eval_shape(net.init, KEY)

        def residuals(params: Any, stats: Any) -> Any:
            def loss(params: Any) -> Any:
                return net.loss_fn(params, batch(), model_state=stats)

            return jax.vjp(loss, params, has_aux=True)[1]

        pull = jax.eval_shape(residuals, params, stats)
        return sum(x.size for x in jax.tree.leaves(pull))

    everything, convolutions, nothing = saved("none"), saved(("conv",)), saved("full")
    assert nothing < convolutions < everything


def test_it_trains_by_the_data_parallel_step(mesh8: jax.sharding.Mesh) -> None:
    net = make_classifier(dataclasses.replace(TINY, dtype="bfloat16"))
    step = sfpo.make_train_step(
        net.loss_fn, optax.sgd(0.1), mesh8, has_model_state=True
    )
    params, stats = initial()
    state = step.init(params, model_state=stats)
    losses = []
    for _ in range(8):
        state, metrics = step(state, batch(24))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.8 * losses[0]
    moved = jax.tree.map(
        lambda a, b: bool((a != b).any()), stats, jax.device_get(state.model_state)
    )
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"stages": ()}, ["model.stages", "()", "3, 4, 6, 3"]),
        ({"stages": (3, 0)}, ["model.stages", "(3, 0)"]),
        ({"width": 0}, ["model.width", "got 0"]),
        ({"momentum": 1.0}, ["model.momentum", "got 1.0"]),
    ],
)
def test_sizes_that_cannot_be(values: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        dataclasses.replace(TINY, **values)
    for word in words:
        assert word in str(error.value)


def test_images_of_other_channels() -> None:
    net = make_classifier(TINY)
    params, stats = jax.eval_shape(net.init, KEY)
    images = jax.ShapeDtypeStruct((1, 16, 16, 3), jnp.float32)
    with pytest.raises(ValueError, match=r"16, 16, 3\]: change model\.channels"):
        jax.eval_shape(net.predict, params, stats, images)
