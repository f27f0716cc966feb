"""Exact attention, by XLA or by cuDNN's fused kernel.

Shapes stand in the names: B rows of a batch, Q = T = L tokens, N heads, K width of a
head.
"""

from typing import Literal

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
) -> jax.Array:
    """softmax(q k^T / sqrt(K)) v, [B, L, N, K] in the dtype of v.

    "xla" makes the scores [B, N, L, L] in float32. "cudnn" never does, but takes half
    precision only; "auto" is cuDNN on a GPU where it applies, else XLA. A recompute
    policy may save q, k and v by the name "qkv".
    """
    arrays = (q_BxLxNxK, k_BxLxNxK, v_BxLxNxK)
    if kind == "cudnn" or (kind == "auto" and _has_cudnn(q_BxLxNxK)):
        q, k, v = (checkpoint_name(x, "qkv") for x in arrays)
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=is_causal, implementation="cudnn"
        )
    L, K = q_BxLxNxK.shape[1], q_BxLxNxK.shape[3]
    # Saved as the products read them: otherwise a stack of layers is kept twice.
    q, k, v = (checkpoint_name(x.transpose(0, 2, 1, 3), "qkv") for x in arrays)
    scores_BxNxLxL = jnp.einsum(
        "BNQK,BNTK->BNQT", q, k, preferred_element_type=jnp.float32
    )
    scores_BxNxLxL = scores_BxNxLxL * K**-0.5
    if is_causal:
        is_past_LxL = jnp.tril(jnp.ones((L, L), bool))
        scores_BxNxLxL = jnp.where(is_past_LxL[None, None], scores_BxNxLxL, -1e30)
    shares_BxNxLxL = jax.nn.softmax(scores_BxNxLxL).astype(v.dtype)
    return jnp.einsum("BNQT,BNTK->BQNK", shares_BxNxLxL, v)


def _has_cudnn(q: jax.Array) -> bool:
    """Whether cuDNN's kernel takes these arrays on the default device."""
    is_half = q.dtype in (jnp.bfloat16, jnp.float16)
    return is_half and q.shape[3] % 8 == 0 and jax.default_backend() == "gpu"
