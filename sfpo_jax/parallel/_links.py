"""What joins the devices along each axis of a mesh: given, reported, or measured.

A bandwidth that is given counts. Inside a host, NVLink as the driver reports it comes
next. All else is measured by the probe, and kept on disk: links do not change between
two runs on the same devices.
"""

import hashlib
import json
import math
import os
import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from sfpo_jax.collectives import (
    LATENCY,
    Codec,
    Link,
    Method,
    nvlink_bandwidth,
    read_nvlinks,
)
from sfpo_jax.memory import cache_folder
from sfpo_jax.parallel._device_order import host_of
from sfpo_jax.parallel._probe import agreed, probe_codecs, probe_link


class Links(NamedTuple):
    """Links by mesh axis, of axes with more than one rank.

    Attributes:
      links: what a device sends along each axis.
      sources: "given", "NVLink" or "measured", by axis.
      codecs: measured, by name of the method; {} where none was asked for.
    """

    links: dict[str, Link]
    sources: dict[str, str]
    codecs: dict[str, Codec]


def find_links(
    mesh: Mesh,
    given: Mapping[str, float] | None = None,
    methods: Mapping[str, Method] | None = None,
    *,
    fresh: bool = False,
    cache: Path | None = None,
) -> Links:
    """Finds out the links of a mesh; all processes of it must call this.

    Args:
      mesh: the devices.
      given: bytes a second by axis, for axes that shall not be measured.
      methods: whose codecs to measure; None for none.
      fresh: measure even what is in the cache, and replace it.
      cache: the folder of measurements; None for the user's cache.

    Returns:
      The same in all processes.

    Raises:
      ValueError: `given` names an axis that the mesh has not, or no positive number.
    """
    given, methods = given or {}, methods or {}
    _check_given(given, mesh)
    links = {a: Link(LATENCY, b) for a, b in given.items() if mesh.shape[a] > 1}
    sources = dict.fromkeys(links, "given")
    wide = [axis for axis in mesh.axis_names if mesh.shape[axis] > 1]
    inside = [
        axis
        for axis in wide
        if axis not in links
        and is_inside_host(mesh.devices, mesh.axis_names.index(axis))
    ]
    if inside and (bandwidth := _nvlink()):
        links |= {axis: Link(LATENCY, bandwidth) for axis in inside}
        sources |= dict.fromkeys(inside, "NVLink")
    kept = _Cache(cache or cache_folder("links"), mesh)
    held = {} if fresh else kept.load()
    for axis in [axis for axis in wide if axis not in links]:
        links[axis] = _measured(mesh, axis, held)
        sources[axis] = "measured"
    codecs = {}
    if wide and methods:
        fastest = max(wide, key=lambda axis: links[axis].bandwidth)
        codecs = _codecs(mesh, fastest, methods, held)
    kept.save(held)
    return Links({axis: links[axis] for axis in wide}, sources, codecs)


def _measured(mesh: Mesh, axis: str, held: dict[str, Any]) -> Link:
    """The link of an axis, from the cache `held` or into it."""
    key = f"link {axis}"
    # Measuring takes all processes, so it is done where one of them must.
    if _all(len(held.get(key, ())) == 3):
        latency, *bandwidths = held[key]
        # The slowest is the longest latency, but the smallest bandwidth.
        latency, *slowest = agreed([latency, *(-b for b in bandwidths)])
        return Link(latency, *(-b for b in slowest))
    link = probe_link(mesh, axis)
    held[key] = list(link)
    return link


def _codecs(
    mesh: Mesh, axis: str, methods: Mapping[str, Method], held: dict[str, Any]
) -> dict[str, Codec]:
    """The codecs, from the cache `held` or into it."""
    codecs = {}
    for name, method in methods.items():
        key = f"codec {method.label}"
        points = held.get(key, ())
        # Processes that kept other sizes have nothing to agree on.
        (most,) = agreed([float(len(points))])
        if _all(len(points) == most > 0):
            sizes, seconds = [int(n) for n, _ in points], [t for _, t in points]
            codecs[name] = Codec(tuple(zip(sizes, agreed(seconds), strict=True)))
        else:
            link = _measured(mesh, axis, held)
            codecs |= probe_codecs(mesh, axis, link, {name: method})
        held[key] = codecs[name].points
    return codecs


def is_inside_host(devices: Any, place: int) -> bool:
    """True where devices that differ along one axis alone are always of one host.

    Args:
      devices: the array of devices of a mesh.
      place: the number of the axis.
    """
    lines = devices.swapaxes(place, -1).reshape(-1, devices.shape[place])
    return all(len({host_of(device) for device in line}) == 1 for line in lines)


def _nvlink() -> float | None:
    """The slowest of all hosts, None where one has none."""
    bandwidth = nvlink_bandwidth(read_nvlinks())
    (seconds,) = agreed([1 / bandwidth if bandwidth else math.inf])
    return None if math.isinf(seconds) else 1 / seconds


def _all(condition: bool) -> bool:
    """True where it holds in all processes."""
    return agreed([0.0 if condition else 1.0]) == [0.0]


def _check_given(given: Mapping[str, float], mesh: Mesh) -> None:
    for axis, bandwidth in given.items():
        if axis not in mesh.axis_names:
            raise ValueError(
                f"`given` names the axis {axis!r}, which the mesh has not: take one "
                f"of {', '.join(mesh.axis_names)}."
            )
        if not 0 < bandwidth < math.inf:
            raise ValueError(
                f"`given` must have positive bandwidths, got {bandwidth!r} for "
                f"{axis!r}: write bytes a second."
            )


class _Cache:
    """One file of numbers for each set of devices and shape of a mesh."""

    def __init__(self, folder: Path, mesh: Mesh) -> None:
        devices = list(mesh.devices.flat)
        what = [
            jax.__version__,
            platform.node(),
            sorted({getattr(d, "device_kind", "") for d in devices}),
            [[int(d.id), host_of(d)] for d in devices],
            list(mesh.shape.items()),
        ]
        digest = hashlib.sha256(json.dumps(what).encode()).hexdigest()
        self._path = folder / f"{digest[:32]}.json"

    def load(self) -> dict[str, Any]:
        """What was kept; {} for nothing, or a damaged file."""
        try:
            held = json.loads(self._path.read_text())
            return held if isinstance(held, dict) else {}
        except (OSError, ValueError):
            return {}

    def save(self, held: dict[str, Any]) -> None:
        """Keeps numbers; a disk that is full or read-only is no error."""
        if not held:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # Renamed when whole, so that no other process reads half of it.
            with tempfile.NamedTemporaryFile(
                "w", dir=self._path.parent, suffix=".tmp", delete=False
            ) as file:
                json.dump(held, file)
            os.replace(file.name, self._path)
        except OSError:
            return
