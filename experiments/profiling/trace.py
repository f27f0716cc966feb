"""A trace of `jax.profiler`, read without TensorFlow."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

from jax.profiler import ProfileData

WINDOW = "profiled steps"  # annotates the traced steps, from first to last
WAITED = "waited for input"  # annotates the end of a wait; `ns` says how long it was
_GPU = "/device:GPU:"


class Event(NamedTuple):
    """An operation on a device; times in nanoseconds."""

    device: int
    module: str  # the program, "" where that is not told
    name: str  # of the HLO instruction, of the kernel where that is not told
    begin: float
    end: float


class Trace(NamedTuple):
    """What was found in a trace; times in nanoseconds on one clock."""

    begin: float
    end: float
    waits: list[tuple[float, float]]
    events: list[Event]


def read_trace(folder: Path) -> Trace:
    """Reads what `jax.profiler.start_trace(folder)` left there last.

    Raises:
      ValueError: no trace, or none with the annotation of the steps.
    """
    files = sorted(folder.glob("**/*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise ValueError(f"`{folder}` has no trace: the profiler wrote none.")
    with warnings.catch_warnings():
        # On newer Pythons the reader's own types lack what Python asks for; as an error
        # that would end the process inside C++.
        warnings.simplefilter("ignore", DeprecationWarning)
        trace = _read(files[-1])
    if trace is None:
        raise ValueError(f"`{files[-1]}` does not say which steps it is of.")
    return trace


def _read(path: Path) -> Trace | None:
    """What a file holds; None without the annotation of the steps."""
    window: tuple[float, float] | None = None
    waits, events = [], []
    for plane in ProfileData.from_file(str(path)).planes:
        name = plane.name or ""
        device = int(name.removeprefix(_GPU)) if name.startswith(_GPU) else None
        for line in plane.lines:
            # Beside the streams XLA may draw the same operations by other lines.
            is_stream = device is not None and (line.name or "").startswith("Stream")
            if device is not None and not is_stream:
                continue
            for event in line.events:
                begin, end = event.start_ns, event.start_ns + event.duration_ns
                if is_stream:
                    stats = _stats(event)
                    operation = str(stats.get("hlo_op") or event.name)
                    module = str(stats.get("hlo_module", ""))
                    events.append(Event(device or 0, module, operation, begin, end))
                elif event.name == WINDOW:
                    window = begin, end
                elif event.name == WAITED:
                    waits.append((begin - int(_stats(event)["ns"]), begin))
                elif (found := _operation(event)) is not None:
                    events.append(found)
    return None if window is None else Trace(*window, waits, events)


def _operation(event: Any) -> Event | None:
    """An operation of a CPU device, which is an event of one of the host's threads."""
    stats = _stats(event)
    if "hlo_op" not in stats:
        return None
    end = event.start_ns + event.duration_ns
    device = int(stats.get("device_ordinal", 0))
    module = str(stats.get("hlo_module", ""))
    return Event(device, module, str(stats["hlo_op"]), event.start_ns, end)


def _stats(event: Any) -> dict[str, Any]:
    return {name: value for name, value in event.stats if name}
