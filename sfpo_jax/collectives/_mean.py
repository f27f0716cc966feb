"""The exact mean over an axis: small leaves together, large ones each for itself.

A large leaf can be on its way as soon as it is there. XLA joins neighbours, up to some
30 MB, in the order in which they are: what the backward pass makes last is sent last.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from sfpo_jax.collectives._axis import AxisName, axis_size, vary, widen

# Of float32 1 MB, for which no transfer's latency counts; and joining costs a copy.
_LARGE_ENTRIES = 1 << 18
# A transfer gains nothing by being larger: 256 MB.
_JOINED_ENTRIES = 1 << 26


def axis_mean(leaves: Sequence[jax.Array], axis_name: AxisName) -> list[jax.Array]:
    """The mean of each array over the axis, alike on all ranks.

    Args:
      leaves: float arrays of any shapes. They are summed, and sent, in float32 or
        wider: eight float16 of 9,000 add up to an infinity.
      axis_name: the mesh axis, None for one worker.

    Returns:
      Arrays of the same shapes and dtypes.
    """
    if axis_name is None:
        return list(leaves)
    given = leaves
    leaves = vary([widen(x) for x in leaves], axis_name)
    means: list[jax.Array] = list(leaves)
    for places in _runs(leaves):
        flat = [leaves[i].reshape(-1) for i in places]
        joined = flat[0] if len(flat) == 1 else jnp.concatenate(flat)
        joined = lax.psum(joined, axis_name)
        joined = joined * np.asarray(1 / axis_size(axis_name), joined.dtype)
        ends = np.cumsum([x.size for x in flat])[:-1]
        for i, part in zip(places, jnp.split(joined, ends), strict=True):
            means[i] = part.reshape(given[i].shape).astype(given[i].dtype)
    return means


def _runs(leaves: Sequence[jax.Array]) -> list[list[int]]:
    """Places of leaves that travel together: of one dtype, and small."""
    runs = [[i] for i, leaf in enumerate(leaves) if leaf.size >= _LARGE_ENTRIES]
    for dtype in sorted({x.dtype.name for x in leaves}):
        total = _JOINED_ENTRIES + 1
        for place, leaf in enumerate(leaves):
            if leaf.dtype.name != dtype or leaf.size >= _LARGE_ENTRIES:
                continue
            if total + leaf.size > _JOINED_ENTRIES:
                runs.append([])
                total = 0
            runs[-1].append(place)
            total += leaf.size
    return runs
