"""Vision Transformer in Flax NNX (Dosovitskiy et al. 2021, arXiv:2010.11929).

One code path serves ViT-L/16 on ImageNet-sized images and the narrow network that a
laptop trains on MNIST: only `ViTConfig` differs. Shapes stand in the names:
B images, H x W pixels, C channels, L tokens, D width, N heads, K width of a head,
F width of the MLP, V classes.
"""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

Dtype = Literal["float32", "bfloat16"]
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
    dtype: Dtype = "float32"
    """Precision of the arithmetic; parameters, LayerNorm and logits stay float32."""

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size", "channels", "width", "depth"):
            _at_least_one(name, getattr(self, name))
        for name in ("heads", "mlp_width", "classes"):
            _at_least_one(name, getattr(self, name))
        if self.image_size % self.patch_size:
            raise ValueError(
                f"model.patch_size must divide model.image_size, got "
                f"{self.patch_size} and {self.image_size}: an image is cut into whole "
                f"patches, choose a divisor of {self.image_size}"
            )
        if self.width % self.heads:
            raise ValueError(
                f"model.heads must divide model.width, got {self.heads} and "
                f"{self.width}: each head takes an equal share of the features"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"model.dropout must lie in [0, 1), got {self.dropout}: it is the "
                f"share of activations dropped"
            )

    @property
    def tokens(self) -> int:
        """Length L of the sequence, the class token included."""
        return (self.image_size // self.patch_size) ** 2 + (self.pool == "token")


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"model.{name} must be at least 1, got {value}")


class Attention(nnx.Module):
    """Multi-head self-attention with one fused projection for q, k and v."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        self.heads = config.heads
        linear = functools.partial(_linear, config, rngs=rngs)
        self.qkv = linear(config.width, 3 * config.width)
        self.out = linear(config.width, config.width)

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        B, L, D = x_BxLxD.shape
        qkv_BxLx3xNxK = self.qkv(x_BxLxD).reshape(B, L, 3, self.heads, -1)
        q, k, v = (qkv_BxLx3xNxK[:, :, i] for i in range(3))
        scores_BxNxLxL = jnp.einsum(
            "BQNK,BTNK->BNQT", q, k, preferred_element_type=jnp.float32
        )
        scale = (D // self.heads) ** -0.5
        shares_BxNxLxL = jax.nn.softmax(scores_BxNxLxL * scale).astype(v.dtype)
        y_BxLxNxK = jnp.einsum("BNQT,BTNK->BQNK", shares_BxNxLxL, v)
        return self.out(y_BxLxNxK.reshape(B, L, D))


class Block(nnx.Module):
    """Pre-norm encoder block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        self.norm_attention = nnx.LayerNorm(config.width, rngs=rngs)
        self.attention = Attention(config, rngs=rngs)
        self.norm_mlp = nnx.LayerNorm(config.width, rngs=rngs)
        self.mlp_in = _linear(config, config.width, config.mlp_width, rngs=rngs)
        self.mlp_out = _linear(config, config.mlp_width, config.width, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x_BxLxD: jax.Array, key: jax.Array | None) -> jax.Array:
        """Returns an array like `x_BxLxD`; `key=None` switches the dropout off."""
        keys = (None, None) if key is None else jax.random.split(key)
        y_BxLxD = self.attention(self.norm_attention(_float32(x_BxLxD)))
        x_BxLxD = x_BxLxD + self._drop(y_BxLxD, keys[0])
        y_BxLxF = nnx.gelu(self.mlp_in(self.norm_mlp(_float32(x_BxLxD))))
        return x_BxLxD + self._drop(self.mlp_out(y_BxLxF), keys[1])

    def _drop(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        return self.dropout(x, deterministic=key is None, rngs=key)


class ViT(nnx.Module):
    """Images to class logits.

    Args:
      config: the sizes.
      recompute: run each block under `jax.checkpoint`, so that the backward pass
        computes its inner activations again instead of keeping them.
      rngs: the source of the initial parameters.
    """

    def __init__(
        self, config: ViTConfig, *, recompute: bool = False, rngs: nnx.Rngs
    ) -> None:
        self.config = config
        self.recompute = recompute
        D, P = config.width, config.patch_size
        self.patches = _linear(config, P * P * config.channels, D, rngs=rngs)
        init = nnx.initializers.normal(0.02)
        self.positions = nnx.Param(init(rngs.params(), (config.tokens, D)))
        if config.pool == "token":
            self.token = nnx.Param(jnp.zeros((1, D)))
        self.dropout = nnx.Dropout(config.dropout)
        self.blocks = nnx.List(Block(config, rngs=rngs) for _ in range(config.depth))
        self.norm = nnx.LayerNorm(D, rngs=rngs)
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
        x_BxLxD = self._embed(images_BxHxWxC)
        keys = [None] * (len(self.blocks) + 1)
        if key is not None:
            keys = list(jax.random.split(key, len(keys)))
        if keys[-1] is not None:
            x_BxLxD = self.dropout(x_BxLxD, deterministic=False, rngs=keys[-1])
        apply = nnx.remat(Block.__call__) if self.recompute else Block.__call__
        for block, block_key in zip(self.blocks, keys[:-1], strict=True):
            x_BxLxD = apply(block, x_BxLxD, block_key)
        x_BxLxD = self.norm(_float32(x_BxLxD))
        token = self.config.pool == "token"
        x_BxD = x_BxLxD[:, 0] if token else x_BxLxD.mean(axis=1)
        return self.head(x_BxD)

    def _embed(self, images_BxHxWxC: jax.Array) -> jax.Array:
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
        return x_BxLxD + self.positions[None].astype(x_BxLxD.dtype)


def _float32(x: jax.Array) -> jax.Array:
    # A sum over a thousand features needs more than the 8 bits of a bfloat16.
    return x.astype(jnp.float32)


def patchify(images_BxHxWxC: jax.Array, patch_size: int) -> jax.Array:
    """Cuts images into flat patches: [B, H, W, C] -> [B, (H/P)(W/P), P*P*C]."""
    B, H, W, C = images_BxHxWxC.shape
    P = patch_size
    x = images_BxHxWxC.reshape(B, H // P, P, W // P, P, C)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(B, -1, P * P * C)


def _linear(config: ViTConfig, d_in: int, d_out: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        d_in,
        d_out,
        dtype=jnp.dtype(config.dtype),
        kernel_init=nnx.initializers.xavier_uniform(),
        rngs=rngs,
    )
