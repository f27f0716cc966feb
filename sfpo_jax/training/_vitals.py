"""Signs of a run's health, measured on its state: what `tuning.diagnose` reads."""

import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from sfpo_jax.parallel import checksum
from sfpo_jax.transforms import dequantize, is_quantized

# In the states of optimizers, and what their sizes are called in a record.
_MOMENTS = {"worker_error": "residual", "mu": "momentum", "nu": "variance"}


class Vitals:
    """Sizes of residual and moments, and which parameters never moved.

    `measure` starts a small program and does not wait; `read` does. All processes of a
    run must call both alike.

    Args:
      params: the parameters at first, before any resume.

    Example:
      >>> import optax
      >>> from sfpo_jax.parallel import TrainState
      >>> params = {"used": jnp.ones(4), "idle": jnp.ones(2)}
      >>> vitals = Vitals(params)
      >>> params |= {"used": jnp.zeros(4)}
      >>> vitals.read(vitals.measure(params, optax.adam(1e-3).init(params)))
      {'momentum': 0.0, 'variance': 0.0, 'still': ['idle']}
    """

    def __init__(self, params: Any) -> None:
        paths = jax.tree_util.tree_flatten_with_path(params)[0]
        self._names = [
            jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths
        ]
        self._first = np.asarray(_checksums(params))
        self._measure: Callable[..., Any] = jax.jit(_measure)

    def measure(self, params: Any, opt_state: Any) -> Any:
        """What `read` takes, on its way."""
        return self._measure(params, opt_state)

    def read(self, measured: Any) -> dict[str, Any]:
        """A part of a record.

        Returns:
          Where the optimizer has them `residual` and `momentum`, roots of the mean
          square of an entry, and `variance`, the mean of an entry; `still`, the names
          of the parameters that are what they were at first, bit by bit.
        """
        numbers, sums = jax.device_get(measured)
        alike = np.asarray(sums) == self._first
        found: dict[str, Any] = {name: float(x) for name, x in numbers.items()}
        still = [n for n, is_so in zip(self._names, alike, strict=True) if is_so]
        return found | {"still": still}


def fingerprint(tree: Any) -> str:
    """A few characters that change with any bit of arrays that all devices hold whole.

    Example:
      >>> fingerprint([jnp.ones(3)]) == fingerprint([jnp.ones(3).at[1].set(1.5)])
      False
    """
    sums = np.asarray(_checksums(tree))
    return hashlib.sha256(sums.tobytes()).hexdigest()[:16]


def memory_share() -> float | None:
    """Of the fullest local device, its peak over what JAX may use; None if not told."""
    shares = []
    for device in jax.local_devices():
        stats = device.memory_stats() or {}
        if stats.get("bytes_limit"):
            shares.append(stats["peak_bytes_in_use"] / stats["bytes_limit"])
    return max(shares, default=None)


@jax.jit
def _checksums(params: Any) -> jax.Array:
    return jnp.stack([checksum(x) for x in jax.tree.leaves(params)])


def _measure(params: Any, opt_state: Any) -> tuple[dict[str, jax.Array], jax.Array]:
    found = {}
    for field, name in _MOMENTS.items():
        arrays = [
            x
            for _, node in optax.tree.get_all_with_path(opt_state, field)
            for x in _floats(node)
        ]
        if not arrays:
            continue
        entries = sum(x.size for x in arrays)
        if name == "variance":
            found[name] = sum(jnp.sum(x) for x in arrays) / entries
        else:
            found[name] = jnp.sqrt(
                sum(jnp.sum(jnp.square(x)) for x in arrays) / entries
            )
    return found, _checksums(params)


def _floats(tree: Any) -> list[jax.Array]:
    """The arrays of a tree of moments in float32; none of one kept as signs."""
    nodes = [
        dequantize(x) if is_quantized(x) else x
        for x in jax.tree.leaves(tree, is_leaf=is_quantized)
    ]
    if any(not jnp.issubdtype(x.dtype, jnp.floating) for x in nodes):
        return []
    return [x.astype(jnp.float32) for x in nodes]
