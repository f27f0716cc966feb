"""Whether a transformation mixes leaves, and so may not work layer by layer."""

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, PartitionSpec

from sfpo_jax.transforms import takes_local_steps

# Large enough for any clipping by a norm to set in, with squares far from overflow.
_SIZE = 1e6
# Entries along an axis of the leaves that are tried.
_LONGEST = 4


def check_unmixed(
    tx: optax.GradientTransformationExtraArgs, params: Any, mesh: Mesh, how: str
) -> None:
    """Refuses a transformation in which one leaf's gradient moves another's update.

    It is tried on one device with small leaves in the tree of `params`: one step, and
    again with the gradient of the first leaf doubled. One that cannot be tried so
    passes, and so does a mix that one step does not show.

    Args:
      tx: any Optax transformation.
      params: arrays or ShapeDtypeStructs.
      mesh: the mesh whose axes `tx` may name.
      how: `tx` would run, for the message.

    Raises:
      ValueError: the updates of other leaves changed.
    """
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    if len(paths) < 2:
        return

    # NumPy's, for JAX would put its own on the devices of a mesh that is set.
    def small(x: Any) -> np.ndarray:
        shape = tuple(min(size, _LONGEST) for size in x.shape)
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return np.zeros(shape, x.dtype)
        wave = np.cos(np.arange(np.prod(shape, dtype=int)))
        return (_SIZE * wave.reshape(shape)).astype(x.dtype)

    leaves, treedef = jax.tree.flatten(jax.tree.map(small, params))

    def updates(*leaves: jax.Array) -> Any:
        grads = treedef.unflatten(leaves)
        return tx.update(grads, tx.init(grads), grads)[0]

    try:
        run = _on_one_device(updates, mesh)
        before = jax.tree.leaves(run(*leaves))
        after = jax.tree.leaves(run(2 * leaves[0], *leaves[1:]))
    except Exception:
        return
    for path, a, b in zip(paths[1:], before[1:], after[1:], strict=True):
        if not np.allclose(a, b, rtol=1e-3, atol=0):
            first, other = (jax.tree_util.keystr(p) for p in (paths[0], path))
            raise ValueError(
                f"`tx` cannot run {how}: the update of {other} changes with the "
                f"gradient of {first}, so what it does depends on which leaves it sees "
                "together. Clip with `max_norm=` in place of a transformation of the "
                "global norm."
            )


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
