"""The folder of a run: its configuration, and its metrics as they are made."""

import json
import math
import time
from pathlib import Path
from typing import Any

from experiments.contender import Record
from sfpo_jax.training import write_yaml


class RunFolder:
    """`runs/<name>-<time>/`, made anew.

    Holds config.yaml (the resolved configuration) and metrics.jsonl from the start, so
    that an interrupted run leaves what it measured; report.md and curves.png come last.

    Args:
      runs: the folder of folders.
      name: begins the name of this one.
      config: the configuration, a dataclass of dataclasses.

    Raises:
      ValueError: the folder cannot be made.
    """

    def __init__(self, runs: str, name: str, config: Any) -> None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        self.path = _make(Path(runs), f"{name}-{stamp}")
        write_yaml(self.path / "config.yaml", config)

    def record(self, record: Record) -> None:
        """Adds a line to metrics.jsonl; a number that is not finite becomes null."""
        record = {
            name: None if isinstance(x, float) and not math.isfinite(x) else x
            for name, x in record.items()
        }
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _make(runs: Path, name: str) -> Path:
    """A folder that was not there; two runs may start within one second."""
    try:
        runs.mkdir(parents=True, exist_ok=True)
        for attempt in range(100):
            path = runs / (f"{name}-{attempt}" if attempt else name)
            try:
                path.mkdir()
            except FileExistsError:
                continue
            return path
    except OSError as error:
        raise ValueError(
            f"`train.runs` cannot be written to, got '{runs}': {error.strerror}; "
            "choose another folder."
        ) from None
    raise ValueError(f"`train.name` is taken in '{runs}', got {name!r}: wait a second.")
