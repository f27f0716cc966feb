"""Checkpoints: the whole state of a run in folders that are complete or not there.

Orbax writes the arrays. Around it: a temporary folder, a manifest, one rename; a check
of every byte before a restore; and the checkpoint before where that check fails.
"""

import json
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sfpo_jax._validate import check_at_least
from sfpo_jax.parallel import current_hosts
from sfpo_jax.training._arrays import (
    check_arrays,
    place_as,
    reserve,
    restore_arrays,
    save_arrays,
)
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
from sfpo_jax.transforms import as_saved, reshare

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

    One run at a time may use a folder, which all its hosts see under the same name, and
    all call the same methods. What an earlier run left unfinished is removed here; a
    name that begins with `step_` always was complete.

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
        self._hosts = current_hosts()
        if self._hosts.is_first:
            for prefix in (_SAVING, _DELETING):
                for debris in self.folder.glob(f"{prefix}*"):
                    _discard(debris)
        self._hosts.wait("checkpoints")

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
        check_arrays(state)
        rest = json.dumps({"data_state": data_state, "extra": extra})
        draft = self.folder / f"{_SAVING}{step}"
        try:
            self._on_first("draft", lambda: _begin(draft, state))
            save_arrays(draft / _ARRAYS, state)
            self._on_first("commit", lambda: self._finish(draft, step, state, rest))
        # TensorStore has errors of its own for what the file system refuses.
        except Exception as error:
            raise CheckpointError(self._cannot_save(step, error)) from error
        finally:
            if self._hosts.is_first:
                _discard(draft)

    def _finish(self, draft: Path, step: int, state: Any, rest: str) -> None:
        """Makes a checkpoint of what was drafted, and removes those it outdates."""
        (draft / _REST).write_text(rest, encoding="utf-8")
        write_manifest(draft, step, describe(state))
        self._commit(draft, step)
        kept = [s for s in self.steps() if s <= step][-self._keep :]
        for other in self.steps():
            if other not in kept:
                self._remove(other)

    def _on_first(self, name: str, do: Callable[[], None]) -> None:
        """Runs `do` in the first process while the others wait; errors reach all."""
        if self._hosts.count == 1:
            do()
            return
        failed: list[Exception] = []

        def attempt() -> str:
            try:
                do()
            except Exception as error:
                failed.append(error)
                return str(error) or type(error).__name__
            return ""

        reason = self._hosts.from_first(f"checkpoints/{name}", attempt)
        if failed:
            raise failed[0]
        if reason:
            raise OSError(reason)

    def restore(self, template: Any) -> Restored | None:
        """Reads the newest checkpoint whose every byte is as it was written.

        Residuals of another number of ranks are shared anew, see `transforms.reshare`;
        all else must have the template's shapes.

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
        check_arrays(template)
        # One host reads all files; the others take its word for it.
        step, damaged = self._hosts.from_first("checkpoints/newest", self._newest)
        if step is not None:
            folder = self._path(step)
            if damaged and self._hosts.is_first:
                self._warn(
                    f"damaged checkpoint in {self.folder}: {'; '.join(damaged)}; "
                    f"going on from step {step}"
                )
            manifest = read_manifest(folder)
            held = as_saved(template, {x.path: x.shape for x in manifest.leaves})
            check_leaves(manifest.leaves, describe(held), str(folder))
            rest = json.loads((folder / _REST).read_text(encoding="utf-8"))
            state = restore_arrays(folder / _ARRAYS, held)
            if describe(held) != describe(template):
                state = place_as(reshare(state, template), template)
            return Restored(state, **rest)
        if damaged:
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be used: {'; '.join(damaged)}. "
                "Put back a copy, or delete the folder to begin anew."
            )
        return None

    def _newest(self) -> tuple[int | None, list[str]]:
        """(step of the newest checkpoint that is whole, what is wrong with others)."""
        damaged: list[str] = []
        for step in reversed(self.steps()):
            folder = self._path(step)
            try:
                manifest = read_manifest(folder)
                verify(folder, manifest)
            except DamageError as error:
                damaged.append(f"{folder.name}/{error}")
                continue
            return step, damaged
        return None, damaged

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


def _begin(draft: Path, state: Any) -> None:
    """An empty folder with room for a state."""
    _discard(draft)
    draft.mkdir(parents=True)
    reserve(draft, state)


def check_checkpoint(folder: str | Path) -> int:
    """Reads every file of one checkpoint and compares it with the manifest.

    Args:
      folder: one checkpoint, e.g. `step_00000100`.

    Returns:
      The step it was made after.

    Raises:
      CheckpointError: a file that is missing or differs, by name.
    """
    manifest = read_manifest(Path(folder))
    verify(Path(folder), manifest)
    return manifest.step


def _discard(folder: Path) -> None:
    """Removes a folder in which TensorStore's threads may still be writing."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.02)
