"""The programs whose memory is planned: GPT-3 13B, ViT-L/16, and one as large as fits.

Each is a function of a mesh of devices that need not exist. GPT models are trained in
bfloat16 by Adam with an int8 first and a factored second moment, weights rounded
stochastically, gradients clipped by the exact global norm, unless a name says
otherwise; embeddings are tied and trained, attention is XLA's.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh

import sfpo_jax as sfpo
from experiments.models.gpt import GPTConfig
from experiments.models.layered import Layered, layered_gpt, layered_vit
from experiments.models.vit import ViT, ViTConfig

# Enough that a linear layer, the costliest, is never computed twice; attention is.
SAVED = ("qkv", "middle", "hidden")
ONE: Mapping[str, int] = {"data": 1}
VIT_BATCH = 98

Build = Callable[[Mesh], tuple[Any, ...]]


class Program(NamedTuple):
    """One row of the table.

    Attributes:
      name: for `--programs`.
      title: what it is.
      build: mesh -> (step, state, batch), shapes.
      mesh_shape: axes and sizes.
      published: GB that SFPO's publication gives, None for no figure.
      bound: GB that it must not exceed, None for what is only compared.
      reference: the program whose FLOPs its own are compared with.
    """

    name: str
    title: str
    build: Build
    mesh_shape: Mapping[str, int] = ONE
    published: float | None = None
    bound: float | None = None
    reference: str | None = None


def gpt(depth: int = 40, width: int = 5120) -> GPTConfig:
    """GPT-3 13B (Brown et al. 2020, table 2.1), or another depth and width."""
    return GPTConfig(
        vocabulary=50304,
        length=2048,
        width=width,
        depth=depth,
        heads=width // 128,
        mlp_width=4 * width,
        is_tied=True,
        attention="xla",
        dtype="bfloat16",
    )


def adam(**changes: Any) -> optax.GradientTransformation:
    """The optimizer of the GPT rows."""
    options = {"mu_dtype": "int8", "nu_dtype": "factored", "weight_decay": 0.1}
    return sfpo.adamw8bit(1e-4, **{**options, **changes})


def onebit_between_hosts() -> optax.GradientTransformation:
    """1-bit Adam between hosts, all its state in bytes."""
    return sfpo.onebit_adam(
        1e-4,
        weight_decay=0.1,
        warmup_steps=1000,
        axis_name="node",
        mu_dtype="int8",
        nu_dtype="int8",
        error_dtype="int8",
    )


def layered(
    make: Callable[[], Layered],
    batch: Any,
    tx: Callable[[], optax.GradientTransformation],
    dtype: Any = jnp.bfloat16,
    **options: Any,
) -> Build:
    """The layered step of a model."""

    def build(mesh: Mesh) -> tuple[Any, ...]:
        model = make()
        step = sfpo.make_layered_train_step(model.model, tx(), mesh, **options)
        return step, step.init_shapes(_params(model, dtype)), batch

    return build


def layered_gpt_step(
    config: GPTConfig,
    windows: int,
    tx: Callable[[], optax.GradientTransformation] = adam,
    **changes: Any,
) -> Build:
    """The layered step of a GPT on `windows` of 2,048 tokens, over all devices."""
    options = {"max_norm": 1.0, "rounding": "stochastic", **changes}
    make = functools.partial(layered_gpt, config)
    return layered(make, _windows(config, windows), tx, **options)


def scanned(
    make: Callable[[], Layered],
    batch: Any,
    tx: Callable[[], optax.GradientTransformation],
    dtype: Any = jnp.float32,
    recompute: bool = False,
) -> Build:
    """What is written today: `value_and_grad` over a scan of layers, then Optax."""

    def build(mesh: Mesh) -> tuple[Any, ...]:
        made = make()
        model = made.model
        assert callable(model.block)
        block: Any = jax.checkpoint(model.block) if recompute else model.block

        def loss(params: Any, batch: Any) -> Any:
            x = model.embed(params["outer"], batch, None)

            def body(x: Any, layer: Any) -> Any:
                return block(layer, x, None), None

            x, _ = lax.scan(body, x, params["layers"])
            return model.loss(params["outer"], x, batch, None)

        step = sfpo.make_train_step(loss, tx(), mesh)
        return step, step.init_shapes(_params(made, dtype)), batch

    return build


def unrolled_vit(config: ViTConfig, batch: Any) -> Build:
    """The plain step of the ViT as it is written, layer after layer."""

    def build(mesh: Mesh) -> tuple[Any, ...]:
        model = nnx.eval_shape(lambda: ViT(config, rngs=nnx.Rngs(0)))
        graph, params = nnx.split(model)

        def loss(params: Any, batch: Any) -> jax.Array:
            logits = nnx.merge(graph, params)(batch["image"])
            losses = optax.softmax_cross_entropy_with_integer_labels(
                logits, batch["label"]
            )
            return losses.mean()

        step = sfpo.make_train_step(loss, optax.adamw(1e-4), mesh)
        return step, step.init_shapes(params), batch

    return build


def images_of(config: ViTConfig, count: int) -> Any:
    """A batch of images and labels, shapes."""
    size = (count, config.image_size, config.image_size, config.channels)
    return {
        "image": jax.ShapeDtypeStruct(size, jnp.float32),
        "label": jax.ShapeDtypeStruct((count,), jnp.int32),
    }


def programs() -> list[Program]:
    """All rows, those that have a bound first."""
    gpt13, vit, half = gpt(), _vit("float32"), _vit("bfloat16")
    images = images_of(vit, VIT_BATCH)
    layered_vit_step = functools.partial(
        layered,
        functools.partial(layered_vit, vit),
        images,
        lambda: sfpo.adamw8bit(1e-4, weight_decay=0.1),
        jnp.float32,
    )
    half_vit_step = functools.partial(
        layered,
        functools.partial(layered_vit, half),
        images,
        lambda: sfpo.adamw8bit(1e-4, weight_decay=0.1),
        jnp.float32,
    )
    make13 = functools.partial(layered_gpt, gpt13)
    scanned13 = functools.partial(scanned, make13, _windows(gpt13, 1), recompute=True)
    vit_title = f"ViT-L/16, 224 px, batch {VIT_BATCH}"
    return [
        Program(
            "gpt_13b",
            "GPT-3 13B, 1 x 2048 tokens",
            layered_gpt_step(gpt13, 1),
            published=72,
            bound=44,
        ),
        Program(
            "gpt_13b_batch_4",
            "GPT-3 13B, 4 x 2048 tokens",
            layered_gpt_step(gpt13, 4),
            bound=52,
        ),
        Program(
            "gpt_13b_error_term",
            "GPT-3 13B, weights with an 8-bit error term",
            layered_gpt_step(gpt13, 1, rounding="error_term"),
            bound=58,
        ),
        Program(
            "gpt_13b_8_gpus",
            "GPT-3 13B, 8 GPUs, weights and states sharded",
            layered_gpt_step(gpt13, 8, shard="weights"),
            {"data": 8},
            bound=11,
        ),
        Program(
            "gpt_13b_64_gpus",
            "GPT-3 13B, 8 hosts of 8 GPUs, one bit between hosts",
            # Transfers under products would keep 1.5 GB of gradients longer.
            layered_gpt_step(
                gpt13, 64, onebit_between_hosts, shard="weights", pipeline_depth=0
            ),
            {"node": 8, "data": 8},
            bound=14,
        ),
        Program(
            "vit_l",
            f"{vit_title}, float32",
            layered_vit_step(recompute=SAVED),
            published=41,
            bound=22,
            reference="vit_l_scanned",
        ),
        Program(
            "vit_l_recomputed",
            f"{vit_title}, float32, all recomputed",
            layered_vit_step(),
            bound=8,
            reference="vit_l_scanned",
        ),
        Program(
            "vit_l_bfloat16",
            f"{vit_title}, bfloat16 arithmetic",
            half_vit_step(recompute=SAVED),
            bound=14,
            reference="vit_l_scanned",
        ),
        Program(
            "vit_l_bfloat16_recomputed",
            f"{vit_title}, bfloat16 arithmetic, all recomputed",
            half_vit_step(),
            bound=6,
            reference="vit_l_scanned",
        ),
        Program(
            "largest",
            "GPT of 23.9 B parameters (52 layers, width 6144), 1 x 2048 tokens",
            layered_gpt_step(gpt(52, 6144), 1),
            # 8 % of the card stay free.
            bound=78.29,
        ),
        Program(
            "vit_l_scanned",
            f"{vit_title}, float32: `optax.adamw`, layers in a scan",
            scanned(
                functools.partial(layered_vit, vit), images, lambda: optax.adamw(1e-4)
            ),
            published=78,
        ),
        Program(
            "vit_l_unrolled",
            f"{vit_title}, float32: `optax.adamw`, layers written out",
            unrolled_vit(vit, images),
            published=78,
        ),
        Program(
            "vit_l_144_unrolled",
            "ViT-L/16, 224 px, batch 144, float32: `optax.adamw`, layers written out",
            unrolled_vit(vit, images_of(vit, 144)),
        ),
        Program(
            "vit_l_144",
            "ViT-L/16, 224 px, batch 144, float32",
            layered(
                functools.partial(layered_vit, vit),
                images_of(vit, 144),
                lambda: sfpo.adamw8bit(1e-4, weight_decay=0.1),
                jnp.float32,
                recompute=SAVED,
            ),
            reference="vit_l_144_unrolled",
        ),
        Program(
            "gpt_13b_adamw",
            "GPT-3 13B: `optax.adamw`, float32 weights, recompute",
            scanned13(lambda: optax.adamw(1e-4, weight_decay=0.1)),
        ),
        Program(
            "gpt_13b_adamw_bfloat16",
            "GPT-3 13B: `optax.adamw`, all bfloat16, recompute",
            scanned13(lambda: optax.adamw(1e-4, weight_decay=0.1), jnp.bfloat16),
        ),
        Program(
            "gpt_13b_adafactor",
            "GPT-3 13B: `optax.adafactor`, bfloat16 weights, recompute",
            scanned13(lambda: optax.adafactor(1e-4), jnp.bfloat16),
        ),
        Program(
            "gpt_13b_flashoptim",
            "GPT-3 13B: `flashoptim-jax` AdamW, bfloat16 weights, recompute",
            _flashoptim(gpt13),
        ),
        Program(
            "gpt_13b_not_released",
            "GPT-3 13B without release: our `adamw8bit` after a whole gradient",
            scanned13(
                lambda: optax.chain(optax.clip_by_global_norm(1.0), adam()),
                jnp.bfloat16,
            ),
        ),
        Program(
            "gpt_13b_float32_weights",
            "GPT-3 13B with float32 weights",
            layered(make13, _windows(gpt13, 1), adam, jnp.float32, max_norm=1.0),
        ),
        Program(
            "gpt_13b_float32_mu",
            "GPT-3 13B with a float32 first moment",
            layered_gpt_step(gpt13, 1, lambda: adam(mu_dtype="float32")),
        ),
        Program(
            "gpt_13b_int8_nu",
            "GPT-3 13B with an int8 second moment",
            layered_gpt_step(gpt13, 1, lambda: adam(nu_dtype="int8")),
        ),
        Program(
            "gpt_13b_unclipped",
            "GPT-3 13B without clipping (one backward pass)",
            layered_gpt_step(gpt13, 1, max_norm=None),
            reference="gpt_13b",
        ),
        Program(
            "gpt_13b_not_recomputed",
            "GPT-3 13B, nothing recomputed",
            layered_gpt_step(gpt13, 1, recompute="none"),
            reference="gpt_13b",
        ),
    ]


def _vit(dtype: Any) -> ViTConfig:
    return dataclasses.replace(ViTConfig(), attention="xla", dtype=dtype)


def _params(model: Layered, dtype: Any) -> Any:
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), shapes)


def _windows(config: GPTConfig, count: int) -> Any:
    return jax.ShapeDtypeStruct((count, config.length + 1), jnp.int32)


def _flashoptim(config: GPTConfig) -> Build:
    """The peer's own step: it applies its updates itself."""

    def build(mesh: Mesh) -> tuple[Any, ...]:
        # Compared with where it is installed; the project does not need it.
        flash_adamw = importlib.import_module("flashoptim_jax").flash_adamw
        made = layered_gpt(config)
        model = made.model
        assert callable(model.block)
        block = jax.checkpoint(model.block)
        # Its fused kernel counts entries in int32, fewer than a stack has here.
        tx = flash_adamw(1e-4, weight_decay=0.1, fused=False)

        def loss(params: Any, batch: Any) -> Any:
            x = model.embed(params["outer"], batch, None)
            x, _ = lax.scan(
                lambda x, layer: (block(layer, x, None), None), x, params["layers"]
            )
            return model.loss(params["outer"], x, batch, None)[0]

        def step(state: Any, batch: Any) -> Any:
            params, opt_state = state
            grads = jax.grad(loss)(params, batch)
            return tx.step(params, opt_state, grads)

        params = _params(made, jnp.bfloat16)
        opt_state = jax.eval_shape(tx.init, params)
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            ((params, opt_state), _windows(config, 1)),
        )
        return jax.jit(step, donate_argnums=0), *shapes

    return build
