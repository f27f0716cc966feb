"""A decoder-only transformer in Flax NNX (Radford et al. 2019, "GPT-2").

Pre-norm blocks, learned positions, exact causal attention. Shapes stand in the names:
B windows, L tokens, l tokens of this rank (all without an operator), D width, V
vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.models.attention import AttentionKind, wide_dtype
from experiments.models.operator import rank_key
from experiments.models.transformer import (
    Block,
    Dtype,
    at_least_one,
    check_block_sizes,
    layer_norm,
)
from sfpo_jax import Operator, shard_sequence
from sfpo_jax.collectives import widen


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT; the defaults are a character model that a CPU trains.

    Raises:
      ValueError: where sizes do not fit together, with the key, value and remedy.
    """

    vocabulary: int = 256
    """Tokens to tell apart."""
    length: int = 64
    """Tokens of a window."""
    width: int = 64
    """Features of a token."""
    depth: int = 2
    """Blocks."""
    heads: int = 4
    """Attention heads of a block; divides width."""
    mlp_width: int = 256
    """Features of the hidden layer of each MLP."""
    is_tied: bool = False
    """Predict with the embedding of the tokens, as GPT-2 and GPT-3 do."""
    dropout: float = 0.0
    """Share of activations dropped in training."""
    attention: AttentionKind = "auto"
    """What computes the attention: auto takes cuDNN on a GPU in half precision."""
    dtype: Dtype = "float32"
    """Precision of the arithmetic; LayerNorm and logits stay float32."""
    param_dtype: Dtype = "float32"
    """Precision in which the parameters are kept."""

    def __post_init__(self) -> None:
        for name in ("vocabulary", "length", "depth"):
            at_least_one(name, getattr(self, name))
        check_block_sizes(self)

    @property
    def tokens(self) -> int:
        """Tokens of a sequence, at most."""
        return self.length


class GPT(nnx.Module):
    """Token ids to the logits of the token after each.

    Args:
      config: the sizes.
      recompute: run each block under `jax.checkpoint`, so that the backward pass
        computes its inner activations again instead of keeping them.
      rngs: the source of the initial parameters, float32 (see `cast_weights`).
    """

    operator: Operator | None = None

    def __init__(
        self, config: GPTConfig, *, recompute: bool = False, rngs: nnx.Rngs
    ) -> None:
        self.config = config
        self.recompute = recompute
        init = nnx.initializers.normal(0.02)
        self.tokens = nnx.Param(init(rngs.params(), (config.vocabulary, config.width)))
        self.positions = nnx.Param(init(rngs.params(), (config.length, config.width)))
        self.dropout = nnx.Dropout(config.dropout)
        self.blocks = nnx.List(
            Block(config, is_causal=True, rngs=rngs) for _ in range(config.depth)
        )
        self.norm = layer_norm(config, rngs=rngs)
        if not config.is_tied:
            self.head = nnx.Linear(
                config.width, config.vocabulary, dtype=jnp.float32, rngs=rngs
            )

    def __call__(
        self, ids_BxL: jax.Array, *, key: jax.Array | None = None
    ) -> jax.Array:
        """Float32 logits [B, L, V] of ids int[B, L]; dropout only with a `key`.

        Raises:
          ValueError: windows longer than the configuration's.
        """
        keys = [None] * (len(self.blocks) + 1)
        if key is not None:
            keys = list(jax.random.split(key, len(keys)))
        x_BxlxD = self.embed(ids_BxL, keys[-1])
        apply = nnx.remat(Block.__call__) if self.recompute else Block.__call__
        for block, block_key in zip(self.blocks, keys[:-1], strict=True):
            x_BxlxD = apply(block, x_BxlxD, block_key)
        return self.predict(x_BxlxD)

    def embed(self, ids_BxL: jax.Array, key: jax.Array | None) -> jax.Array:
        """What the first block reads, [B, l, D]; errors are those of a call."""
        length = ids_BxL.shape[1]
        if length > self.config.length:
            raise ValueError(
                f"`ids` must have at most {self.config.length} tokens a window, got "
                f"{length}: raise model.length, or cut the windows"
            )
        x_BxLxD = self.tokens[...][ids_BxL] + self.positions[...][None, :length]
        x_BxLxD = x_BxLxD.astype(jnp.dtype(self.config.dtype))
        x_BxlxD = x_BxLxD
        if self.operator is not None:
            x_BxlxD = shard_sequence(x_BxLxD, self.operator)
        if key is not None:
            key = rank_key(key, self.operator)
            x_BxlxD = self.dropout(x_BxlxD, deterministic=False, rngs=key)
        return x_BxlxD

    def predict(self, x_BxlxD: jax.Array) -> jax.Array:
        """Float32 logits [B, l, V] of what the last block returned."""
        dtype = jnp.dtype(self.config.dtype)
        x_BxlxD = self.norm(widen(x_BxlxD)).astype(dtype)
        is_tied = self.config.is_tied
        kernel_DxV = self.tokens[...].T if is_tied else self.head.kernel[...]
        logits_BxlxV = jnp.einsum(
            "BLD,DV->BLV",
            x_BxlxD,
            kernel_DxV.astype(dtype),
            preferred_element_type=wide_dtype(dtype),
        )
        if is_tied:
            return logits_BxlxV
        assert self.head.bias is not None
        return logits_BxlxV + widen(self.head.bias[...])[None, None]
