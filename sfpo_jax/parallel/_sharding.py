"""Parameters and states cut over mesh axes: which axis of a leaf, and its ways.

ZeRO (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054): with "states" every
device updates its shard of the parameters and keeps the optimizer state of that alone
(stage 1); with "weights" it keeps only its shard of the parameters, too (stage 3).
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from sfpo_jax.collectives import axis_mean, is_float, widen
from sfpo_jax.parallel._operator_split import UNSPLIT, OperatorSplit, make_split
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
    """How the leaves of one tree of parameters lie over the mesh.

    The operator axis is split first: shards are cut from one rank's part.

    Attributes:
      kind: what is sharded.
      axes: mesh axes that shards lie along; () with "none".
      ranks: devices along them.
      cuts: a tree of ints, the axis of each leaf that is cut, -1 for none.
      split: how they lie over the operator axis.
    """

    kind: Kind
    axes: Axes
    ranks: int
    cuts: Any
    split: OperatorSplit = UNSPLIT

    @property
    def holders(self) -> Axes:
        """Axes along which devices keep states of different parameters."""
        return (*self.split.axes, *self.axes)

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

    def parts(self) -> list[jax.Array | None]:
        """Which part of each leaf this device updates, None: all do the same."""
        cuts = jax.tree.leaves(self.cuts)
        found = []
        for cut, own in zip(cuts, self.split.cuts_of(cuts), strict=True):
            axes = self.split.axes if own >= 0 else ()
            axes += self.axes if cut >= 0 else ()
            found.append(lax.axis_index(axes) if axes else None)
        return found

    def kept(self, updated: Any) -> Any:
        """What this device keeps, from what it updated."""
        return self._gather(updated) if self.kind == "states" else updated

    def reduce(self, grads: Any, dense: Axes) -> Any:
        """The mean gradient of what this device updates.

        Args:
          grads: gradients of this rank's batch, from `split.reduce`.
          dense: axes to average over besides the shard axes.
        """
        leaves, treedef = jax.tree.flatten(grads)
        cuts = jax.tree.leaves(self.cuts)
        for place, (leaf, cut) in enumerate(zip(leaves, cuts, strict=True)):
            if self.axes and cut >= 0 and is_float(leaf):
                part = lax.psum_scatter(
                    widen(leaf), self.axes, scatter_dimension=cut, tiled=True
                )
                scale = np.asarray(1 / self.ranks, part.dtype)
                leaves[place] = (part * scale).astype(leaf.dtype)
        whole = [i for i, c in enumerate(cuts) if c < 0 and is_float(leaves[i])]
        parts = [i for i, c in enumerate(cuts) if c >= 0 and is_float(leaves[i])]
        for places, axes in ((whole, (*self.axes, *dense)), (parts, dense)):
            if axes and places:
                means = axis_mean([leaves[i] for i in places], axes)
                for place, mean in zip(places, means, strict=True):
                    leaves[place] = mean
        return treedef.unflatten(leaves)

    def lead(self, state: Any) -> Any:
        """Puts an axis of the holders in front of every array of a device's state."""
        return jax.tree.map(lambda x: x[None], state) if self.holders else state

    def unlead(self, state: Any) -> Any:
        """The inverse of `lead`."""
        return jax.tree.map(lambda x: x[0], state) if self.holders else state

    def param_specs(self, leading: int = 0) -> Any:
        """PartitionSpecs of the parameters, behind `leading` axes of a stack."""
        cuts, treedef = jax.tree.flatten(self.cuts)
        own = self.split.cuts_of(cuts)
        return treedef.unflatten(
            [self._spec(*both, leading) for both in zip(cuts, own, strict=True)]
        )

    def state_specs(self, state: Any, reduces: Axes, leading: int = 0) -> Any:
        """PartitionSpecs of a state that `lead` returned.

        Args:
          state: the state of a transformation, only its structure is read.
          reduces: the axes the transformation reduces over.
          leading: axes of a stack in front.
        """
        shards = (self.holders,) if self.holders else ()

        def spec(node: Any) -> Any:
            own = (reduces,) if is_per_rank(node) and reduces else ()
            found = PartitionSpec(*[None] * leading, *shards, *own)
            return jax.tree.map(lambda _: found, node)

        return jax.tree.map(spec, state, is_leaf=is_per_rank)

    def _spec(self, cut: int, own: int, leading: int) -> PartitionSpec:
        if self.kind != "weights":
            cut = -1
        names: list[Any] = [None] * (max(cut, own) + 1)
        if own >= 0:
            names[own] = self.split.axes
        if cut >= 0:
            names[cut] = (*self.split.axes, *self.axes) if cut == own else self.axes
        return PartitionSpec(*[None] * leading, *names) if names else PartitionSpec()

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


def given_axes(reduces: str | Axes | None, mesh: Mesh) -> Axes | None:
    """The argument `reduces` of a step: one axis or several, None to find out.

    Raises:
      ValueError: axes that the batch is not split over.
    """
    if reduces is None:
        return None
    axes = (reduces,) if isinstance(reduces, str) else tuple(reduces)
    batch = [axis for axis in mesh.axis_names if axis != "op"]
    if not set(axes) <= set(batch):
        raise ValueError(
            f"`reduces` must name batch axes of the mesh, {batch}, got {reduces!r}."
        )
    return axes


def make_layout(
    params: Any,
    kind: Kind,
    axes: Axes,
    mesh: Mesh,
    operator_specs: Any = None,
    leading: int = 0,
) -> Layout:
    """The layout of a tree of whole parameters, behind `leading` axes of a stack.

    Args:
      params: arrays or ShapeDtypeStructs.
      kind: what is sharded.
      axes: mesh axes that shards lie along.
      mesh: the mesh that has them.
      operator_specs: a tree of PartitionSpecs over the operator axis, without the axes
        of the stack, or None.
      leading: axes of a stack in front.

    Raises:
      ValueError: specs that do not fit the parameters.
    """
    if kind == "none":
        axes = ()
    ranks = math.prod(mesh.shape[axis] for axis in axes)
    one = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[leading:], x.dtype), params
    )
    split = make_split(one, operator_specs, mesh)
    cuts = jax.tree.map(
        lambda x: shard_axis(x.shape, ranks) if is_float(x) else -1, split.shapes(one)
    )
    return Layout(kind, axes, ranks, cuts, split)
