"""State that differs between ranks, and which leaves of a tree have state at all."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from sfpo_jax._validate import check_real
from sfpo_jax.collectives import (
    AxisName,
    WireLayout,
    axis_size,
    is_bound,
    mesh_axis_size,
    varies,
    vary,
)
from sfpo_jax.transforms._moments import zeros_moment
from sfpo_jax.units import parse_bytes

MaskOrFn = Any | Callable[[Any], Any] | None


class PerRank(NamedTuple):
    """Marks state of which every rank of the axis has its own.

    With an axis, every array in `tree` has a leading axis: the mesh axis' size where
    the state was made outside `shard_map`, 1 inside.

    Attributes:
      tree: the arrays.
      layout: of the server's errors, a `WireLayout`; () for a rank's own errors, which
        have the shapes of the leaves.
    """

    tree: Any
    layout: Any = ()


def is_per_rank(node: Any) -> bool:
    """True for a `PerRank`; the `is_leaf` of `jax.tree.map`."""
    return isinstance(node, PerRank)


def state_specs(opt_state: Any, axis_name: AxisName) -> Any:
    """PartitionSpecs of an optimizer state for `shard_map` and `NamedSharding`.

    Args:
      opt_state: the state of any Optax transformation, SFPO's or one that wraps them,
        or its `jax.eval_shape`.
      axis_name: the mesh axis the transformations reduce over.

    Returns:
      A tree of the same structure: `P(axis_name)` for error-feedback residuals, which
      differ between ranks, `P()` for the rest.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> tx = sfpo.sparsify(0.9, error_feedback=True, axis_name="data")
      >>> with jax.set_mesh(sfpo.make_mesh()):
      ...     state = tx.init({"w": jnp.zeros(2048)})
      >>> sfpo.state_specs(state, "data").residual.tree["w"]
      P('data',)
    """

    def spec(node: Any) -> Any:
        if is_per_rank(node):
            return jax.tree.map(lambda _: PartitionSpec(axis_name), node)
        return PartitionSpec()

    return jax.tree.map(spec, opt_state, is_leaf=is_per_rank)


def zeros_per_rank(
    shapes: Sequence[tuple[int, ...]], kind: Any, work: Any, axis_name: AxisName
) -> list[Any]:
    """A node of zeros of each shape, behind the leading axis that `PerRank` describes.

    `kind` is how it is kept and `work` the dtype of the arithmetic, as in `_moments`.
    """
    zeros = [zeros_moment(shape, kind, work) for shape in shapes]
    if axis_name is None:
        return zeros
    ranks = 1 if is_bound(axis_name) else mesh_axis_size(axis_name)
    zeros = jax.tree.map(lambda x: jnp.zeros((ranks, *x.shape), x.dtype), zeros)
    return vary(zeros, axis_name) if is_bound(axis_name) else zeros


def zeros_server_error(
    layout: WireLayout, kind: Any, work: Any, axis_name: AxisName
) -> PerRank:
    """The server error of each bucket's groups: this rank's rows, [rows / N, width]."""
    ranks = mesh_axis_size(axis_name)
    tree = tuple(
        tuple(
            zeros_per_rank(
                [(group.rows // ranks, group.width) for group in bucket.groups],
                kind,
                work,
                axis_name,
            )
        )
        for bucket in layout.buckets(ranks)
    )
    return PerRank(tree, layout)


def own(arrays: Any, axis_name: AxisName) -> Any:
    """This rank's part of per-rank arrays: drops the leading axis."""
    if axis_name is None:
        return arrays
    return jax.tree.map(lambda x: x.reshape(x.shape[1:]), arrays)


def per_rank(arrays: Any, axis_name: AxisName) -> Any:
    """Puts the leading axis back."""
    if axis_name is None:
        return arrays
    return vary(jax.tree.map(lambda x: x[None], arrays), axis_name)


def warn_if_reduced(leaves: Sequence[jax.Array], axis_name: AxisName) -> None:
    """Warns where `shard_map` knows that gradients are alike on all ranks already.

    Differentiating a replicated parameter inside `shard_map`, its checks on, inserts
    the dense all-reduce by itself, and a sum at that.
    """
    if axis_name is None or axis_size(axis_name) == 1:
        return
    if leaves and not any(varies(leaf, axis_name) for leaf in leaves):
        warnings.warn(
            f"the gradients are alike on all ranks of {axis_name!r}: they have been "
            "reduced densely, and nothing is saved on the wire. Differentiate "
            "parameters marked by `jax.lax.pcast(params, axis_name, to='varying')`, or "
            "use `shard_map(..., check_vma=False)` or `sfpo_jax.make_train_step`.",
            stacklevel=3,
        )


class Selection(NamedTuple):
    """The leaves of a tree a transformation works on: floating, not empty, chosen.

    The others pass through it untouched and have no state: `optax.MaskedNode()` stands
    in their place.
    """

    treedef: Any
    leaves: list[Any]
    places: tuple[int, ...]

    def chosen(self) -> list[jax.Array]:
        """The leaves worked on."""
        return [self.leaves[i] for i in self.places]

    def sizes(self) -> list[int]:
        """Entries of each of them."""
        return [leaf.size for leaf in self.chosen()]

    def shapes(self) -> list[tuple[int, ...]]:
        """Shape of each of them."""
        return [leaf.shape for leaf in self.chosen()]

    def working_dtype(self) -> Any:
        """The precision of the arithmetic: float32, float64 if any leaf is float64."""
        is_wide = any(leaf.dtype == jnp.float64 for leaf in self.chosen())
        return jnp.dtype(jnp.float64 if is_wide else jnp.float32)

    def widened(self) -> list[jax.Array]:
        """The leaves worked on, in that precision."""
        return [leaf.astype(self.working_dtype()) for leaf in self.chosen()]

    def replace(self, values: Sequence[jax.Array]) -> Any:
        """The tree with the chosen leaves replaced, each cast to the old dtype."""
        # An empty leaf is alike on all ranks, which new zeros tell `shard_map`.
        leaves = [
            x if jnp.size(x) else jnp.zeros(x.shape, x.dtype) for x in self.leaves
        ]
        for place, value in zip(self.places, values, strict=True):
            leaves[place] = value.astype(leaves[place].dtype)
        return self.treedef.unflatten(leaves)

    def state(self, values: Sequence[Any]) -> Any:
        """A state tree: `values` for the chosen leaves, nothing for the others."""
        nodes: list[Any] = [optax.MaskedNode()] * len(self.leaves)
        for place, value in zip(self.places, values, strict=True):
            nodes[place] = value
        return self.treedef.unflatten(nodes)

    def read(self, state: Any) -> list[Any]:
        """The values `state` put into a state tree."""
        nodes = self.treedef.flatten_up_to(state)
        return [nodes[i] for i in self.places]


def select(tree: Any, mask: MaskOrFn = None) -> Selection:
    """Chooses the floating, non-empty leaves of a tree.

    Args:
      tree: parameters or updates.
      mask: a tree of bools, of the same structure or a prefix of it, or a function from
        the tree to one; True = chosen. None chooses all.

    Raises:
      TypeError: a complex leaf among the chosen.
    """
    leaves, treedef = jax.tree.flatten(tree)
    if callable(mask):
        mask = mask(tree)
    flags = [True] * len(leaves)
    if mask is not None:
        spread = jax.tree.map(
            lambda flag, part: jax.tree.map(lambda _: bool(flag), part), mask, tree
        )
        flags = jax.tree.leaves(spread)
    places = [i for i, x in enumerate(leaves) if flags[i] and _has_gradient(x)]
    picked = [x if flag else 0.0 for x, flag in zip(leaves, flags, strict=True)]
    check_real(treedef.unflatten(picked))
    return Selection(treedef, leaves, tuple(places))


def _has_gradient(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating) and jnp.size(leaf) > 0


def increment(count: jax.Array) -> jax.Array:
    """count + 1, staying at the largest int32."""
    return jnp.asarray(optax.safe_increment(count))


def bucket_entries(bucket_size: str) -> int:
    """Entries of float32 in a size such as "256MB"; UnitError for what is no size."""
    return max(1, parse_bytes(bucket_size, name="bucket_size") // 4)
