"""BERT in Flax NNX (Devlin et al. 2019, arXiv:1810.04805).

A bidirectional encoder of post-norm blocks, pretrained to guess words that were hidden
and whether one sentence follows the other, then trained on to classify texts. Shapes
stand in the names: B pairs of sentences, L tokens, l tokens of this rank (all without
an operator), D width, V vocabulary, C classes.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from experiments.models.attention import AttentionKind, wide_dtype
from experiments.models.operator import (
    ColumnLinear,
    RowLinear,
    first_token,
    rank_key,
)
from experiments.models.transformer import (
    Attention,
    Dtype,
    at_least_one,
    check_block_sizes,
    drop,
    layer_norm,
    linear,
)
from sfpo_jax import Operator, shard_sequence
from sfpo_jax.collectives import widen

_EPSILON = 1e-12  # of the published LayerNorms
# x between blocks, [B, l, D], and which of all tokens are no padding, bool[B, L].
Stream = tuple[jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class BERTConfig:
    """Sizes of a BERT; the defaults are BERT-large, uncased.

    Raises:
      ValueError: where sizes do not fit together, with the key, value and remedy.
    """

    task: Literal["pretrain", "classify"] = "pretrain"
    """pretrain: guess hidden words, and whether the second part follows the first;
    classify: tell the class of a text, without the head that guesses words."""
    vocabulary: int = 30522
    """Tokens to tell apart."""
    length: int = 512
    """Tokens of a pair of sentences, at most."""
    types: int = 2
    """Kinds of token: of the first sentence or the second."""
    classes: int = 2
    """What the pooled output tells apart; in pretraining whether the second part is
    another text (1) or follows the first (0)."""
    width: int = 1024
    """Features of a token."""
    depth: int = 24
    """Blocks."""
    heads: int = 16
    """Attention heads of a block; divides width."""
    mlp_width: int = 4096
    """Features of the hidden layer of each MLP."""
    init: float = 0.02
    """Standard deviation of the initial matrices; narrow networks want more."""
    dropout: float = 0.0
    """Share of activations dropped in training; published with 0.1."""
    attention: AttentionKind = "auto"
    """What computes the attention: auto takes cuDNN on a GPU in half precision."""
    dtype: Dtype = "float32"
    """Precision of the arithmetic; LayerNorm and logits stay float32."""
    param_dtype: Dtype = "float32"
    """Precision in which the parameters are kept."""

    def __post_init__(self) -> None:
        for name in ("vocabulary", "length", "types", "classes", "depth"):
            at_least_one(name, getattr(self, name))
        check_block_sizes(self)
        if not self.init > 0:
            raise ValueError(
                f"model.init must be positive, got {self.init}: it is the standard "
                f"deviation of the initial matrices"
            )

    @property
    def tokens(self) -> int:
        """Tokens of a sequence, at most."""
        return self.length

    def initializer(self) -> nnx.Initializer:
        """Of the matrices."""
        return nnx.initializers.truncated_normal(self.init)


class BERTBlock(nnx.Module):
    """Post-norm block: norm(x + attention(x)), then norm(x + mlp(x))."""

    operator: Operator | None = None

    def __init__(self, config: BERTConfig, *, rngs: nnx.Rngs) -> None:
        D, F, init = config.width, config.mlp_width, config.initializer()
        self.attention = Attention(config, kernel_init=init, rngs=rngs)
        self.norm_attention = layer_norm(config, epsilon=_EPSILON, rngs=rngs)
        self.mlp_in = linear(
            config, D, F, kind=ColumnLinear, kernel_init=init, rngs=rngs
        )
        self.mlp_out = linear(config, F, D, kind=RowLinear, kernel_init=init, rngs=rngs)
        self.norm_mlp = layer_norm(config, epsilon=_EPSILON, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, stream: Stream, key: jax.Array | None) -> Stream:
        """Returns a pair like `stream`; `key=None` switches the dropout off."""
        keys = (None, None)
        if key is not None:
            keys = jax.random.split(rank_key(key, self.operator))
        x_BxlxD, is_live_BxL = stream
        dtype = x_BxlxD.dtype
        y_BxlxD = drop(self.dropout, self.attention(x_BxlxD, is_live_BxL), keys[0])
        x_BxlxD = self.norm_attention(widen(x_BxlxD + y_BxlxD)).astype(dtype)
        x_BxlxD = checkpoint_name(x_BxlxD, "middle")
        y_BxLxF = checkpoint_name(self.mlp_in(x_BxlxD), "hidden")
        y_BxlxD = self.mlp_out(nnx.gelu(y_BxLxF, approximate=False))
        y_BxlxD = drop(self.dropout, y_BxlxD, keys[1])
        return self.norm_mlp(widen(x_BxlxD + y_BxlxD)).astype(dtype), is_live_BxL


class BERT(nnx.Module):
    """Token ids to the logits of hidden words and of the class of the whole.

    Args:
      config: the sizes, and which heads there are.
      recompute: run each block under `jax.checkpoint`, so that the backward pass
        computes its inner activations again instead of keeping them.
      rngs: the source of the initial parameters, float32 (see `cast_weights`).
    """

    operator: Operator | None = None

    def __init__(
        self, config: BERTConfig, *, recompute: bool = False, rngs: nnx.Rngs
    ) -> None:
        self.config, self.recompute = config, recompute
        D, V, init = config.width, config.vocabulary, config.initializer()
        self.tokens = nnx.Param(init(rngs.params(), (V, D)))
        self.positions = nnx.Param(init(rngs.params(), (config.length, D)))
        self.types = nnx.Param(init(rngs.params(), (config.types, D)))
        self.norm = layer_norm(config, epsilon=_EPSILON, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)
        self.blocks = nnx.List(
            BERTBlock(config, rngs=rngs) for _ in range(config.depth)
        )
        if config.task == "pretrain":
            self.words = linear(config, D, D, kernel_init=init, rngs=rngs)
            self.norm_words = layer_norm(config, epsilon=_EPSILON, rngs=rngs)
            self.word_bias = nnx.Param(jnp.zeros((V,), jnp.float32))
        self.pooler = linear(config, D, D, kernel_init=init, rngs=rngs)
        self.head = linear(config, D, config.classes, kernel_init=init, rngs=rngs)

    def __call__(
        self,
        ids_BxL: jax.Array,
        types_BxL: jax.Array,
        is_live_BxL: jax.Array,
        *,
        key: jax.Array | None = None,
    ) -> Any:
        """Float32 logits of words [B, l, V] and of classes [B, C]; or the latter alone.

        Args:
          ids_BxL: int[B, L], the tokens.
          types_BxL: int[B, L], the sentence of each.
          is_live_BxL: bool[B, L], False for padding, which nobody reads.
          key: switches the dropout on.

        Raises:
          ValueError: sequences longer than the configuration's.
        """
        keys = [None] * (len(self.blocks) + 1)
        if key is not None:
            keys = list(jax.random.split(key, len(keys)))
        stream = self.embed(ids_BxL, types_BxL, is_live_BxL, keys[-1])
        apply = nnx.remat(BERTBlock.__call__) if self.recompute else BERTBlock.__call__
        for block, block_key in zip(self.blocks, keys[:-1], strict=True):
            stream = apply(block, stream, block_key)
        return self.predict(stream)

    def embed(
        self,
        ids_BxL: jax.Array,
        types_BxL: jax.Array,
        is_live_BxL: jax.Array,
        key: jax.Array | None,
    ) -> Stream:
        """What the first block reads; errors are those of a call."""
        length = ids_BxL.shape[1]
        if length > self.config.length:
            raise ValueError(
                f"`ids` must have at most {self.config.length} tokens a sequence, got "
                f"{length}: raise model.length, or cut the sequences"
            )
        x_BxLxD = self.tokens[...][ids_BxL] + self.types[...][types_BxL]
        x_BxLxD = x_BxLxD + self.positions[...][None, :length]
        if self.operator is not None:
            # The mask stays whole: attention reads the keys of all ranks.
            padding = -length % self.operator.size()
            is_live_BxL = jnp.pad(is_live_BxL, ((0, 0), (0, padding)))
            x_BxLxD = shard_sequence(x_BxLxD, self.operator)
        x_BxlxD = self.norm(widen(x_BxLxD)).astype(jnp.dtype(self.config.dtype))
        if key is not None:
            key = rank_key(key, self.operator)
        return drop(self.dropout, x_BxlxD, key), is_live_BxL

    def predict(self, stream: Stream) -> Any:
        """What a call returns, from what the last block did."""
        if self.config.task == "classify":
            return self.predict_class(stream)
        return self.predict_words(stream), self.predict_class(stream)

    def predict_class(self, stream: Stream) -> jax.Array:
        """Float32 logits of classes [B, C]."""
        x_BxD = jnp.tanh(self.pooler(first_token(stream[0], self.operator)))
        return widen(self.head(x_BxD))

    def predict_words(self, stream: Stream) -> jax.Array:
        """Float32 logits of words [B, l, V]."""
        x_BxlxD, _ = stream
        dtype = jnp.dtype(self.config.dtype)
        y_BxlxD = nnx.gelu(self.words(x_BxlxD), approximate=False)
        y_BxlxD = self.norm_words(widen(y_BxlxD)).astype(dtype)
        words_BxlxV = jnp.einsum(
            "BLD,VD->BLV",
            y_BxlxD,
            self.tokens[...].astype(dtype),
            preferred_element_type=wide_dtype(dtype),
        )
        return words_BxlxV + widen(self.word_bias[...])[None, None]
