"""Models whose products are shared are the same functions, with the same gradients."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import sfpo_jax as sfpo
from experiments.models.gpt import GPT
from experiments.models.layered import (
    Layered,
    layered_bert,
    layered_gpt,
    layered_vit,
)
from experiments.models.operator import check_operator, operator_specs
from experiments.models.transformer import Attention
from tests.experiments.small_models import (
    BERT_CONFIG,
    GPT_CONFIG,
    VIT,
    images,
    pairs,
    random_params,
    windows,
)

B = 4

MODELS: dict[str, tuple[Any, Any]] = {
    "vit": (lambda operator: layered_vit(VIT, operator=operator), images),
    "vit, mean": (
        lambda operator: layered_vit(
            dataclasses.replace(VIT, pool="mean"), operator=operator
        ),
        images,
    ),
    "gpt": (
        lambda operator: layered_gpt(
            dataclasses.replace(GPT_CONFIG, is_tied=True), operator
        ),
        windows,
    ),
    "bert": (lambda operator: layered_bert(BERT_CONFIG, operator), pairs),
}


def value_and_grads(layered: Layered, params: Any, batch: Any) -> Any:
    model: Any = layered.model

    def loss(params: Any) -> Any:
        x = model.embed(params["outer"], batch, None)
        x, _ = lax.scan(
            lambda x, layer: (model.block(layer, x, None), None), x, params["layers"]
        )
        return model.loss(params["outer"], x, batch, None)

    return jax.value_and_grad(loss, has_aux=True)(params)


def shared(layered: Layered, op: int, params: Any, batch: Any) -> Any:
    """The same over data = 2 and `op`, kernels cut by the model's specs."""
    specs = dict(layered.specs)
    specs["layers"] = jax.tree.map(lambda s: P(None, *s), specs["layers"])

    def run(params: Any, batch: Any) -> Any:
        value, grads = value_and_grads(layered, params, batch)

        def mean(grad: jax.Array, spec: P) -> jax.Array:
            axes = ("data",) if "op" in spec else ("data", "op")
            return lax.pmean(grad / op if "op" in spec else grad, axes)

        return lax.pmean(value, ("data", "op")), jax.tree.map(mean, grads, specs)

    mesh = sfpo.make_mesh(data=2, op=op, devices=jax.devices()[: 2 * op])
    run = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(specs, P("data")),
        out_specs=(P(), specs),
        check_vma=False,
    )
    return jax.jit(run)(params, batch)


@pytest.mark.parametrize(
    ("name", "op"),
    [("vit", 2), ("vit, mean", 4), ("gpt", 2), ("bert", 4)],
)
@pytest.mark.usefixtures("standard_promotion")  # Flax's LayerNorm in float64
def test_values_and_gradients_are_those_of_one_device(name: str, op: int) -> None:
    make, batch = MODELS[name]
    with jax.enable_x64(True):
        layered = make(sfpo.Operator(4))
        params, data = random_params(layered), jax.tree.map(jnp.asarray, batch(B))
        (loss, aux), grads = shared(layered, op, params, data)
        (true, true_aux), true_grads = jax.jit(
            lambda *args: value_and_grads(make(None), *args)
        )(params, data)
        np.testing.assert_allclose(loss, true, rtol=1e-9)
        np.testing.assert_allclose(aux["accuracy"], true_aux["accuracy"], rtol=1e-6)
        paths = jax.tree_util.tree_leaves_with_path(true_grads)
        for got, (path, wanted) in zip(jax.tree.leaves(grads), paths, strict=True):
            assert float(jnp.abs(wanted).max()) > 0, path
            np.testing.assert_allclose(
                got, wanted, rtol=1e-9, atol=1e-9, err_msg=jax.tree_util.keystr(path)
            )


def test_the_operator_reaches_every_layer_and_is_no_parameter() -> None:
    config = dataclasses.replace(GPT_CONFIG, dtype="float32")
    model = GPT(config, rngs=nnx.Rngs(0))
    _, before = nnx.split(model)
    model.set_attributes(operator=sfpo.Operator(8))
    graph, after = nnx.split(model)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    again: Any = nnx.merge(graph, after)
    for block in again.blocks:
        layers = (block.attention.qkv, block.attention.out, block.mlp_in, block.mlp_out)
        assert {layer.operator for layer in layers} == {sfpo.Operator(8)}
    ids = jnp.asarray(windows(B)[:, :5])
    plain = GPT(config, rngs=nnx.Rngs(0))
    found, wanted = (nnx.jit(lambda model: model(ids))(m) for m in (again, plain))
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_the_specs_cut_what_is_shared() -> None:
    model = nnx.eval_shape(lambda: GPT(GPT_CONFIG, rngs=nnx.Rngs(0)))
    specs = operator_specs(model)
    assert jax.tree.structure(specs) == jax.tree.structure(nnx.split(model)[1])
    found = {"/".join(map(str, p)): x.get_value() for p, x in nnx.to_flat_state(specs)}
    assert found["blocks/1/attention/qkv/kernel"] == P(None, "op")
    assert found["blocks/1/mlp_in/bias"] == P("op")
    assert found["blocks/0/attention/out/kernel"] == P("op", None)
    assert found["blocks/0/mlp_out/bias"] == P()
    assert found["tokens"] == found["head/kernel"] == P()


def test_ranks_drop_different_entries() -> None:
    config = dataclasses.replace(VIT, dropout=0.5, dtype="float32", pool="mean")
    layered = layered_vit(config, operator=sfpo.Operator(4))
    params = jax.tree.map(jnp.ones_like, layered.init(jax.random.key(0)))
    model: Any = layered.model
    batch = jax.tree.map(jnp.ones_like, images(B))
    embed = jax.shard_map(
        lambda outer, batch: model.embed(outer, batch, jax.random.key(0)),
        mesh=sfpo.make_mesh(data=1, op=4, devices=jax.devices()[:4]),
        in_specs=P(),
        out_specs=P(None, "op"),
        check_vma=False,
    )
    tokens = jax.jit(embed)(params["outer"], batch)[0] == 0
    assert not bool((tokens[:1] == tokens[1:]).all(axis=1).any())


def test_columns_of_whole_heads_are_the_same_numbers() -> None:
    init = nnx.initializers.xavier_uniform()
    config = dataclasses.replace(GPT_CONFIG, dtype="float32")
    attention = Attention(config, rngs=nnx.Rngs(3))
    drawn = init(nnx.Rngs(3).params(), (16, 48), jnp.float32)
    kernel_DxNx3xK = attention.qkv.kernel[...].reshape(16, 4, 3, 4)
    np.testing.assert_array_equal(
        kernel_DxNx3xK.swapaxes(1, 2), drawn.reshape(16, 3, 4, 4)
    )


@pytest.mark.parametrize(
    ("changes", "operator", "op", "message"),
    [
        ({}, sfpo.Operator(8), 8, r"model\.heads .* parallel\.mesh\.op, got 4 and 8"),
        ({"heads": 8}, sfpo.Operator(16), 16, r"model\.heads .* got 8 and 16"),
        ({"mlp_width": 22}, sfpo.Operator(4), 4, r"model\.mlp_width .* 22 and 4: .*22"),
        ({}, sfpo.Operator(16), 4, r"chunk_size must be at most .* 16 and 5: .* to 8$"),
        ({}, sfpo.Operator(2), 2, r"`chunk_size` must be at least 2 \*"),
    ],
)
def test_models_that_ranks_cannot_share_are_refused(
    changes: Any, operator: sfpo.Operator, op: int, message: str
) -> None:
    config = dataclasses.replace(GPT_CONFIG, **changes)
    with pytest.raises(ValueError, match=message):
        check_operator(config, operator, op)
