"""`python -m sfpo_jax links`: what joins the devices, and what is fastest over it."""

import argparse
import json
import math
import os
import sys

import jax
from jax.sharding import Mesh

from sfpo_jax.collectives import (
    Choice,
    choose_method,
    methods,
    parse_nvlinks,
    read_nvlinks,
)
from sfpo_jax.memory import parse_mesh
from sfpo_jax.parallel._links import Links, find_links
from sfpo_jax.parallel._mesh import make_mesh
from sfpo_jax.units import format_bandwidth, parse_bandwidth

_USAGE_ERROR = 2
_AXES = ("node", "data", "op")
_SIZES = (1_000_000, 16_000_000, 100_000_000)


def add_links_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument(
        "--mesh", help="axes and sizes, e.g. node=2,data=4; all devices on data if not"
    )
    parser.add_argument(
        "--threshold", default="50GB/s", help="from which on an axis is fast"
    )
    parser.add_argument(
        "--given",
        action="append",
        default=[],
        metavar="AXIS=BANDWIDTH",
        help="instead of measuring, e.g. node=12.5GB/s; may be repeated",
    )
    parser.add_argument("--fresh", action="store_true", help="measure anew")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_links(options: argparse.Namespace) -> int:
    """Measures what is not known and prints.

    Returns:
      0, or 2 when the command is wrong.
    """
    try:
        threshold = parse_bandwidth(options.threshold, name="threshold")
        given = _given(options.given)
        mesh = _mesh(options.mesh)
        found = find_links(mesh, given, methods(), fresh=options.fresh)
    except ValueError as error:
        print(f"python -m sfpo_jax links: {error}", file=sys.stderr)
        return _USAGE_ERROR
    picks = {
        axis: [choose_method(n, mesh.shape[axis], link, found.codecs) for n in _SIZES]
        for axis, link in found.links.items()
    }
    if options.json:
        print(json.dumps(_to_dict(found, picks), indent=2))
    else:
        print(links_table(mesh, found, picks, threshold))
    return 0


def links_table(
    mesh: Mesh, found: Links, picks: dict[str, list[Choice]], threshold: float
) -> str:
    """The report: a line for each axis, then the reasons."""
    kinds = {device.device_kind for device in mesh.devices.flat}
    lines = [f"{mesh.size} devices ({', '.join(sorted(kinds))})"]
    for gpu in parse_nvlinks(read_nvlinks()):
        lines.append(
            f"GPU {gpu.gpu}: NVLink, {gpu.active} of {gpu.active + gpu.inactive} "
            f"links up, {format_bandwidth(gpu.bandwidth, digits=3)}"
        )
    if not found.links:
        return "\n".join([*lines, "no axis has more than one rank: nothing is sent"])
    heads = [f"{n // 1_000_000} M" for n in _SIZES]
    row = "{:<6}{:>6}{:>11}{:>12}  {:<9}{:<6}" + "  {:<11}" * len(heads)
    lines.append(
        row.format("axis", "ranks", "latency", "bandwidth", "", "", *heads).rstrip()
    )
    for axis, link in found.links.items():
        pace = "fast" if link.bandwidth >= threshold else "slow"
        lines.append(
            row.format(
                axis,
                mesh.shape[axis],
                f"{1e6 * link.latency:.1f} us",
                format_bandwidth(link.bandwidth, digits=3),
                found.sources[axis],
                pace,
                *(choice.method for choice in picks[axis]),
            ).rstrip()
        )
    lines.append(
        f"fast: at least {format_bandwidth(threshold)}, reduced exactly and first; on "
        "the right what is fastest for so many entries"
    )
    for axis, choices in picks.items():
        lines += [f"{axis}: {choice}" for choice in choices]
    return "\n".join(lines)


def _to_dict(found: Links, picks: dict[str, list[Choice]]) -> dict[str, object]:
    return {
        axis: {
            **link._asdict(),
            "source": found.sources[axis],
            "picks": {choice.entries[0]: choice.method for choice in picks[axis]},
        }
        for axis, link in found.links.items()
    }


def _given(options: list[str]) -> dict[str, float]:
    given = {}
    for option in options:
        axis, equals, value = option.partition("=")
        if not equals:
            raise ValueError(
                f"`given` must be AXIS=BANDWIDTH, got {option!r}: write for example "
                "node=12.5GB/s."
            )
        given[axis] = parse_bandwidth(value, name=f"given {axis}")
    return given


def _mesh(text: str | None) -> Mesh:
    """The mesh asked for, of stand-ins where there is only a CPU."""
    sizes = parse_mesh(text) if text else {}
    unknown = [axis for axis in sizes if axis not in _AXES]
    if unknown:
        raise ValueError(
            f"`mesh` has the axis {unknown[0]!r}: take {', '.join(_AXES)}."
        )
    wanted = math.prod(sizes.values())
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", wanted)
        except RuntimeError:
            pass  # The backend runs already: its devices are the ones there are.
    if sizes and wanted > jax.device_count():
        raise ValueError(
            f"`mesh` {text} needs {wanted} devices, there are {jax.device_count()}: "
            "make an axis smaller, or run it where there are more."
        )
    sizes = {"node": 1, "data": 1, "op": 1} | sizes if sizes else {}
    return make_mesh(**sizes, devices=jax.devices()[: wanted if sizes else None])
