"""Measurements kept on disk: a large program takes a minute to compile."""

import json
import linecache
import os
import tempfile
from pathlib import Path
from typing import Any

from sfpo_jax.memory._buffers import Buffer
from sfpo_jax.memory._measurement import Measurement
from sfpo_jax.memory._origins import Origin
from sfpo_jax.memory._timeline import Moment, Timeline, Value


def cache_folder(kind: str = "plans") -> Path:
    """Where measurements of a kind are kept: below XDG_CACHE_HOME, or ~/.cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sfpo_jax" / kind


class Cache:
    """A folder of measurements, one file each; None keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def load(self, key: str) -> Measurement | None:
        """What was kept under this key.

        None also where the entry is damaged, or names a line of code that has changed
        since: the program may be the same, but what would be printed is not.
        """
        if self._folder is None:
            return None
        try:
            entry = json.loads((self._folder / f"{key}.json").read_text())
            lines = entry.pop("lines")
            measured = _decode(entry)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
        return measured if lines == _lines(measured) else None

    def save(self, key: str, measured: Measurement) -> None:
        """Keeps a measurement; a disk that is full or read-only is no error."""
        if self._folder is None:
            return
        entry = measured._asdict() | {"lines": _lines(measured)}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Renamed when whole, so that no other process reads half of it.
            with tempfile.NamedTemporaryFile(
                "w", dir=self._folder, suffix=".tmp", delete=False
            ) as file:
                json.dump(entry, file)
            os.replace(file.name, self._folder / f"{key}.json")
        except OSError:
            return


def _decode(entry: dict[str, Any]) -> Measurement:
    buffers = tuple(
        Buffer(int(size), str(shape), int(offset), Origin(*origin))
        for size, shape, offset, origin in entry.pop("buffers")
    )
    parameters = {int(k): int(v) for k, v in entry.pop("parameters").items()}
    wire = {str(k): int(v) for k, v in entry.pop("wire_bytes").items()}
    without_triton = bool(entry.pop("without_triton"))
    timeline = _decode_timeline(entry.pop("timeline"))
    sizes = {name: int(value) for name, value in entry.items()}
    return Measurement(
        **sizes,
        parameters=parameters,
        buffers=buffers,
        wire_bytes=wire,
        without_triton=without_triton,
        timeline=timeline,
    )


def _decode_timeline(held: Any) -> Timeline | None:
    if held is None:
        return None
    length, peak, running, moments, phases, values = held
    return Timeline(
        int(length),
        int(peak),
        Origin(*running),
        tuple(Moment(*moment) for moment in moments),
        tuple((int(position), str(name)) for position, name in phases),
        tuple(_decode_value(*value) for value in values),
    )


def _decode_value(
    size: int,
    shape: str,
    offset: int,
    born: int,
    dies: int,
    origin: Any,
    is_joined: bool,
) -> Value:
    return Value(size, shape, offset, born, dies, Origin(*origin), is_joined)


def _lines(measured: Measurement) -> list[str]:
    """The lines of code that the measurement names."""
    linecache.checkcache()
    origins = [buffer.origin for buffer in measured.buffers]
    if measured.timeline is not None:
        origins += [value.origin for value in measured.timeline.values]
        origins.append(measured.timeline.running)
    return [linecache.getline(o.file, o.line).strip() for o in origins if o.file]
