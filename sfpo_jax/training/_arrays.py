"""Arrays to disk and back by Orbax, with what it refuses: empty arrays, typed keys."""

import contextlib
import errno
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def reserve(folder: Path, state: Any) -> None:
    """Raises OSError where the arrays do not fit, before Orbax's threads find out.

    Those would fail one after another, in many pages, some after the folder is gone.
    """
    needed = sum(leaf.nbytes for leaf in _by_number(state).values())
    if needed > shutil.disk_usage(folder).free:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    # The free space says nothing about quotas; not every system can reserve.
    if needed and hasattr(os, "posix_fallocate"):
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, needed)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what Orbax's threads log to themselves: its error reaches the caller."""
    logger = logging.getLogger("absl")

    def drop(record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


def save_arrays(path: Path, state: Any) -> None:
    """Writes the leaves of a tree of jax arrays into a new folder."""
    import orbax.checkpoint as ocp

    with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(_by_number(state)))


def restore_arrays(path: Path, template: Any) -> Any:
    """Reads what `save_arrays` wrote of a tree of the template's leaves.

    Orbax casts where the dtypes differ, so they are compared before.

    Args:
      path: the folder.
      template: arrays, whose shardings those of the result get, and ShapeDtypeStructs
        for those that come back whole, as arrays of the host.
    """
    import orbax.checkpoint as ocp

    wanted = _by_number(template)

    def arguments_of(x: Any) -> Any:
        if isinstance(x, jax.ShapeDtypeStruct):
            return ocp.RestoreArgs(restore_type=np.ndarray)
        return ocp.ArrayRestoreArgs(
            sharding=x.sharding, global_shape=x.shape, dtype=x.dtype
        )

    arguments = {name: arguments_of(x) for name, x in wanted.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(
            path, args=ocp.args.PyTreeRestore(wanted, restore_args=arguments)
        )
    leaves, treedef = jax.tree.flatten(template)
    for number, leaf in enumerate(leaves):
        if _is_key(leaf):
            data, kind = found[f"{number:05d}"], jax.random.key_impl(leaf)
            leaves[number] = jax.random.wrap_key_data(data, impl=kind)
        elif leaf.size:
            leaves[number] = found[f"{number:05d}"]
        else:
            empty = np.zeros(leaf.shape, leaf.dtype)
            leaves[number] = jax.device_put(empty, leaf.sharding)
    return treedef.unflatten(leaves)


def place_as(tree: Any, template: Any) -> Any:
    """Arrays of the host on the devices of the template's; others as they are."""

    def place(x: Any, like: jax.Array) -> jax.Array:
        if isinstance(x, jax.Array):
            return x
        return jax.make_array_from_callback(like.shape, like.sharding, x.__getitem__)

    return jax.tree.map(place, tree, template)


def _by_number(state: Any) -> dict[str, Any]:
    """The leaves that Orbax takes: none that is empty, keys as their integers."""
    return {
        f"{number:05d}": jax.random.key_data(leaf) if _is_key(leaf) else leaf
        for number, leaf in enumerate(jax.tree.leaves(state))
        if leaf.size
    }


def _is_key(leaf: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def check_arrays(state: Any) -> None:
    """Raises TypeError where a tree holds something else than jax arrays."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not isinstance(leaf, jax.Array):
            raise TypeError(
                f"`state`{jax.tree_util.keystr(path)} must be a jax array, got "
                f"{type(leaf).__name__}: use jnp.asarray, or put it into `extra`."
            )
