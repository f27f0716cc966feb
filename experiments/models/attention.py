"""Exact attention, by XLA or by cuDNN's fused kernel.

Shapes stand in the names: B rows of a batch, Q = T = L tokens, N heads, K width of a
head.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

AttentionKind = Literal["auto", "xla", "cudnn"]


def attend(
    q_BxLxNxK: jax.Array,
    k_BxLxNxK: jax.Array,
    v_BxLxNxK: jax.Array,
    *,
    is_causal: bool,
    kind: AttentionKind,
    tokens: int | None = None,
    is_live_BxL: jax.Array | None = None,
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v, [B, L, N, K] in the dtype of v.

    Keys from `tokens` on, and those that are not live, are padding that nobody reads.

    "xla" makes the scores [B, N, L, L] in float32 or wider. "cudnn" never does, but
    takes half precision only; "auto" is cuDNN on a GPU where it applies, else XLA. A
    recompute policy may save q, k and v by the name "qkv".
    """
    arrays = (q_BxLxNxK, k_BxLxNxK, v_BxLxNxK)
    B, L, _, K = q_BxLxNxK.shape
    keys = L if tokens is None else min(tokens, L)
    if kind == "cudnn" or (kind == "auto" and _has_cudnn(q_BxLxNxK)):
        q, k, v = (checkpoint_name(x, "qkv") for x in arrays)
        mask = lengths = None
        if is_live_BxL is not None:
            mask = jnp.broadcast_to(is_live_BxL[:, None, None], (B, 1, L, L))
        if keys < L:
            lengths = jnp.full((B,), keys, jnp.int32)
        return jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            is_causal=is_causal,
            key_value_seq_lengths=lengths,
            implementation="cudnn",
        )
    # Saved as the products read them: otherwise a stack of layers is kept twice.
    q, k, v = (checkpoint_name(x.transpose(0, 2, 1, 3), "qkv") for x in arrays)
    scores_BxNxLxL = jnp.einsum(
        "BNQK,BNTK->BNQT", q, k, preferred_element_type=wide_dtype(q.dtype)
    )
    scores_BxNxLxL = scores_BxNxLxL * K**-0.5
    if is_causal:
        is_past_LxL = jnp.tril(jnp.ones((L, L), bool))
        scores_BxNxLxL = jnp.where(is_past_LxL[None, None], scores_BxNxLxL, -1e30)
    if keys < L:
        is_token_L = jnp.arange(L) < keys
        scores_BxNxLxL = jnp.where(is_token_L[None, None, None], scores_BxNxLxL, -1e30)
    if is_live_BxL is not None:
        scores_BxNxLxL = jnp.where(is_live_BxL[:, None, None], scores_BxNxLxL, -1e30)
    shares_BxNxLxL = jax.nn.softmax(scores_BxNxLxL).astype(v.dtype)
    return jnp.einsum("BNQT,BNTK->BQNK", shares_BxNxLxL, v)


def wide_dtype(dtype: Any) -> Any:
    """float32, or float64 where that is the arithmetic: of sums over many numbers."""
    return jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32


def _has_cudnn(q: jax.Array) -> bool:
    """Whether cuDNN's kernel takes these arrays on the default device."""
    is_half = q.dtype in (jnp.bfloat16, jnp.float16)
    return is_half and q.shape[3] % 8 == 0 and jax.default_backend() == "gpu"
