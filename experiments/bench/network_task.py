"""The network that all contenders of `experiments.bench.network` train, and its data.

The first 3 of the 12 blocks of ViT-S (Touvron et al. 2021, arXiv:2012.12877: width 384,
6 heads), on digits of 28 x 28 pixels in patches of 7: 5.35 M parameters, 16 tokens.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from experiments.data.batches import normalization
from experiments.data.images import Images, load_dataset
from experiments.models.vit import ViT, ViTConfig
from experiments.scores import mean_score

VIT = ViTConfig(
    image_size=28,
    patch_size=7,
    channels=1,
    width=384,
    depth=3,
    heads=6,
    mlp_width=1536,
    classes=10,
    pool="mean",
)
TEST_SHARE = 0.2


def create(config: ViTConfig, seed: int = 0) -> Any:
    """The graph of the network, and its parameters."""
    make = jax.jit(lambda key: nnx.split(ViT(config, rngs=nnx.Rngs(key)))[1])
    return make(jax.random.key(seed))


def graph_of(config: ViTConfig) -> Any:
    """What `nnx.merge` takes beside the parameters."""
    shapes = nnx.eval_shape(lambda: ViT(config, rngs=nnx.Rngs(0)))
    return nnx.split(shapes)[0]


def loss_of(config: ViTConfig) -> Any:
    """(parameters, {"images", "labels"}) -> (mean loss, {"accuracy"})."""
    graph = graph_of(config)

    def loss_fn(params: Any, batch: Any) -> Any:
        logits = nnx.merge(graph, params)(batch["images"][..., None])
        return mean_score(logits, batch["labels"])

    return loss_fn


def parameters(config: ViTConfig) -> int:
    """Entries to train."""
    shapes = jax.eval_shape(lambda: create(config))
    return sum(leaf.size for leaf in jax.tree.leaves(shapes))


def named(params: Any) -> dict[str, np.ndarray]:
    """The arrays of a tree by path, e.g. "blocks.0.attention.qkv.kernel"."""
    return {
        ".".join(map(str, path)): np.asarray(leaf[...])
        for path, leaf in nnx.to_flat_state(params)
    }


def filled(config: ViTConfig, weights: Any) -> Any:
    """The tree that `named` took apart, of NumPy arrays."""
    shapes = jax.eval_shape(lambda: create(config))
    flat = [
        (path, leaf.replace(weights[".".join(map(str, path))]))
        for path, leaf in nnx.to_flat_state(shapes)
    ]
    return nnx.from_flat_state(flat)


def write_digits(path: Path, config: ViTConfig, source: str = "mnist5k") -> None:
    """Writes the data, normalised, and the first parameters for `read_digits`."""
    dataset = load_dataset(source, TEST_SHARE)
    scale = normalization(dataset.train.images)

    def floats(images: Images) -> np.ndarray:
        scaled = (images.images[..., 0] / 255 - scale.mean[0]) / scale.std[0]
        return scaled.astype(np.float32)

    weights = {f"w/{name}": x for name, x in named(create(config)).items()}
    arrays: dict[str, Any] = {
        "config": json.dumps(dataclasses.asdict(config)),
        "images": floats(dataset.train),
        "labels": dataset.train.labels,
        "test_images": floats(dataset.test),
        "test_labels": dataset.test.labels,
        **weights,
    }
    np.savez(path, **arrays)
