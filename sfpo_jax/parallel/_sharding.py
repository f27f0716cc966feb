"""Parameters and states cut over mesh axes: which axis of a leaf, and its ways.

ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054): with "states" every
device updates its shard of the parameters and keeps the optimizer state of that alone
(stage 1); with "weights" it keeps only its shard of the parameters, too (stage 3).
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from sfpo_jax.collectives import axis_mean, widen
from sfpo_jax.transforms import is_per_rank

Axes = tuple[str, ...]
Kind = Literal["none", "states", "weights"]
# A shard below this is not worth its collective, nor quantised by 8-bit states.
_MIN_SHARD = 4096
# Blocks of quantised states run along the last axis.
_BLOCK = 256


def shard_axis(shape: Sequence[int], ranks: int) -> int:
    """The axis of a leaf that is cut into `ranks` equal parts; -1: it stays whole.

    The first that divides, the last axis only where shards keep whole blocks of 256.
    """
    if ranks == 1 or math.prod(shape) < ranks * _MIN_SHARD:
        return -1
    for axis, size in enumerate(shape):
        unit = _BLOCK if axis == len(shape) - 1 and len(shape) > 1 else 1
        if size % (ranks * unit) == 0:
            return axis
    return -1


class Layout(NamedTuple):
    """How the leaves of one tree of parameters lie over the shard axes.

    Attributes:
      kind: what is sharded.
      axes: mesh axes that shards lie along; () with "none".
      ranks: devices along them.
      cuts: a tree of ints, the axis of each leaf that is cut, -1 for none.
    """

    kind: Kind
    axes: Axes
    ranks: int
    cuts: Any

    def full(self, params: Any) -> Any:
        """Whole weights from what this device keeps; inside `shard_map`."""
        if self.kind != "weights":
            return params
        return self._gather(params)

    def own(self, params: Any) -> Any:
        """What this device updates, from what it keeps."""
        if self.kind != "states":
            return params
        rank = lax.axis_index(self.axes)

        def cut_out(cut: int, x: jax.Array) -> jax.Array:
            if cut < 0:
                return x
            size = x.shape[cut] // self.ranks
            return lax.dynamic_slice_in_dim(x, rank * size, size, cut)

        return jax.tree.map(cut_out, self.cuts, params)

    def kept(self, updated: Any) -> Any:
        """What this device keeps, from what it updated."""
        return self._gather(updated) if self.kind == "states" else updated

    def reduce(self, grads: Any, dense: Axes) -> Any:
        """The mean gradient of what this device updates.

        Args:
          grads: whole gradients of this rank's batch.
          dense: axes to average over besides the shard axes.
        """
        leaves, treedef = jax.tree.flatten(grads)
        cuts = jax.tree.leaves(self.cuts)
        for place, (leaf, cut) in enumerate(zip(leaves, cuts, strict=True)):
            if self.axes and cut >= 0 and _is_float(leaf):
                part = lax.psum_scatter(
                    widen(leaf), self.axes, scatter_dimension=cut, tiled=True
                )
                scale = np.asarray(1 / self.ranks, part.dtype)
                leaves[place] = (part * scale).astype(leaf.dtype)
        whole = [i for i, c in enumerate(cuts) if c < 0 and _is_float(leaves[i])]
        parts = [i for i, c in enumerate(cuts) if c >= 0 and _is_float(leaves[i])]
        for places, axes in ((whole, (*self.axes, *dense)), (parts, dense)):
            if axes and places:
                means = axis_mean([leaves[i] for i in places], axes)
                for place, mean in zip(places, means, strict=True):
                    leaves[place] = mean
        return treedef.unflatten(leaves)

    def lead(self, state: Any) -> Any:
        """Puts an axis of the shards in front of every array of a device's state."""
        return jax.tree.map(lambda x: x[None], state) if self.axes else state

    def unlead(self, state: Any) -> Any:
        """The inverse of `lead`."""
        return jax.tree.map(lambda x: x[0], state) if self.axes else state

    def param_specs(self, leading: int = 0) -> Any:
        """PartitionSpecs of the parameters, behind `leading` axes of a stack."""
        return jax.tree.map(lambda cut: self._spec(cut, leading), self.cuts)

    def state_specs(self, state: Any, reduces: Axes, leading: int = 0) -> Any:
        """PartitionSpecs of a state that `lead` returned.

        Args:
          state: the state of a transformation, only its structure is read.
          reduces: the axes the transformation reduces over.
          leading: axes of a stack in front.
        """
        shards = (self.axes,) if self.axes else ()

        def spec(node: Any) -> Any:
            own = (reduces,) if is_per_rank(node) and reduces else ()
            found = PartitionSpec(*[None] * leading, *shards, *own)
            return jax.tree.map(lambda _: found, node)

        return jax.tree.map(spec, state, is_leaf=is_per_rank)

    def _spec(self, cut: int, leading: int) -> PartitionSpec:
        if cut < 0 or self.kind != "weights":
            return PartitionSpec()
        return PartitionSpec(*[None] * (leading + cut), self.axes)

    def _gather(self, shards: Any) -> Any:
        def gather(cut: int, x: jax.Array) -> jax.Array:
            if cut < 0:
                return x
            return lax.all_gather(x, self.axes, axis=cut, tiled=True)

        return jax.tree.map(gather, self.cuts, shards)


def check_shard(kind: str, axes: Axes, mesh: Mesh) -> None:
    """Raises ValueError for what cannot be sharded so."""
    if kind not in ("none", "states", "weights"):
        raise ValueError(
            f'`shard` must be "none", "states" or "weights", got {kind!r}.'
        )
    batch = [axis for axis in mesh.axis_names if axis != "op"]
    if kind != "none" and not (axes and set(axes) <= set(batch)):
        raise ValueError(
            f"`shard_axes` must name batch axes of the mesh, {batch}, got {axes!r}."
        )


def make_layout(
    params: Any, kind: Kind, axes: Axes, mesh: Mesh, leading: int = 0
) -> Layout:
    """The layout of a tree of whole parameters, behind `leading` axes of a stack.

    Args:
      params: arrays or ShapeDtypeStructs.
      kind: what is sharded.
      axes: mesh axes that shards lie along.
      mesh: the mesh that has them.
      leading: axes of a stack in front.
    """
    if kind == "none":
        axes = ()
    ranks = math.prod(mesh.shape[axis] for axis in axes)
    cuts = jax.tree.map(
        lambda x: shard_axis(x.shape[leading:], ranks) if _is_float(x) else -1, params
    )
    return Layout(kind, axes, ranks, cuts)


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))
