"""The folder of a run: configuration, metrics, checkpoints and results."""

import dataclasses
import fcntl
import json
import math
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np

from experiments.contender import Result
from sfpo_jax.parallel import current_hosts
from sfpo_jax.training import (
    Checkpoints,
    Distributed,
    JsonLines,
    Record,
    TensorBoard,
    Train,
    write_atomic,
    write_yaml,
)

CONFIG, METRICS, PROFILE = "config.yaml", "metrics.jsonl", "profile"

# Arrays of a result, which JSON holds as lists.
_CURVES = {"sparsity": np.float32, "phase": np.int8}


class RunFolder:
    """A folder with all that a run needs to go on, and what it has measured.

    Holds config.yaml (the resolved configuration) and metrics.jsonl from the start;
    checkpoints and results.json as it goes; report.md and curves.png come last.

    Args:
      path: the folder, which is there.
      train: `keep` and `tensorboard` are meant.
      lock: from `_lock`, in the process that writes; None in others.
      warn: takes a line about damaged checkpoints.

    Raises:
      ValueError: its results cannot be read.
    """

    def __init__(
        self,
        path: Path,
        train: Train,
        lock: int | None,
        warn: Callable[[str], None] = print,
    ) -> None:
        self.path = path
        self.metrics = JsonLines(path / METRICS)
        self._train = train
        self._warn = warn
        self._lock = lock
        self.results = self._read_results()

    def close(self) -> None:
        """Lets another program use the folder."""
        if self._lock is not None:
            os.close(self._lock)

    def store(self, name: str) -> "ContenderStore":
        """Where the run of one contender is kept."""
        slug = _slug(name)
        checkpoints = Checkpoints(
            self.path / "checkpoints" / slug, self._train.keep, warn=self._warn
        )
        is_wanted = self._train.tensorboard and self._lock is not None
        board = self.path / "tensorboard" / slug if is_wanted else None
        weights = self.path / "weights" / slug
        return ContenderStore(name, self.metrics, checkpoints, board, weights)

    def traces(self, name: str) -> Path:
        """Where the traces of one contender go."""
        return self.path / PROFILE / _slug(name)

    def finish(self, result: Result) -> None:
        """Keeps the result of a contender, which is not run again."""
        self.results[result.name] = result
        if self._lock is None:
            return
        held = [dataclasses.asdict(r) for r in self.results.values()]
        for each in held:
            for name in _CURVES:
                each[name] = each[name].tolist()
        text = json.dumps(held, indent=1) + "\n"
        write_atomic(self._results_path, text.encode())

    @property
    def _results_path(self) -> Path:
        return self.path / "results.json"

    def _read_results(self) -> dict[str, Result]:
        if not self._results_path.exists():
            return {}
        try:
            held = json.loads(self._results_path.read_bytes())
            curves = [
                {name: np.asarray(each[name], dtype) for name, dtype in _CURVES.items()}
                for each in held
            ]
            results = [
                Result(**{**each, **c}) for each, c in zip(held, curves, strict=True)
            ]
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"`{self._results_path}` is damaged: delete it, and what it held is "
                "made again from the checkpoints."
            ) from None
        return {result.name: result for result in results}


class ContenderStore:
    """Where the run of one contender is kept; a context manager."""

    def __init__(
        self,
        name: str,
        metrics: JsonLines,
        checkpoints: Checkpoints,
        board: Path | None,
        weights: Path,
    ) -> None:
        self.checkpoints = checkpoints
        self.weights = weights
        self._name = name
        self._metrics = metrics
        self._board_path = board
        self._board: TensorBoard | None = None

    def rewind(self, done: int, tested: int) -> list[Record]:
        """Drops the contender's records after step `done`, those of tests after step
        `tested`, and returns those that stay."""
        return current_hosts().from_first("records", lambda: self._rewind(done, tested))

    def _rewind(self, done: int, tested: int) -> list[Record]:
        def is_kept(record: Record) -> bool:
            last = tested if "test_accuracy" in record else done
            return record["contender"] != self._name or record["step"] <= last

        self._metrics.rewind(is_kept)
        if self._board_path:
            self._board = TensorBoard(self._board_path, done)
        return [
            {name: math.nan if x is None else x for name, x in record.items()}
            for record in self._metrics.read()
            if record["contender"] == self._name
        ]

    def record(self, record: Record) -> None:
        """Writes a record to metrics.jsonl, and for TensorBoard where it is wanted."""
        if current_hosts().is_first:
            self._metrics.write(record)
        if self._board:
            self._board.write(record)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._board:
            self._board.close()


def open_folder(
    config: Any, train: Train, warn: Callable[[str], None] = print
) -> RunFolder:
    """The folder that `train.resume` or `train.folder` names, or a new one.

    Args:
      config: what goes into config.yaml of a new one, without its place.
      train: its section `train`.
      warn: takes a line about damaged checkpoints.

    Raises:
      ValueError: the folder cannot be made or used, or another program is at work
        in it.
    """
    locks: list[int] = []

    def make() -> str:
        path = _make_folder(train)
        locks.append(_lock(path))
        _write_config(path, config, train)
        # What a stop left half written is cut off before another host reads it.
        JsonLines(path / METRICS)
        return str(path.absolute())

    path = Path(current_hosts().from_first("folder", make))
    return RunFolder(path, train, locks[0] if locks else None, warn)


def _slug(name: str) -> str:
    """A contender's name as that of a file."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def _make_folder(train: Train) -> Path:
    """The folder that a configuration asks for."""
    if train.resume != "none":
        path = Path(train.resume)
    elif train.folder != "none":
        path = Path(train.folder)
    else:
        path = Path(train.runs) / f"{train.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    is_free = train.resume == train.folder == "none"
    return _make(path, "train.runs" if is_free else "train.folder", is_free)


def _write_config(path: Path, config: Any, train: Train) -> None:
    """The configuration into a folder that has none, without its own place."""
    if not (path / CONFIG).exists():
        # Its own name in it would make a run from this file go on with that run.
        place = dataclasses.replace(train, folder="none", resume="none")
        draft = path / ".config.tmp"
        here = dataclasses.replace(config, train=place, distributed=Distributed())
        write_yaml(draft, here)
        write_atomic(path / CONFIG, draft.read_bytes())
        draft.unlink()


def _lock(path: Path) -> int:
    """Keeps other programs out of a folder; returns what to close.

    The system lets go of it when the program ends, in whatever way.
    """
    lock = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ValueError(
            f"`train.folder` must be of one program at a time, got '{path}', where "
            "another is at work: stop that one, or name another folder."
        ) from None
    return lock


def _make(path: Path, key: str, is_free: bool) -> Path:
    """A folder; where the name is free to choose, one that was not there."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not is_free:
            path.mkdir(exist_ok=True)
            others = {p.name for p in path.iterdir()} - {".config.tmp"}
            if others and CONFIG not in others:
                raise ValueError(
                    f"`{key}` must be new, empty or of a run, got '{path}', which "
                    f"holds {min(others)} and no {CONFIG}: name another folder."
                )
            return path
        # Two runs may start within one second.
        for attempt in range(100):
            other = path.with_name(f"{path.name}-{attempt}") if attempt else path
            try:
                other.mkdir()
            except FileExistsError:
                continue
            return other
    except OSError as error:
        where = path.parent if is_free else path
        raise ValueError(
            f"`{key}` cannot be written to, got '{where}': {error.strerror}; "
            "choose another folder."
        ) from None
    raise ValueError(f"`train.name` is taken, got '{path}': wait a second.")
