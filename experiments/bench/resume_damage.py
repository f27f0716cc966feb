"""What a bad disk does to a checkpoint: damage in every file, and no space left."""

import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from sfpo_jax.training import CheckpointError, check_checkpoint


class Outcome(NamedTuple):
    """Cases of one kind, and those that went as promised."""

    what: str
    cases: int
    good: int
    note: str = ""


def damage_every_file(checkpoint: Path, place: Path) -> Outcome:
    """Deletes, halves, zeroes each file, and flips twenty of its bits one by one.

    Args:
      checkpoint: the folder of one checkpoint; not touched.
      place: an empty folder for a copy.
    """
    copy = place / "copy"
    shutil.copytree(checkpoint, copy)
    check_checkpoint(copy)
    files = [path for path in sorted(copy.rglob("*")) if path.is_file()]
    cases = found = 0
    for path in files:
        intact = path.read_bytes()
        for damage in _damages(path.name, len(intact)):
            damage(path)
            cases += 1
            try:
                check_checkpoint(copy)
            except CheckpointError as error:
                found += path.relative_to(copy).as_posix() in str(error)
            path.write_bytes(intact)
    note = f"{len(files)} files: deleted, halved, zeroed, 20 bits flipped one by one"
    return Outcome("damage found and named", cases, found, note)


def _damages(name: str, size: int) -> Iterator[Callable[[Path], None]]:
    yield Path.unlink
    yield lambda path: os.truncate(path, size // 2)
    yield lambda path: _write(path, bytes(size))
    generator = random.Random(name)
    for place in [generator.randrange(8 * size) for _ in range(20)]:

        def flip(path: Path, place: int = place) -> None:
            data = bytearray(path.read_bytes())
            data[place // 8] ^= 1 << place % 8
            _write(path, data)

        yield flip


def _write(path: Path, data: bytes | bytearray) -> None:
    path.write_bytes(data)


def fill_a_disk(
    place: Path, size: int, run: Callable[[Path], subprocess.CompletedProcess[str]]
) -> Outcome:
    """Runs on a file system of `size` bytes in memory, which needs to be root.

    Args:
      place: an empty folder.
      size: bytes; room for some checkpoints of the run, and not for all.
      run: runs with the folder of results given, to its end.
    """
    what = "disk full: said in one line, last checkpoint whole, no debris"
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(mount, check=False).returncode:
        return Outcome(what, 0, 0, "not measured: mounting needs to be root")
    try:
        done = run(place / "run")
        (folder,) = (place / "run" / "checkpoints").iterdir()
        names = sorted(path.name for path in folder.iterdir())
        for name in names:
            check_checkpoint(folder / name)
        is_good = (
            done.returncode == 1
            and len(names) > 0
            and all(name.startswith("step_") for name in names)
            and done.stderr.strip().count("\n") == 0
            and "No space left on device" in done.stderr
        )
        return Outcome(what, 1, int(is_good), f"{len(names)} checkpoints stay")
    finally:
        subprocess.run(["umount", str(place)], check=False)
