"""Checkpoints: the whole state of a run in folders that are complete or not there.

Orbax writes the arrays. Around it: a temporary folder, a manifest, one rename; a check
of every byte before a restore; and the checkpoint before where that check fails.
"""

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from sfpo_jax._validate import check_at_least
from sfpo_jax.training._manifest import (
    CheckpointError,
    DamageError,
    check_leaves,
    describe,
    read_manifest,
    sync_folder,
    verify,
    write_manifest,
)

_STEP = re.compile(r"step_([0-9]+)")
_SAVING, _DELETING = ".saving-", ".deleting-"
_ARRAYS, _REST = "arrays", "rest.json"


class Restored(NamedTuple):
    """What a checkpoint gave back."""

    state: Any  # arrays on the devices of the template
    data_state: Any  # as it was passed to `save`
    extra: Any  # as it was passed to `save`


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=4)


class Checkpoints:
    """The checkpoints of one run, in `folder/step_00000100` and so on.

    One process at a time may use a folder. What an earlier one left unfinished is
    removed here; a name that begins with `step_` always was complete.

    Args:
      folder: where they lie; made when the first is saved.
      keep: how many; the oldest goes when the newest is on the disk. From 2 on, damage
        to one costs no more than the steps since the one before.
      warn: takes the one line about damaged checkpoints that were passed over; the
        default gives a Python warning.

    Raises:
      ValueError: `keep` below 1.

    Example:
      >>> import tempfile, jax.numpy as jnp
      >>> checkpoints = Checkpoints(tempfile.mkdtemp(), keep=2)
      >>> for step in (10, 20, 30):
      ...     checkpoints.save(step, {"w": jnp.full(3, step)}, {"taken": step})
      >>> checkpoints.steps()
      [20, 30]
      >>> state, data_state, extra = checkpoints.restore({"w": jnp.zeros(3, int)})
      >>> state["w"].tolist(), data_state
      ([30, 30, 30], {'taken': 30})
    """

    def __init__(
        self,
        folder: str | Path,
        keep: int = 3,
        *,
        warn: Callable[[str], None] = _warn,
    ) -> None:
        check_at_least("keep", keep, 1, "the number of checkpoints that stay")
        # Orbax wants the whole path.
        self.folder = Path(folder).absolute()
        self._keep = keep
        self._warn = warn
        for prefix in (_SAVING, _DELETING):
            for debris in self.folder.glob(f"{prefix}*"):
                _discard(debris)

    def steps(self) -> list[int]:
        """Steps of all checkpoints, the oldest first, unchecked."""
        names = [p.name for p in self.folder.glob("step_*") if p.is_dir()]
        return sorted(int(m[1]) for m in map(_STEP.fullmatch, names) if m)

    def save(
        self, step: int, state: Any, data_state: Any = None, extra: Any = None
    ) -> None:
        """Saves everything, and returns when it is on the disk.

        A checkpoint of this step is replaced, and later ones, which an abandoned
        continuation left, are removed with the oldest.

        Args:
          step: steps taken.
          state: a pytree of jax arrays, typed random keys and empty arrays among them.
          data_state: what a data iterator's `get_state` gave; goes through JSON.
          extra: anything else that goes through JSON.

        Raises:
          CheckpointError: it could not be written, e.g. for lack of space; what was
            begun is removed, and the earlier checkpoints are untouched.
          TypeError: `state` holds something else than jax arrays, or `data_state` or
            `extra` something that JSON has no form for.
        """
        _check_state(state)
        rest = json.dumps({"data_state": data_state, "extra": extra})
        draft = self.folder / f"{_SAVING}{step}"
        try:
            _discard(draft)
            draft.mkdir(parents=True)
            _reserve(draft, state)
            _save_arrays(draft / _ARRAYS, state)
            (draft / _REST).write_text(rest, encoding="utf-8")
            write_manifest(draft, step, describe(state))
            self._commit(draft, step)
        # TensorStore has errors of its own for what the file system refuses.
        except Exception as error:
            raise CheckpointError(self._cannot_save(step, error)) from error
        finally:
            _discard(draft)
        kept = [s for s in self.steps() if s <= step][-self._keep :]
        for other in self.steps():
            if other not in kept:
                self._remove(other)

    def restore(self, template: Any) -> Restored | None:
        """Reads the newest checkpoint whose every byte is as it was written.

        Args:
          template: a state of the same structure, shapes and dtypes; the arrays of
            the result are sharded as its are.

        Returns:
          State, data state and extra, or None where there is no checkpoint.

        Raises:
          CheckpointError: the checkpoint is of another tree, shape or dtype; or there
            are checkpoints and all are damaged.
          TypeError: the template holds something else than jax arrays.
        """
        _check_state(template)
        damaged = []
        for step in reversed(self.steps()):
            folder = self._path(step)
            try:
                manifest = read_manifest(folder)
                verify(folder, manifest)
            except DamageError as error:
                damaged.append(f"{folder.name}/{error}")
                continue
            if damaged:
                self._warn(
                    f"damaged checkpoint in {self.folder}: {'; '.join(damaged)}; "
                    f"going on from step {step}"
                )
            check_leaves(manifest.leaves, describe(template), str(folder))
            rest = json.loads((folder / _REST).read_text(encoding="utf-8"))
            return Restored(_restore_arrays(folder / _ARRAYS, template), **rest)
        if damaged:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be used: {'; '.join(damaged)}. "
                "Put back a copy, or delete the folder to begin anew."
            )
        return None

    def _commit(self, draft: Path, step: int) -> None:
        if step in self.steps():
            self._remove(step)
        draft.rename(self._path(step))
        sync_folder(self.folder)

    def _remove(self, step: int) -> None:
        # Renamed first: a half-deleted folder must not look like a damaged checkpoint.
        doomed = self.folder / f"{_DELETING}{step}"
        self._path(step).rename(doomed)
        _discard(doomed)

    def _path(self, step: int) -> Path:
        return self.folder / f"step_{step:08d}"

    def _cannot_save(self, step: int, error: Exception) -> str:
        cause = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        if code := re.search(r"os_error_code='([0-9]+)'", str(error)):
            # TensorStore names files and settings for half a page around it.
            cause = os.strerror(int(code[1]))
        steps = self.steps()
        last = f"step {steps[-1]} is the last one" if steps else "there is no other"
        return (
            f"the checkpoint of step {step} cannot be written to {self.folder}: "
            f"{cause or type(error).__name__}; {last}: free some space or keep fewer "
            "checkpoints, and resume."
        )


def _discard(folder: Path) -> None:
    """Removes a folder in which TensorStore's threads may still be writing."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.02)


def _reserve(folder: Path, state: Any) -> None:
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


def _save_arrays(path: Path, state: Any) -> None:
    import orbax.checkpoint as ocp

    with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(_by_number(state)))


def _restore_arrays(path: Path, template: Any) -> Any:
    import orbax.checkpoint as ocp

    wanted = _by_number(template)
    arguments = {
        name: ocp.ArrayRestoreArgs(
            sharding=x.sharding, global_shape=x.shape, dtype=x.dtype
        )
        for name, x in wanted.items()
    }
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


def _by_number(state: Any) -> dict[str, jax.Array]:
    """The leaves that Orbax takes: none that is empty, keys as their integers."""
    return {
        f"{number:05d}": jax.random.key_data(leaf) if _is_key(leaf) else leaf
        for number, leaf in enumerate(jax.tree.leaves(state))
        if leaf.size
    }


def _is_key(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _check_state(state: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if not isinstance(leaf, jax.Array):
            raise TypeError(
                f"`state`{jax.tree_util.keystr(path)} must be a jax array, got "
                f"{type(leaf).__name__}: use jnp.asarray, or put it into `extra`."
            )
