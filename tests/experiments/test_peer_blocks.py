"""The blocks of ViT and GPT against those of transformers, on random weights."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from experiments.models.gpt import GPTConfig
from experiments.models.transformer import Block
from experiments.models.vit import ViTConfig

# transformers 5.24.0's ViTLayer and GPT2Block of normal random weights, with the tanh
# form of GELU and LayerNorms of 1e-6: these, the input x [2, 5, 16], and the outputs.
PEER = Path(__file__).with_name("blocks_peer.safetensors")
VIT = {
    "norm_attention": "layernorm_before",
    "qkv": ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "out": "attention.o_proj",
    "norm_mlp": "layernorm_after",
    "mlp_in": "mlp.fc1",
    "mlp_out": "mlp.fc2",
}
GPT = {
    "norm_attention": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "norm_mlp": "ln_2",
    "mlp_in": "mlp.c_fc",
    "mlp_out": "mlp.c_proj",
}


def by_head(parts: list[np.ndarray]) -> np.ndarray:
    """q, k and v [..., heads * K] as columns [heads, 3, K]; two heads."""
    split = [part.reshape(*part.shape[:-1], 2, -1) for part in parts]
    return np.stack(split, axis=-2).reshape(*parts[0].shape[:-1], -1)


@pytest.mark.parametrize(("name", "places"), [("vit", VIT), ("gpt", GPT)])
def test_a_block_computes_what_the_peers_does(name: str, places: dict) -> None:
    held = load_file(PEER)
    sizes: dict[str, Any] = {"width": 16, "heads": 2, "mlp_width": 32}
    if name == "vit":
        config = ViTConfig(image_size=8, patch_size=4, **sizes)
    else:
        config = GPTConfig(length=8, **sizes)
    block = Block(config, is_causal=name == "gpt", rngs=nnx.Rngs(0))

    def read(place: str, end: str) -> np.ndarray:
        array = held[f"{name}.{place}.{end}"]
        # PyTorch's kernels are [out, in], those of GPT-2 [in, out].
        return array.T if name == "vit" else array

    for ours, theirs in places.items():
        is_attention = ours in ("qkv", "out")
        module = getattr(block.attention if is_attention else block, ours)
        for end in ("weight", "bias"):
            if ours == "qkv":
                if isinstance(theirs, str):
                    parts = np.split(read(theirs, end), 3, axis=-1)
                else:
                    parts = [read(place, end) for place in theirs]
                value = by_head(parts)
            else:
                value = read(theirs, end)
            known = {"weight": "scale" if "norm" in ours else "kernel", "bias": "bias"}
            target = getattr(module, known[end])
            assert target.shape == value.shape
            target[...] = jnp.asarray(value)
    found = block(jnp.asarray(held["x"]), None)
    np.testing.assert_allclose(found, held[f"{name}.out"], atol=1e-4)
    assert np.abs(held[f"{name}.out"] - held["x"]).max() > 1
