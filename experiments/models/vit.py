"""Vision Transformer in Flax NNX (Dosovitskiy et al. 2021, arXiv:2010.11929).

One code path serves ViT-L/16 on ImageNet-sized images and the narrow network that a
laptop trains on MNIST: only `ViTConfig` differs. Shapes stand in the names:
B images, H x W pixels, C channels, L tokens, l tokens of this rank (all without an
operator), D width, V classes.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.models.attention import AttentionKind
from experiments.models.operator import first_token, mean_token, rank_key
from experiments.models.transformer import (
    Block,
    Dtype,
    at_least_one,
    check_block_sizes,
    layer_norm,
    linear,
)
from sfpo_jax import Operator, shard_sequence
from sfpo_jax.collectives import widen

Pool = Literal["token", "mean"]


@dataclasses.dataclass(frozen=True)
class ViTConfig:
    """Sizes of a Vision Transformer; the defaults are ViT-L/16 with 1000 classes.

    Raises:
      ValueError: where sizes do not fit together, with the key, value and remedy.
    """

    image_size: int = 224
    """Pixels along each side of an image."""
    patch_size: int = 16
    """Pixels along each side of a patch; divides image_size."""
    channels: int = 3
    """Colour channels of an image."""
    width: int = 1024
    """Features of a token."""
    depth: int = 24
    """Encoder blocks."""
    heads: int = 16
    """Attention heads of a block; divides width."""
    mlp_width: int = 4096
    """Features of the hidden layer of each MLP."""
    classes: int = 1000
    """Classes to tell apart."""
    pool: Pool = "token"
    """What the classifier reads: a learned class token, or the mean of the patches."""
    dropout: float = 0.0
    """Share of activations dropped after embedding, attention and MLP in training."""
    attention: AttentionKind = "auto"
    """What computes the attention: auto takes cuDNN on a GPU in half precision."""
    dtype: Dtype = "float32"
    """Precision of the arithmetic; parameters, LayerNorm and logits stay float32."""

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size", "channels", "depth", "classes"):
            at_least_one(name, getattr(self, name))
        if self.image_size % self.patch_size:
            raise ValueError(
                f"model.patch_size must divide model.image_size, got "
                f"{self.patch_size} and {self.image_size}: an image is cut into whole "
                f"patches, choose a divisor of {self.image_size}"
            )
        check_block_sizes(self)

    @property
    def tokens(self) -> int:
        """Length L of the sequence, the class token included."""
        return (self.image_size // self.patch_size) ** 2 + (self.pool == "token")


class ViT(nnx.Module):
    """Images to class logits.

    Args:
      config: the sizes.
      recompute: run each block under `jax.checkpoint`, so that the backward pass
        computes its inner activations again instead of keeping them.
      rngs: the source of the initial parameters.
    """

    operator: Operator | None = None

    def __init__(
        self, config: ViTConfig, *, recompute: bool = False, rngs: nnx.Rngs
    ) -> None:
        self.config = config
        self.recompute = recompute
        D, P = config.width, config.patch_size
        self.patches = linear(config, P * P * config.channels, D, rngs=rngs)
        init = nnx.initializers.normal(0.02)
        self.positions = nnx.Param(init(rngs.params(), (config.tokens, D)))
        if config.pool == "token":
            self.token = nnx.Param(jnp.zeros((1, D)))
        self.dropout = nnx.Dropout(config.dropout)
        self.blocks = nnx.List(Block(config, rngs=rngs) for _ in range(config.depth))
        self.norm = layer_norm(config, rngs=rngs)
        # A head of zeros starts every run at the loss of a uniform guess, log V.
        self.head = nnx.Linear(
            D, config.classes, kernel_init=nnx.initializers.zeros, rngs=rngs
        )

    def __call__(
        self, images_BxHxWxC: jax.Array, *, key: jax.Array | None = None
    ) -> jax.Array:
        """Float32 logits [B, V] of float images; dropout only where a `key` is given.

        Raises:
          ValueError: if the images have not the shape of the configuration.
        """
        keys = [None] * (len(self.blocks) + 1)
        if key is not None:
            keys = list(jax.random.split(key, len(keys)))
        x_BxlxD = self.embed(images_BxHxWxC, keys[-1])
        apply = nnx.remat(Block.__call__) if self.recompute else Block.__call__
        for block, block_key in zip(self.blocks, keys[:-1], strict=True):
            x_BxlxD = apply(block, x_BxlxD, block_key)
        return self.classify(x_BxlxD)

    def classify(self, x_BxlxD: jax.Array) -> jax.Array:
        """Float32 logits [B, V] of what the last block returned."""
        x_BxlxD = self.norm(widen(x_BxlxD))
        if self.config.pool == "token":
            x_BxD = first_token(x_BxlxD, self.operator)
        else:
            x_BxD = mean_token(x_BxlxD, self.config.tokens, self.operator)
        return self.head(x_BxD)

    def embed(self, images_BxHxWxC: jax.Array, key: jax.Array | None) -> jax.Array:
        """What the first block reads, [B, l, D]; errors are those of a call."""
        c = self.config
        shape = (c.image_size, c.image_size, c.channels)
        if images_BxHxWxC.shape[1:] != shape:
            raise ValueError(
                f"`images` must have the shape [batch, {', '.join(map(str, shape))}] "
                f"of the configuration, got {list(images_BxHxWxC.shape)}: change "
                f"model.image_size and model.channels, or resize the images"
            )
        x_BxLxD = self.patches(patchify(images_BxHxWxC, c.patch_size))
        if c.pool == "token":
            token = jnp.broadcast_to(self.token[...], (len(x_BxLxD), 1, c.width))
            x_BxLxD = jnp.concatenate([token.astype(x_BxLxD.dtype), x_BxLxD], axis=1)
        x_BxLxD = x_BxLxD + self.positions[None].astype(x_BxLxD.dtype)
        x_BxlxD = x_BxLxD
        if self.operator is not None:
            x_BxlxD = shard_sequence(x_BxLxD, self.operator)
        if key is not None:
            key = rank_key(key, self.operator)
            x_BxlxD = self.dropout(x_BxlxD, deterministic=False, rngs=key)
        return x_BxlxD


def patchify(images_BxHxWxC: jax.Array, patch_size: int) -> jax.Array:
    """Cuts images into flat patches: [B, H, W, C] -> [B, (H/P)(W/P), P*P*C]."""
    B, H, W, C = images_BxHxWxC.shape
    P = patch_size
    x = images_BxHxWxC.reshape(B, H // P, P, W // P, P, C)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(B, -1, P * P * C)
