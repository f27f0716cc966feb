"""Metrics as lines of JSON, and to TensorBoard where it is wanted."""

import importlib
import importlib.util
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sfpo_jax.training._manifest import write_atomic

Record = dict[str, Any]


class JsonLines:
    r"""A file of one JSON object a line, which survives a stop at any point.

    Each line is handed to the system at once. A last line that a stop left half
    written is cut off when the file is opened the next time.

    Args:
      path: the file; made with the first record.

    Example:
      >>> import pathlib, tempfile
      >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
      >>> _ = path.write_text('{"step": 1}\n{"step": 2}\n{"st')
      >>> lines = JsonLines(path)
      >>> lines.write({"step": 3, "loss": float("nan")})
      >>> lines.rewind(lambda record: record["step"] != 2)
      >>> lines.read()
      [{'step': 1}, {'step': 3, 'loss': None}]
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if self.path.exists():
            text = self.path.read_bytes()
            whole = text[: text.rfind(b"\n") + 1]
            if whole != text:
                write_atomic(self.path, whole)

    def write(self, record: Record) -> None:
        """Adds a line; a number that is not finite becomes null, as JSON wants it."""
        line = json.dumps({name: _finite(x) for name, x in record.items()}) + "\n"
        # One write of one line: two programs' lines do not mix.
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode())

    def read(self) -> list[Record]:
        """All records; one that is no JSON any more is left out."""
        return read_records(self.path)

    def rewind(self, is_kept: Callable[[Record], bool]) -> None:
        """Keeps some records only, e.g. those up to the step a run goes on from."""
        if not self.path.exists():
            return
        lines, kept = self._lines(), b""
        for line in lines:
            record = _parse(line)
            if record is not None and is_kept(record):
                kept += line
        if kept != b"".join(lines):
            write_atomic(self.path, kept)

    def _lines(self) -> list[bytes]:
        return self.path.read_bytes().splitlines(keepends=True)


def read_records(path: str | Path) -> list[Record]:
    """The records of a file that another program may be writing.

    Args:
      path: as of `JsonLines`.

    Returns:
      All of them, without a line that is no JSON, as one that is half written; none
      of a file that is not there.
    """
    path = Path(path)
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [record for line in lines if (record := _parse(line)) is not None]


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _finite(x: Any) -> Any:
    return None if isinstance(x, float) and not math.isfinite(x) else x


def check_tensorboard(is_wanted: bool) -> None:
    """Raises ValueError where TensorBoard is wanted and its writer is missing."""
    if is_wanted and importlib.util.find_spec("tensorboardX") is None:
        raise ValueError(
            "`train.tensorboard` needs tensorboardX, got true without it: "
            "pip install -e '.[tensorboard]', or leave it false."
        )


class TensorBoard:
    """Writes the numbers of records as scalars for TensorBoard.

    Args:
      folder: where the event files go, one folder a curve.
      begin: step that the run goes on from; what an earlier start wrote beyond it is
        hidden. 0 for a fresh start.

    Raises:
      ValueError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | Path, begin: int = 0) -> None:
        check_tensorboard(True)
        module = importlib.import_module("tensorboardX")
        purge = begin + 1 if begin else None
        self._writer = module.SummaryWriter(str(folder), purge_step=purge)

    def write(self, record: Record) -> None:
        """Writes every number of a record under its name, at the record's `step`."""
        for name, x in record.items():
            if name != "step" and isinstance(x, int | float):
                self._writer.add_scalar(name, x, record["step"])
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()
