"""The block that the Vision Transformer and the GPT share.

Shapes stand in the names: B rows of a batch, L tokens, D width, N heads, K width of a
head, F width of the MLP.

`jax.ad_checkpoint.checkpoint_name` calls what a recompute policy may save: "qkv",
"attention", "middle" (x between attention and MLP) and "hidden" (of the MLP).
"""

import functools
from typing import Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from experiments.models.attention import AttentionKind, attend

Dtype = Literal["float32", "bfloat16"]
M = TypeVar("M", bound=nnx.Module)


class BlockSizes(Protocol):
    """What a block reads of a model's configuration."""

    @property
    def width(self) -> int:
        """Features of a token."""
        ...

    @property
    def heads(self) -> int:
        """Attention heads; divides width."""
        ...

    @property
    def mlp_width(self) -> int:
        """Features of the hidden layer of the MLP."""
        ...

    @property
    def dropout(self) -> float:
        """Share of activations dropped in training."""
        ...

    @property
    def attention(self) -> AttentionKind:
        """What computes the attention."""
        ...

    @property
    def dtype(self) -> Dtype:
        """Precision of the arithmetic."""
        ...


def check_block_sizes(sizes: BlockSizes) -> None:
    """Raises ValueError where sizes do not fit together, with key, value and remedy."""
    for name in ("width", "heads", "mlp_width"):
        at_least_one(name, getattr(sizes, name))
    if sizes.width % sizes.heads:
        raise ValueError(
            f"model.heads must divide model.width, got {sizes.heads} and "
            f"{sizes.width}: each head takes an equal share of the features"
        )
    if not 0 <= sizes.dropout < 1:
        raise ValueError(
            f"model.dropout must lie in [0, 1), got {sizes.dropout}: it is the "
            f"share of activations dropped"
        )


def at_least_one(name: str, value: int) -> None:
    """Raises ValueError for a size of `model` below 1."""
    if value < 1:
        raise ValueError(f"model.{name} must be at least 1, got {value}")


class Attention(nnx.Module):
    """Multi-head self-attention with one fused projection for q, k and v."""

    def __init__(
        self, sizes: BlockSizes, *, is_causal: bool = False, rngs: nnx.Rngs
    ) -> None:
        self.heads, self.is_causal = sizes.heads, is_causal
        self.kind: AttentionKind = sizes.attention
        project = functools.partial(linear, sizes, rngs=rngs)
        self.qkv = project(sizes.width, 3 * sizes.width)
        self.out = project(sizes.width, sizes.width)

    def __call__(self, x_BxLxD: jax.Array) -> jax.Array:
        B, L, D = x_BxLxD.shape
        qkv_BxLx3xNxK = self.qkv(x_BxLxD).reshape(B, L, 3, self.heads, -1)
        q, k, v = (qkv_BxLx3xNxK[:, :, i] for i in range(3))
        y_BxLxNxK = attend(q, k, v, is_causal=self.is_causal, kind=self.kind)
        y_BxLxD = checkpoint_name(y_BxLxNxK.reshape(B, L, D), "attention")
        return self.out(y_BxLxD)


class Block(nnx.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
      sizes: of the block.
      is_causal: a token attends to itself and those before it only.
      rngs: the source of the initial parameters.
    """

    def __init__(
        self, sizes: BlockSizes, *, is_causal: bool = False, rngs: nnx.Rngs
    ) -> None:
        self.norm_attention = layer_norm(sizes.width, rngs=rngs)
        self.attention = Attention(sizes, is_causal=is_causal, rngs=rngs)
        self.norm_mlp = layer_norm(sizes.width, rngs=rngs)
        self.mlp_in = linear(sizes, sizes.width, sizes.mlp_width, rngs=rngs)
        self.mlp_out = linear(sizes, sizes.mlp_width, sizes.width, rngs=rngs)
        self.dropout = nnx.Dropout(sizes.dropout)

    def __call__(self, x_BxLxD: jax.Array, key: jax.Array | None) -> jax.Array:
        """Returns an array like `x_BxLxD`; `key=None` switches the dropout off."""
        keys = (None, None) if key is None else jax.random.split(key)
        y_BxLxD = self.attention(self.norm_attention(as_float32(x_BxLxD)))
        x_BxLxD = x_BxLxD + self._drop(y_BxLxD, keys[0])
        x_BxLxD = checkpoint_name(x_BxLxD, "middle")
        y_BxLxF = self.mlp_in(self.norm_mlp(as_float32(x_BxLxD)))
        y_BxLxF = nnx.gelu(checkpoint_name(y_BxLxF, "hidden"))
        return x_BxLxD + self._drop(self.mlp_out(y_BxLxF), keys[1])

    def _drop(self, x: jax.Array, key: jax.Array | None) -> jax.Array:
        return self.dropout(x, deterministic=key is None, rngs=key)


def as_float32(x: jax.Array) -> jax.Array:
    """What LayerNorm reads."""
    # A sum over a thousand features needs more than the 8 bits of a bfloat16.
    return x.astype(jnp.float32)


def layer_norm(width: int, *, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """A LayerNorm in float32, whatever its parameters are kept in."""
    return nnx.LayerNorm(width, dtype=jnp.float32, rngs=rngs)


def cast_weights(model: M, dtype: Dtype) -> M:
    """The model with its parameters in `dtype`; drawn in float32, then rounded."""
    if dtype == "float32":
        return model
    graph, params = nnx.split(model)
    half = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), params)
    return nnx.merge(graph, half)


def linear(sizes: BlockSizes, d_in: int, d_out: int, *, rngs: nnx.Rngs) -> nnx.Linear:
    """A dense layer whose arithmetic has the precision of the block."""
    return nnx.Linear(
        d_in,
        d_out,
        dtype=jnp.dtype(sizes.dtype),
        kernel_init=nnx.initializers.xavier_uniform(),
        rngs=rngs,
    )
