"""The transformers at sizes that compile in seconds, with batches in float64."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from experiments.models.bert import BERTConfig
from experiments.models.gpt import GPTConfig
from experiments.models.layered import Layered
from experiments.models.vit import ViTConfig
from sfpo_jax.training import PADDING

SIZES: Any = {
    "width": 16,
    "heads": 4,
    "mlp_width": 24,
    "depth": 2,
    "dtype": cast(Any, "float64"),
}
VIT = ViTConfig(image_size=8, patch_size=4, channels=1, classes=3, **SIZES)
# Five tokens: neither two ranks nor four take equal shares without padding.
GPT_CONFIG = GPTConfig(vocabulary=11, length=5, **SIZES)
BERT_CONFIG = BERTConfig(vocabulary=11, length=7, **SIZES)


def images(rows: int, size: int = 8) -> Any:
    rng = np.random.default_rng(1)
    image = rng.normal(size=(rows, size, size, 1))
    return {"image": image, "label": np.arange(rows) % 3}


def windows(rows: int, length: int = 5) -> Any:
    ids = np.random.default_rng(1).integers(0, 11, (rows, length + 1))
    return ids.astype(np.int32)


def pairs(rows: int, length: int = 7) -> Any:
    ids = windows(rows, length - 1)
    labels = np.full((rows, length), PADDING, np.int32)
    # As many on each rank of data, whose losses weigh alike.
    labels[:, [0, 3, 5]] = ids[:, [0, 3, 5]]
    lengths = length - np.arange(rows) % 2
    return {
        "ids": ids,
        "types": (np.arange(length) > 3).astype(np.int32)[None].repeat(rows, 0),
        "is_live": np.arange(length)[None] < lengths[:, None],
        "labels": labels,
        "class": np.array([0, 1, 1, 0], np.int32)[np.arange(rows) % 4],
    }


def random_params(layered: Layered) -> Any:
    """Like the model's, none of them zero."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(layered.init, jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(0.5 * rng.normal(size=x.shape)), shapes)
