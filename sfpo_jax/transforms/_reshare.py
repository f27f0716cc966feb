"""State of one number of ranks made that of another: a run goes on with other hosts.

What the ranks have in common stays as it is. Of what each has of its own:

- **a rank's errors** keep their mean, which is what enters the mean of the next step:
  ranks that become one leave it the mean of theirs, a rank that becomes several leaves
  each of them its own, and otherwise all get the mean of all;
- **the server's errors** are of entries, whichever rank serves these: they are taken
  apart into the leaves and cut anew.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sfpo_jax.collectives import WireLayout
from sfpo_jax.kernels import Quantized
from sfpo_jax.transforms._moments import load, store, zeros_moment
from sfpo_jax.transforms._state import PerRank, is_per_rank

# Axes behind that of the ranks, of a server's error: rows and width.
_ROWS = 2


def reshare(saved: Any, template: Any) -> Any:
    """A state with the values of `saved` for the ranks of `template`.

    Args:
      saved: a state, of host arrays where its shapes differ from those of `template`.
      template: a state of which shapes and dtypes are read; it has the same structure,
        see `as_saved`.

    Returns:
      The state; what had to change as arrays of the host, float32 ones rounded once.

    Raises:
      ValueError: arrays whose shapes differ in more than the number of ranks.

    Example:
      >>> two = PerRank({"w": np.array([[1.0], [3.0]], np.float32)})
      >>> one = PerRank({"w": np.zeros((1, 1), np.float32)})
      >>> reshare(two, one).tree["w"].tolist()
      [[2.0]]
    """
    old, treedef = jax.tree.flatten(saved, is_leaf=is_per_rank)
    new = treedef.flatten_up_to(template)
    return treedef.unflatten(
        [
            _node(a, b) if is_per_rank(a) and _shapes(a) != _shapes(b) else a
            for a, b in zip(old, new, strict=True)
        ]
    )


def as_saved(template: Any, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """A state as it was where arrays of these shapes were saved.

    Args:
      template: the state of the ranks there are now.
      shapes: of the saved arrays, by `jax.tree_util.keystr` of their paths.

    Returns:
      The template, with ShapeDtypeStructs for what each rank has of its own where that
      was of other ranks; errors of the server may be cut into other arrays.
    """
    nodes, treedef = jax.tree_util.tree_flatten_with_path(template, is_leaf=is_per_rank)
    return treedef.unflatten(
        [
            _as_saved(node, jax.tree_util.keystr(path), shapes)
            if is_per_rank(node)
            else node
            for path, node in nodes
        ]
    )


def _as_saved(
    node: PerRank, path: str, shapes: Mapping[str, tuple[int, ...]]
) -> PerRank:
    leaves, treedef = jax.tree_util.tree_flatten_with_path(node)
    if not leaves:
        return node
    saved = [shapes.get(path + jax.tree_util.keystr(own)) for own, _ in leaves]
    if isinstance(node.layout, WireLayout):
        if saved[0] is None or saved[0][-_ROWS - 1] == _ranks(node.tree):
            return node
        return node._replace(tree=_server_shapes(node, saved[0][-_ROWS - 1]))
    return treedef.unflatten(
        [
            x
            if shape is None or len(shape) != len(x.shape) or shape == x.shape
            else jax.ShapeDtypeStruct(shape, x.dtype)
            for shape, (_, x) in zip(saved, leaves, strict=True)
        ]
    )


def _server_shapes(node: PerRank, ranks: int) -> Any:
    """The tree of a server's errors of so many ranks, as ShapeDtypeStructs."""
    like = jax.tree.leaves(node.tree, is_leaf=_is_kept)
    stack = _shapes(like)[0][: -_ROWS - 1]
    is_bytes = any(_is_kept(x) for x in like)
    work = jnp.float32 if is_bytes else like[0].dtype

    def shaped(rows: int, width: int) -> Any:
        kind = jnp.dtype(jnp.int8) if is_bytes else work
        kept = jax.eval_shape(lambda: zeros_moment((rows // ranks, width), kind, work))
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*stack, ranks, *x.shape), x.dtype), kept
        )

    return tuple(
        tuple(shaped(group.rows, group.width) for group in bucket.groups)
        for bucket in node.layout.buckets(ranks)
    )


def _ranks(tree: Any) -> int:
    """The ranks that a tree of a server's errors is of."""
    return _shapes(tree)[0][-_ROWS - 1]


def _shapes(tree: Any) -> list[tuple[int, ...]]:
    return [jnp.shape(x) for x in jax.tree.leaves(tree)]


def _node(saved: PerRank, template: PerRank) -> PerRank:
    if isinstance(template.layout, WireLayout):
        tree = _recut(saved.tree, template.tree, template.layout)
        return template._replace(tree=tree)
    tree = jax.tree.map(_worker, saved.tree, template.tree, is_leaf=_is_kept)
    return template._replace(tree=tree)


def _is_kept(x: Any) -> bool:
    return isinstance(x, Quantized)


def _worker(saved: Any, template: Any) -> Any:
    """One leaf's errors, for the ranks of `template`."""
    values = _values(saved)
    wanted = _shapes(template)[0]
    differing = [
        axis
        for axis, (a, b) in enumerate(zip(_shapes(saved)[0], wanted, strict=True))
        if a != b
    ]
    if not differing:
        return saved
    if len(differing) > 1:
        raise ValueError(
            f"a residual of shape {_shapes(saved)[0]} cannot become one of {wanted}: "
            "they differ in more than the number of ranks."
        )
    axis = differing[0]
    moved = np.moveaxis(values, axis, 0)
    return _kept(np.moveaxis(_of_ranks(moved, wanted[axis]), 0, axis), template)


def _of_ranks(errors: np.ndarray, ranks: int) -> np.ndarray:
    """[N, ...] -> [ranks, ...] of the same mean."""
    count = errors.shape[0]
    if count % ranks == 0:
        return errors.reshape(ranks, count // ranks, *errors.shape[1:]).mean(1)
    if ranks % count == 0:
        return np.repeat(errors, ranks // count, axis=0)
    mean = errors.mean(0, keepdims=True)
    return np.repeat(mean, ranks, axis=0)


def _recut(saved: Any, template: Any, layout: WireLayout) -> Any:
    """The server's errors of all buckets, for the ranks of `template`."""
    recut = []
    old, new = layout.buckets(_ranks(saved)), layout.buckets(_ranks(template))
    for place, (before, after) in enumerate(zip(old, new, strict=True)):
        rows = [_values(x) for x in saved[place]]
        stack = rows[0].shape[: -_ROWS - 1]
        joined = [
            x.reshape(-1, group.rows, group.width)
            for x, group in zip(rows, before.groups, strict=True)
        ]
        layers = [
            after.pack_own(before.unpack([jnp.asarray(x[layer]) for x in joined]))
            for layer in range(joined[0].shape[0])
        ]
        wanted: Sequence[Any] = template[place]
        recut.append(
            tuple(
                _kept(
                    np.stack([np.asarray(layer[group]) for layer in layers]).reshape(
                        *stack, *_shapes(like)[0][len(stack) :]
                    ),
                    like,
                )
                for group, like in enumerate(wanted)
            )
        )
    return tuple(recut)


def _values(node: Any) -> np.ndarray:
    """What a node stands for, in float64 where it is of floats."""
    if not _is_kept(node):
        return np.asarray(node).astype(np.float64)
    return np.asarray(load(node, jnp.float32)).astype(np.float64)


def _kept(values: np.ndarray, like: Any) -> Any:
    """Values as a node of the kind of `like` keeps them, on the host."""
    if not _is_kept(like):
        return values.astype(like.dtype)
    return jax.tree.map(np.asarray, store(jnp.asarray(values, jnp.float32), like))
