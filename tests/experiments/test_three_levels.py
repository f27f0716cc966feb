"""Trained over any mesh, the transformers become what one device makes of them.

Every mesh of eight devices, every model, the plain and the layered step, with and
without computing layers again are 72 programs, which `--full` runs. Without it each
model takes each kind of step once, and each mesh two of them.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import sfpo_jax as sfpo
from experiments.models.layered import (
    Layered,
    layered_bert,
    layered_gpt,
    layered_vit,
)
from experiments.models.vit import ViTConfig
from tests.experiments.small_models import (
    BERT_CONFIG,
    GPT_CONFIG,
    SIZES,
    VIT,
    images,
    pairs,
    random_params,
    windows,
)

STEPS, ROWS = 10, 8
# As many heads as the axis `op` may have ranks, and no fewer tokens.
EIGHT: Any = {"heads": 8, "mlp_width": 24, "depth": 2}
MODELS: dict[str, tuple[Callable[..., Layered], Any]] = {
    "vit": (
        functools.partial(
            layered_vit, dataclasses.replace(VIT, image_size=12, **EIGHT)
        ),
        images(ROWS, 12),
    ),
    "gpt": (
        functools.partial(
            layered_gpt,
            dataclasses.replace(GPT_CONFIG, length=9, is_tied=True, **EIGHT),
        ),
        windows(ROWS, 9),
    ),
    "bert": (
        functools.partial(
            layered_bert, dataclasses.replace(BERT_CONFIG, length=11, **EIGHT)
        ),
        pairs(ROWS, 11),
    ),
}
MESHES = [(1, 8, 1), (1, 4, 2), (1, 2, 4), (2, 2, 2), (1, 1, 8), (2, 4, 1)]
KINDS = [("plain", "none"), ("layered", "full"), ("plain", "full"), ("layered", "none")]


def cases() -> Iterator[Any]:
    for place, mesh in enumerate(MESHES):
        for number, name in enumerate(MODELS):
            for kind, (step, recompute) in enumerate(KINDS):
                turn = (number - place) % 3
                is_chosen = turn < 2 and kind == (2 * place + turn) % 4
                yield pytest.param(
                    mesh,
                    name,
                    step,
                    recompute,
                    id=f"{'x'.join(map(str, mesh))}-{name}-{step}-{recompute}",
                    marks=() if is_chosen else pytest.mark.full,
                )


def stacked(specs: Any) -> Any:
    return {**specs, "layers": jax.tree.map(lambda s: P(None, *s), specs["layers"])}


def plain_step(layered: Layered, mesh: Any, recompute: str) -> Any:
    model: Any = layered.model
    block = jax.checkpoint(model.block) if recompute == "full" else model.block

    def loss(params: Any, batch: Any) -> Any:
        x = model.embed(params["outer"], batch, None)
        x, _ = lax.scan(lambda x, w: (block(w, x, None), None), x, params["layers"])
        return model.loss(params["outer"], x, batch, None)

    return sfpo.make_train_step(
        loss, optimizer(), mesh, operator_specs=stacked(layered.specs)
    )


def layered_step(layered: Layered, mesh: Any, recompute: Any) -> Any:
    return sfpo.make_layered_train_step(
        layered.model,
        optimizer(),
        mesh,
        recompute=recompute,
        operator_specs=layered.specs,
    )


def optimizer() -> optax.GradientTransformation:
    return optax.adamw(1e-2)


def train(make: Callable[..., Any], name: str, mesh: Any, recompute: str) -> Any:
    """Parameters and loss after some steps."""
    model, batch = MODELS[name]
    sizes = dict(zip(("node", "data", "op"), mesh, strict=True))
    ranks = int(np.prod(mesh))
    made = sfpo.make_mesh(**sizes, devices=jax.devices()[:ranks])
    # With eight ranks each has one piece of a product, with fewer it has some.
    layered = model(operator=sfpo.Operator(max(4, sizes["op"])))
    step = make(layered, made, recompute)
    state = step.init(random_params(layered))
    batch, metrics = step.shard_batch(jax.tree.map(jnp.asarray, batch)), {}
    for _ in range(STEPS):
        state, metrics = step(state, batch)
    return jax.tree.map(np.asarray, (state.params, metrics["loss"]))


@functools.cache
def of_one_device(name: str) -> Any:
    return train(plain_step, name, (1, 1, 1), "none")


@pytest.fixture
def quick_compiler() -> Iterator[None]:
    """Compiles in half the time what runs for less than a second."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.mark.parametrize(("mesh", "name", "step", "recompute"), list(cases()))
@pytest.mark.usefixtures("standard_promotion", "quick_compiler")
def test_parameters_are_those_of_one_device(
    mesh: Any, name: str, step: str, recompute: str
) -> None:
    make = {"plain": plain_step, "layered": layered_step}[step]
    with jax.enable_x64(True):
        found, wanted = train(make, name, mesh, recompute), of_one_device(name)
    # Of gradients that are only rounding, 1e-17 as the bias of keys has, Adam makes
    # steps of 1e-2 * 1e-17 / 1e-8, its rate and epsilon: far below the tolerance.
    start = jax.tree.map(np.asarray, random_params(MODELS[name][0]()))
    moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), start, wanted[0])
    assert max(jax.tree.leaves(moved)) > 0.05
    paths = jax.tree_util.tree_leaves_with_path(wanted)
    for got, (path, true) in zip(jax.tree.leaves(found), paths, strict=True):
        np.testing.assert_allclose(
            got, true, rtol=0, atol=1e-9, err_msg=jax.tree_util.keystr(path)
        )


@pytest.mark.full
def test_all_at_once_the_loss_falls_and_ranks_agree() -> None:
    """Signs between nodes, shards inside, split products, clipping, dropout."""
    config = ViTConfig(
        image_size=12,
        patch_size=4,
        channels=1,
        classes=4,
        # Wide enough that states are cut, narrow enough for two ranks to share heads.
        **{**SIZES, "width": 64, "mlp_width": 256, "dtype": "float32"},
        dropout=0.1,
    )
    layered, steps = layered_vit(config, operator=sfpo.Operator(4)), 48
    step = sfpo.make_layered_train_step(
        layered.model,
        sfpo.sfpo(3e-3, steps, axis_name="node"),
        sfpo.make_mesh(2, 2, 2),
        has_key=True,
        max_norm=1.0,
        microbatches=2,
        pipeline_depth=2,
        shard="states",
        operator_specs=layered.specs,
    )
    state = step.init(layered.init(jax.random.key(0)), jax.random.key(1))
    rng = np.random.default_rng(0)
    centres = rng.normal(size=(4, 12, 12, 1)).astype(np.float32)
    seen = []
    for _ in range(steps):
        label = rng.integers(0, 4, 32).astype(np.int32)
        noise = rng.normal(size=(32, 12, 12, 1)).astype(np.float32)
        batch = {"image": centres[label] + noise, "label": label}
        state, metrics = step(state, batch)
        seen.append(float(metrics["loss"]))
    assert np.mean(seen[-8:]) < 0.2 * seen[0]
    for leaf in jax.tree.leaves((state.params, state.opt_state)):
        copies: dict[str, np.ndarray] = {}
        for part in leaf.addressable_shards:
            own = np.asarray(part.data)
            np.testing.assert_array_equal(own, copies.setdefault(str(part.index), own))
