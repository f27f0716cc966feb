"""The block that the Vision Transformer and the GPT share, and its parts.

Shapes stand in the names: B rows of a batch, L tokens, l tokens of this rank, D width,
N heads, K width of a head, F width of the MLP. With an operator, and its axis bound, L
is op * l, and N and F are this rank's shares; else l is L.

`jax.ad_checkpoint.checkpoint_name` calls what a recompute policy may save: "qkv",
"attention", "middle" (x between attention and MLP), "hidden" (of the MLP) and "block"
(what a block returns).
"""

from collections.abc import Callable
from typing import Any, Literal, Protocol, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from experiments.models.attention import AttentionKind, attend, wide_dtype
from experiments.models.operator import ColumnLinear, RowLinear, rank_key
from sfpo_jax import Operator
from sfpo_jax.collectives import widen

Dtype = Literal["float32", "bfloat16"]
M = TypeVar("M", bound=nnx.Module)
Initializer = Callable[..., jax.Array]
XAVIER = nnx.initializers.xavier_uniform()


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
    def tokens(self) -> int:
        """Tokens of a sequence, at most; of one that is not causal, exactly."""
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
    """Multi-head self-attention with one fused projection for q, k and v.

    Args:
      sizes: of the block.
      is_causal: a token attends to itself and those before it only.
      kernel_init: of the projections.
      rngs: the source of the initial parameters.
    """

    def __init__(
        self,
        sizes: BlockSizes,
        *,
        is_causal: bool = False,
        kernel_init: Initializer = XAVIER,
        rngs: nnx.Rngs,
    ) -> None:
        self.head_width = sizes.width // sizes.heads
        # Nobody looks ahead to the padding at the end of a causal sequence.
        self.is_causal, self.tokens = is_causal, None if is_causal else sizes.tokens
        self.kind: AttentionKind = sizes.attention
        self.qkv = linear(
            sizes,
            sizes.width,
            3 * sizes.width,
            kind=ColumnLinear,
            kernel_init=_by_head(kernel_init, sizes.heads),
            rngs=rngs,
        )
        self.out = linear(
            sizes,
            sizes.width,
            sizes.width,
            kind=RowLinear,
            kernel_init=kernel_init,
            rngs=rngs,
        )

    def __call__(
        self, x_BxlxD: jax.Array, is_live_BxL: jax.Array | None = None
    ) -> jax.Array:
        """[B, l, D]; keys that are not live are not read."""
        qkv_BxLxC = self.qkv(x_BxlxD)
        B, L, _ = qkv_BxLxC.shape
        qkv_BxLxNx3xK = qkv_BxLxC.reshape(B, L, -1, 3, self.head_width)
        q, k, v = (qkv_BxLxNx3xK[:, :, :, i] for i in range(3))
        y_BxLxNxK = attend(
            q,
            k,
            v,
            is_causal=self.is_causal,
            kind=self.kind,
            tokens=None if is_live_BxL is not None else self.tokens,
            is_live_BxL=is_live_BxL,
        )
        y_BxLxC = checkpoint_name(y_BxLxNxK.reshape(B, L, -1), "attention")
        return self.out(y_BxLxC)


def _by_head(init: Initializer, heads: int) -> Initializer:
    """Columns [heads, 3, K]: whole heads lie together, which ranks can share."""

    def draw(key: jax.Array, shape: Any, dtype: Any, **how: Any) -> jax.Array:
        drawn = init(key, shape, dtype, **how).reshape(shape[0], 3, heads, -1)
        return drawn.swapaxes(1, 2).reshape(shape)

    return draw


class Block(nnx.Module):
    """Pre-norm block: x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
      sizes: of the block.
      is_causal: a token attends to itself and those before it only.
      rngs: the source of the initial parameters.
    """

    operator: Operator | None = None

    def __init__(
        self, sizes: BlockSizes, *, is_causal: bool = False, rngs: nnx.Rngs
    ) -> None:
        width, hidden = sizes.width, sizes.mlp_width
        self.norm_attention = layer_norm(sizes, rngs=rngs)
        self.attention = Attention(sizes, is_causal=is_causal, rngs=rngs)
        self.norm_mlp = layer_norm(sizes, rngs=rngs)
        self.mlp_in = linear(sizes, width, hidden, kind=ColumnLinear, rngs=rngs)
        self.mlp_out = linear(sizes, hidden, width, kind=RowLinear, rngs=rngs)
        self.dropout = nnx.Dropout(sizes.dropout)

    def __call__(self, x_BxlxD: jax.Array, key: jax.Array | None) -> jax.Array:
        """Returns an array like `x_BxlxD`; `key=None` switches the dropout off."""
        keys = (None, None)
        if key is not None:
            keys = jax.random.split(rank_key(key, self.operator))
        y_BxlxD = self.attention(self.norm_attention(widen(x_BxlxD)))
        x_BxlxD = x_BxlxD + drop(self.dropout, y_BxlxD, keys[0])
        x_BxlxD = checkpoint_name(x_BxlxD, "middle")
        y_BxLxF = self.mlp_in(self.norm_mlp(widen(x_BxlxD)))
        y_BxLxF = nnx.gelu(checkpoint_name(y_BxLxF, "hidden"))
        x_BxlxD = x_BxlxD + drop(self.dropout, self.mlp_out(y_BxLxF), keys[1])
        return checkpoint_name(x_BxlxD, "block")


def drop(dropout: nnx.Dropout, x: jax.Array, key: jax.Array | None) -> jax.Array:
    """x with some entries dropped, where there is a key."""
    return dropout(x, deterministic=key is None, rngs=key)


def layer_norm(
    sizes: BlockSizes, *, epsilon: float = 1e-6, rngs: nnx.Rngs
) -> nnx.LayerNorm:
    """A LayerNorm in float32 or wider, whatever its parameters are kept in."""
    # A sum over a thousand features needs more than the 8 bits of a bfloat16.
    return nnx.LayerNorm(
        sizes.width, epsilon=epsilon, dtype=wide_dtype(sizes.dtype), rngs=rngs
    )


def cast_weights(model: M, dtype: Dtype) -> M:
    """The model with its parameters in `dtype`; drawn in float32, then rounded."""
    if dtype == "float32":
        return model
    graph, params = nnx.split(model)
    half = jax.tree.map(lambda x: x.astype(jnp.dtype(dtype)), params)
    return nnx.merge(graph, half)


def linear(
    sizes: BlockSizes,
    d_in: int,
    d_out: int,
    *,
    kind: type[nnx.Linear] = nnx.Linear,
    kernel_init: Initializer = XAVIER,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """A dense layer whose arithmetic has the precision of the block."""
    dtype = jnp.dtype(sizes.dtype)
    return kind(d_in, d_out, dtype=dtype, kernel_init=kernel_init, rngs=rngs)
