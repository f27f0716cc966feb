"""Compressors compiled once a width, for all tests that only run them."""

from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sfpo_jax.compression import Compressor


@cache
def compiled(compressor: Compressor) -> Compressor:
    """The same with one program a width: compiling is what these tests cost.

    Rows do not depend on each other, so their number is padded to fours.
    """

    def in_fours(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        run = jax.jit(function)

        def wrapped(value: Any, live: Any) -> Any:
            count = live.shape[0]
            out = run(jax.tree.map(_pad_to_four, value), _pad_to_four(live))
            return jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)[:count]), out)

        return wrapped

    return compressor._replace(
        encode=in_fours(compressor.encode), decode=in_fours(compressor.decode)
    )


def _pad_to_four(x: Any) -> np.ndarray:
    return np.concatenate([x, np.zeros((-x.shape[0] % 4, *x.shape[1:]), x.dtype)])


def sent(compressor: Compressor, x: np.ndarray) -> np.ndarray:
    """What a receiver knows of x."""
    codec = compiled(compressor)
    payload = codec.compress(jnp.asarray(x))
    return np.asarray(codec.decompress(payload, x.size))
