"""State of one number of ranks made that of another: a run goes on with other hosts.

What the ranks have in common stays as it is. Of what each has of its own:

- **a rank's errors** keep their mean, which is what enters the mean of the next step:
  ranks that become one leave it the mean of theirs, a rank that becomes several leaves
  each of them its own, and otherwise all get the mean of all;
- **the server's errors** are of entries, whichever rank serves these: they are taken
  apart into the leaves and cut anew.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from sfpo_jax.collectives import WireLayout
from sfpo_jax.kernels import Quantized
from sfpo_jax.transforms._moments import load, store
from sfpo_jax.transforms._state import PerRank, is_per_rank

# Axes behind that of the ranks, of a server's error: rows and width.
_ROWS = 2


def reshare(saved: Any, template: Any) -> Any:
    """A state with the values of `saved` for the ranks of `template`.

    Args:
      saved: a state, of host arrays where its shapes differ from those of `template`.
      template: a state of the same structure, of which shapes and dtypes are read.

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

    def ranks(tree: Any) -> int:
        return _shapes(tree)[0][-_ROWS - 1]

    recut = []
    for place, (before, after) in enumerate(
        zip(layout.buckets(ranks(saved)), layout.buckets(ranks(template)), strict=True)
    ):
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
