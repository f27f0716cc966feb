"""Whether a transformation mixes leaves, and so may not work layer by layer."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, PartitionSpec

from sfpo_jax.transforms import takes_local_steps

# Large enough for any clipping by a norm to set in.
_SIZE = 1e6
# Of the largest number whose square is finite: sums of squares are, too.
_SHARE = 1 / 32
# Entries along an axis of the leaves that are tried.
_LONGEST = 4


def check_unmixed(
    tx: optax.GradientTransformationExtraArgs, params: Any, mesh: Mesh, how: str
) -> None:
    """Refuses a transformation in which one leaf's gradient moves another's update.

    It is tried on one device with small leaves in the tree of `params`: one step, and
    again with the gradient of the first leaf of floats doubled. Where there is no other
    such leaf, a pair of them takes its place, of which masks and labels see one. What
    cannot be tried so passes, and so does a mix that one step does not show.

    Args:
      tx: any Optax transformation.
      params: arrays or ShapeDtypeStructs.
      mesh: the mesh whose axes `tx` may name.
      how: `tx` would run, for the message.

    Raises:
      ValueError: the updates of other leaves changed.
    """

    # NumPy's, for JAX would put its own on the devices of a mesh that is set.
    def small(x: Any) -> np.ndarray:
        shape = tuple(min(size, _LONGEST) for size in x.shape)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return np.zeros(shape, x.dtype)
        wave = np.cos(np.arange(np.prod(shape, dtype=int)))
        largest = _SHARE * float(jnp.finfo(x.dtype).max) ** 0.5
        return (min(_SIZE, largest) * wave.reshape(shape)).astype(x.dtype)

    tried = jax.tree.map(small, params)
    is_paired = sum(map(_has_floats, jax.tree.leaves(tried))) == 1
    if is_paired:
        tried = jax.tree.map(lambda x: (x, x) if _has_floats(x) else x, tried)
    leaves, treedef = jax.tree.flatten(tried)
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tried)]
    first = next((i for i, x in enumerate(leaves) if _has_floats(x)), None)
    if first is None:
        return
    doubled = [2 * x if i == first else x for i, x in enumerate(leaves)]

    def updates(*leaves: jax.Array) -> Any:
        grads = treedef.unflatten(leaves)
        return tx.update(grads, tx.init(grads), grads)[0]

    try:
        run = _on_one_device(updates, mesh)
        before = jax.tree.leaves(run(*leaves))
        after = jax.tree.leaves(run(*doubled))
    except Exception:
        return
    for i, (path, a, b) in enumerate(zip(paths, before, after, strict=True)):
        if i != first and not np.allclose(a, b, rtol=1e-3, atol=0, equal_nan=True):
            moving, other = (jax.tree_util.keystr(p) for p in (paths[first], path))
            if is_paired:
                moving, other = jax.tree_util.keystr(paths[first][:-1]), "another leaf"
            raise ValueError(
                f"`tx` cannot run {how}: the update of {other} changes with the "
                f"gradient of {moving}, so what it does depends on which leaves it "
                "sees together. Clip with `max_norm=` in place of a transformation of "
                "the global norm."
            )


def _has_floats(x: np.ndarray) -> bool:
    return x.size > 0 and jnp.issubdtype(x.dtype, jnp.floating)


def _on_one_device(fn: Any, mesh: Mesh) -> Any:
    one = np.array(jax.devices()[:1]).reshape([1] * len(mesh.axis_names))
    axis_types = (AxisType.Auto,) * len(mesh.axis_names)
    single = Mesh(one, mesh.axis_names, axis_types=axis_types)
    sharded = jax.jit(
        jax.shard_map(
            fn,
            mesh=single,
            in_specs=PartitionSpec(),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    )

    def run(*args: Any) -> Any:
        with warnings.catch_warnings(), jax.set_mesh(single):
            warnings.simplefilter("ignore")
            return sharded(*args)

    return run


def check_shared(opt_state: Any) -> None:
    """Raises ValueError for a state whose ranks have parameters of their own."""
    if takes_local_steps(opt_state):
        raise ValueError(
            "`tx` lets ranks take steps of their own (`zero_one_adam`), from whole "
            "parameters and without delay: use `make_train_step` with "
            'shard="none" and staleness=0, or `onebit_adam`.'
        )
