"""What a checkpoint holds, in a file that says so: checked before anything is read.

Orbax gives back data whose bits have flipped, and casts to the dtype it is asked for,
both without a word. So every file is listed with its size and SHA-256, every array
with its place in the tree, its shape and its dtype, and the list with its own SHA-256.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import jax

NAME = "MANIFEST"
_VERSION = 1


class CheckpointError(Exception):
    """A checkpoint that cannot be written or used: one line, with what to do."""


class DamageError(CheckpointError):
    """A file of a checkpoint is not what its manifest says."""


class Leaf(NamedTuple):
    """One array of a saved tree."""

    path: str  # as `jax.tree_util.keystr` writes it
    shape: tuple[int, ...]
    dtype: str  # "float32"; "key<fry>" for a typed random key


class File(NamedTuple):
    """One file of a checkpoint."""

    size: int  # bytes
    sha256: str


class Manifest(NamedTuple):
    """The list of a checkpoint's contents."""

    step: int
    leaves: list[Leaf]
    files: dict[str, File]  # by path below the checkpoint's folder


def describe(tree: Any) -> list[Leaf]:
    """The leaves of a tree of arrays, or of their `jax.ShapeDtypeStruct`s, in order.

    Example:
      >>> import jax.numpy as jnp
      >>> describe({"w": jnp.zeros((2, 3)), "none": None})
      [Leaf(path="['w']", shape=(2, 3), dtype='float32')]
    """
    return [
        Leaf(jax.tree_util.keystr(path), tuple(leaf.shape), str(leaf.dtype))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def write_manifest(folder: Path, step: int, leaves: list[Leaf]) -> None:
    """Lists all files below `folder` in `folder/MANIFEST`, and puts all on the disk.

    The first line is the SHA-256 of the others, which are JSON. It comes last and by
    a rename, so that a manifest that is there speaks of files that are.

    Args:
      folder: the checkpoint, complete but for its manifest.
      step: steps taken.
      leaves: what `describe` says of the saved tree.

    Raises:
      OSError: what the file system says, such as no space left.
    """
    files = {}
    for path in sorted(folder.rglob("*")):
        _sync(path)
        if path.is_file():
            files[path.relative_to(folder).as_posix()] = _file(path)._asdict()
    body = json.dumps(
        {
            "version": _VERSION,
            "step": step,
            "leaves": [leaf._asdict() for leaf in leaves],
            "files": files,
        },
        indent=1,
    ).encode()
    write_atomic(
        folder / NAME, hashlib.sha256(body).hexdigest().encode() + b"\n" + body
    )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
      DamageError: it is missing or not as it was written.
    """
    try:
        digest, _, body = (folder / NAME).read_bytes().partition(b"\n")
    except OSError as error:
        raise DamageError(f"{NAME}: {error.strerror}") from None
    if digest != hashlib.sha256(body).hexdigest().encode():
        raise DamageError(f"{NAME}: its contents do not match its own SHA-256")
    held = json.loads(body)
    if held["version"] != _VERSION:
        raise CheckpointError(
            f"{folder / NAME} has version {held['version']}, this program reads "
            f"{_VERSION}: use the version of sfpo_jax that wrote it."
        )
    return Manifest(
        held["step"],
        [Leaf(x["path"], tuple(x["shape"]), x["dtype"]) for x in held["leaves"]],
        {name: File(**x) for name, x in held["files"].items()},
    )


def verify(folder: Path, manifest: Manifest) -> None:
    """Reads every listed file and compares it.

    Raises:
      DamageError: the first file that is missing or differs.
    """
    for name, wanted in manifest.files.items():
        try:
            found = _file(folder / name)
        except OSError as error:
            raise DamageError(f"{name}: {error.strerror}") from None
        if found.size != wanted.size:
            raise DamageError(f"{name}: {found.size} bytes in place of {wanted.size}")
        if found != wanted:
            raise DamageError(f"{name}: its contents do not match its SHA-256")


def check_leaves(saved: list[Leaf], wanted: list[Leaf], where: str) -> None:
    """Compares what a checkpoint holds with what is to be filled from it.

    Args:
      saved: from the manifest.
      wanted: `describe` of the state to fill.
      where: what to call the checkpoint in messages.

    Raises:
      CheckpointError: the first array that is missing, left over, or of another shape
        or dtype.
    """
    held = {leaf.path: leaf for leaf in saved}
    remedy = "resume with the model, optimizer and devices that the run began with."
    for leaf in wanted:
        found = held.pop(leaf.path, None)
        if found is None:
            raise CheckpointError(f"{where} has no `{leaf.path}`: {remedy}")
        for what in ("shape", "dtype"):
            old, new = getattr(found, what), getattr(leaf, what)
            if old != new:
                raise CheckpointError(
                    f"{where} holds `{leaf.path}` of {what} {old}, wanted {new}: "
                    f"{remedy}"
                )
    for path in held:
        raise CheckpointError(
            f"{where} holds `{path}`, which the state has not: {remedy}"
        )


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file so that its name holds either the old or the new contents."""
    draft = path.with_name(f".{path.name}.tmp")
    try:
        with draft.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Puts the names in a folder on the disk; a rename is not there before."""
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _file(path: Path) -> File:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return File(os.fstat(file.fileno()).st_size, digest)
