"""Parameters cut over the operator axis: which axis of a leaf, and its gradient.

Every rank of the axis computes its part of the same batch's loss, and the objective is
the mean of what the ranks return. Collectives inside the model are differentiated as
linear maps of all ranks' arrays together, which gives the gradient of the sum; so a
leaf that is cut takes 1 / ranks of it, and one that all ranks hold takes their mean.
A model that computes the same on all ranks of the axis fits this as well as one whose
ranks each return the loss of their own tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from sfpo_jax.collectives import axis_mean, is_float, square_norm

Axes = tuple[str, ...]
AXIS = "op"


class OperatorSplit(NamedTuple):
    """How the leaves of one tree of parameters lie over the operator axis.

    Attributes:
      axes: ("op",), or () where nothing is split.
      ranks: devices along it.
      cuts: the axis of each leaf, in their order, that is cut; -1: the leaf is whole.
    """

    axes: Axes
    ranks: int
    cuts: tuple[int, ...]

    def shapes(self, params: Any) -> Any:
        """ShapeDtypeStructs of one rank's part of whole parameters."""

        def part(x: Any, cut: int) -> jax.ShapeDtypeStruct:
            shape = list(x.shape)
            if cut >= 0:
                shape[cut] //= self.ranks
            return jax.ShapeDtypeStruct(tuple(shape), x.dtype)

        leaves, treedef = jax.tree.flatten(params)
        return treedef.unflatten(map(part, leaves, self.cuts_of(leaves)))

    def cuts_of(self, leaves: Sequence[Any]) -> tuple[int, ...]:
        """The cut of each leaf, -1 for all where nothing is split."""
        return self.cuts if self.axes else (-1,) * len(leaves)

    def reduce(self, grads: Any) -> Any:
        """The gradient of the mean over the ranks of what they return.

        Args:
          grads: what differentiation gives on this rank, inside `shard_map`.
        """
        if not self.axes:
            return grads
        leaves, treedef = jax.tree.flatten(grads)
        whole = []
        for place, (leaf, cut) in enumerate(zip(leaves, self.cuts, strict=True)):
            if not is_float(leaf):
                continue
            if cut < 0:
                whole.append(place)
            else:
                leaves[place] = leaf * np.asarray(1 / self.ranks, leaf.dtype)
        means = axis_mean([leaves[place] for place in whole], self.axes)
        for place, mean in zip(whole, means, strict=True):
            leaves[place] = mean
        return treedef.unflatten(leaves)

    def square(self, grads: Any) -> jax.Array:
        """Sum of squares of a reduced gradient, of all its parts."""
        own: list[jax.Array] = []
        shared: list[jax.Array] = []
        leaves = jax.tree.leaves(grads)
        for leaf, cut in zip(leaves, self.cuts_of(leaves), strict=True):
            if is_float(leaf):
                (shared if cut < 0 else own).append(leaf)
        if not own:
            return square_norm(shared)
        parts = lax.psum(square_norm(own), self.axes)
        total = square_norm(shared)
        return parts + total.astype(parts.dtype)


UNSPLIT = OperatorSplit((), 1, ())


def make_split(params: Any, specs: Any, mesh: Mesh) -> OperatorSplit:
    """The split of a tree of whole parameters.

    Args:
      params: arrays or ShapeDtypeStructs.
      specs: a tree like `params` of PartitionSpecs that name "op" or nothing; None
        where no operator is split.
      mesh: the mesh.

    Raises:
      ValueError: specs that do not fit `params`, or sizes that "op" does not divide.
    """
    ranks = mesh.shape.get(AXIS, 1)
    if specs is None or ranks == 1:
        return UNSPLIT
    paths = jax.tree_util.tree_leaves_with_path(params)
    try:
        given = jax.tree.structure(params).flatten_up_to(specs)
    except ValueError as error:
        raise ValueError(
            f"`operator_specs` must be a tree like the parameters: {error}"
        ) from error
    cuts = tuple(
        _cut(jax.tree_util.keystr(path), leaf.shape, spec, ranks)
        for (path, leaf), spec in zip(paths, given, strict=True)
    )
    return OperatorSplit((AXIS,), ranks, cuts)


def _cut(path: str, shape: tuple[int, ...], spec: Any, ranks: int) -> int:
    if not isinstance(spec, PartitionSpec):
        raise ValueError(
            f"`operator_specs` must hold a PartitionSpec for each parameter, got "
            f"{spec!r} for {path}: PartitionSpec() leaves one whole."
        )
    named = [axis for axis, names in enumerate(spec) if names is not None]
    if any(spec[axis] not in (AXIS, (AXIS,)) for axis in named) or len(named) > 1:
        raise ValueError(
            f'`operator_specs` may name the axis "op" once, got {spec} for {path}: '
            "`shard` cuts parameters over the other axes."
        )
    if not named:
        return -1
    axis = named[0]
    if axis >= len(shape) or shape[axis] % ranks:
        raise ValueError(
            f"`operator_specs` cuts axis {axis} of {path}, of shape {list(shape)}, "
            f"into {ranks} parts, which does not divide: choose another size of the "
            'mesh axis "op", or PartitionSpec() for this parameter.'
        )
    return axis
