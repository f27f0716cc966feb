"""The programs whose memory is planned: GPT-3 13B, ViT-L/16, and some larger ones."""

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh

import sfpo_jax as sfpo
from experiments.bench.memory_programs import (
    SAVED,
    Build,
    Program,
    adam,
    gpt,
    images_of,
    layered,
    layered_gpt_step,
    onebit_between_hosts,
    params_of,
    scanned,
    unrolled_vit,
    windows_of,
)
from experiments.models.gpt import GPTConfig
from experiments.models.layered import layered_gpt, layered_vit
from experiments.models.vit import ViTConfig

VIT_BATCH = 98
EVERYTHING = ("states", "weights", "activations")


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
    scanned13 = functools.partial(scanned, make13, windows_of(gpt13, 1), recompute=True)
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
            "gpt_13b_states_on_host",
            "GPT-3 13B, optimizer states in the host's memory",
            layered_gpt_step(gpt13, 1, offload=("states",)),
            bound=33,
            reference="gpt_13b",
        ),
        Program(
            "gpt_13b_on_host",
            "GPT-3 13B, states, weights and activations in the host's memory",
            layered_gpt_step(gpt13, 1, offload=EVERYTHING),
            bound=9,
            reference="gpt_13b",
        ),
        Program(
            "gpt_175b_on_host",
            "GPT-3 175B (96 layers, width 12288), all three in the host's memory",
            layered_gpt_step(gpt(96, 12288), 1, offload=EVERYTHING),
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
            layered(make13, windows_of(gpt13, 1), adam, jnp.float32, max_norm=1.0),
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

        params = params_of(made, jnp.bfloat16)
        opt_state = jax.eval_shape(tx.init, params)
        place = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            ((params, opt_state), windows_of(config, 1)),
        )
        return jax.jit(step, donate_argnums=0), *shapes

    return build
