"""Which axes of a mesh a run reduces exactly, which it compresses, and how.

`settle` finds out what the configuration leaves open ("auto", "measure") and gives a
configuration that leaves nothing open, so that a run which goes on does the same again,
whatever its links measure then. `split_axes` reads the axes from that.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, cast

from jax.sharding import Mesh

from sfpo_jax.collectives import Choice, Link, Method, choose_method, methods
from sfpo_jax.parallel import Links, find_links, shard_axis
from sfpo_jax.training._layout_sections import (
    Algorithm,
    Communication,
    Compression,
)
from sfpo_jax.units import format_bandwidth, parse_bandwidth, parse_bytes

# What a method of the cost model is called in a configuration.
_ALGORITHMS: dict[str, Algorithm] = {
    "dense": "none",
    "bf16": "bf16",
    "int8": "int8",
    "sign": "1bit_adam",
    "sparse_sign": "sparse_1bit",
    "low_rank": "low_rank",
}
_BATCH_AXES = ("node", "data")


class Axes(NamedTuple):
    """The axes of a mesh that the batch is split over, those of one rank left out.

    Attributes:
      compressed: over which the optimizer reduces, compressed; its `axis_name`.
      exact: along which gradients are reduce-scattered exactly, before that; the
        `shard_axes` of a step. () where the step averages whole gradients.
    """

    compressed: tuple[str, ...]
    exact: tuple[str, ...]

    @property
    def axis_name(self) -> str | tuple[str, ...]:
        """The compressed axes as a transformation takes them."""
        return self.compressed[0] if len(self.compressed) == 1 else self.compressed


def split_axes(communication: Communication, mesh: Mesh) -> Axes:
    """The axes of a settled configuration.

    Args:
      communication: from `settle`.
      mesh: from `make_mesh`.
    """
    plain = "node" if mesh.shape["node"] > 1 else "data"
    topology = communication.topology_aware
    if not topology.enable or communication.compression.algorithm == "none":
        return Axes((plain,), ())
    threshold = parse_bandwidth(topology.bandwidth_threshold)
    given = communication.links.given()
    fast = tuple(a for a in _wide(mesh) if given.get(a, 0.0) >= threshold)
    slow = tuple(a for a in _wide(mesh) if a not in fast)
    return Axes(slow, fast) if slow else Axes((plain,), ())


def settle(
    communication: Communication,
    mesh: Mesh,
    shapes: Sequence[tuple[int, ...]],
    *,
    is_masked: bool = False,
) -> tuple[Communication, list[str]]:
    """Replaces what is left open by what the links say.

    Measures links and codecs where it must, which takes some seconds; all processes of
    the mesh must call it.

    Args:
      communication: the section.
      mesh: from `make_mesh`.
      shapes: of each tensor that is trained.
      is_masked: whether 1-bit Adam's gradients are masked, which takes its time.

    Returns:
      The section without "auto" and, where topology_aware is on, without "measure" and
      with algorithm none where all links are fast; and lines that say why, none where
      nothing was open.
    """
    topology, chosen = communication.topology_aware, communication.compression
    is_open = chosen.algorithm == "auto"
    if not is_open and (not topology.enable or chosen.algorithm == "none"):
        return communication, []
    if not _wide(mesh):
        algorithm = "none" if is_open else chosen.algorithm
        return _with(communication, algorithm), ["one device: nothing is sent"]
    known = _methods(chosen, shapes, is_masked) if is_open else None
    found = find_links(mesh, communication.links.given(), known)
    reasons = [_line(axis, found, mesh) for axis in _wide(mesh)]
    speeds = {
        axis: _text(found.links[axis].bandwidth)
        for axis in _wide(mesh)
        if found.sources[axis] != "given"
    }
    links = dataclasses.replace(communication.links, **speeds)
    settled = dataclasses.replace(communication, links=links)
    if topology.enable:
        threshold = parse_bandwidth(topology.bandwidth_threshold)
        if min(found.links[axis].bandwidth for axis in _wide(mesh)) >= threshold:
            reasons.append(
                f"all links reach {topology.bandwidth_threshold}: exact means, nothing "
                "compressed (topology_aware.enable false forces an algorithm)"
            )
            return _with(settled, "none"), reasons
    if is_open:
        # Whatever is picked, it is for the slow axes.
        axes = split_axes(_with(settled, "1bit_adam"), mesh)
        choice = _choose(settled, mesh, axes, found, shapes, is_masked)
        settled = _with(settled, _ALGORITHMS[choice.method])
        reasons.append(f"{', '.join(axes.compressed)}: {choice}")
    axes = split_axes(settled, mesh)
    if axes.exact:
        reasons.append(
            f"reduced exactly and first over {', '.join(axes.exact)}, then "
            f"{settled.compression.algorithm} over {', '.join(axes.compressed)}"
        )
    return settled, reasons


def _choose(
    communication: Communication,
    mesh: Mesh,
    axes: Axes,
    found: Links,
    shapes: Sequence[tuple[int, ...]],
    is_masked: bool,
) -> Choice:
    """The fastest over the compressed axes, of the buckets of one device."""
    joined = [found.links[axis] for axis in axes.compressed]
    # Over several axes at once the slowest link sets the pace.
    slowest = min(joined, key=lambda link: link.bandwidth)
    link = Link(max(x.latency for x in joined), slowest.bandwidth, slowest.exchange)
    shards = math.prod(mesh.shape[axis] for axis in axes.exact)
    ranks = math.prod(mesh.shape[axis] for axis in axes.compressed)
    parts = [_part(shape, shards) for shape in shapes]
    return choose_method(
        _buckets([math.prod(part) for part in parts], communication.bucket_size),
        ranks,
        link,
        found.codecs,
        _methods(communication.compression, parts, is_masked),
    )


def _methods(
    chosen: Compression, shapes: Sequence[tuple[int, ...]], is_masked: bool
) -> dict[str, Method]:
    """Those that `auto` may choose from, for tensors of these shapes."""
    size = None if chosen.block_size == "auto" else chosen.block_size
    rank = chosen.rank if chosen.auto_low_rank else None
    return methods(
        density=chosen.density,
        block_size=size,
        rank=rank,
        shapes=shapes,
        is_masked=is_masked,
        sync_every=chosen.sync_every,
    )


def _part(shape: tuple[int, ...], shards: int) -> tuple[int, ...]:
    """What one device updates of a tensor; small ones are not cut."""
    axis = shard_axis(shape, shards) if shards > 1 else -1
    return tuple(n // shards if i == axis else n for i, n in enumerate(shape))


def _buckets(sizes: Sequence[int], bucket_size: str) -> list[int]:
    """Entries of each bucket: closed when it has reached its size."""
    limit, buckets = parse_bytes(bucket_size) // 4, [0]
    for size in sizes:
        if buckets[-1] >= limit:
            buckets.append(0)
        buckets[-1] += size
    return buckets


def _wide(mesh: Mesh) -> list[str]:
    return [axis for axis in _BATCH_AXES if mesh.shape[axis] > 1]


def _with(communication: Communication, algorithm: str) -> Communication:
    compression = dataclasses.replace(
        communication.compression, algorithm=cast(Algorithm, algorithm)
    )
    return dataclasses.replace(communication, compression=compression)


def _text(bandwidth: float) -> str:
    return format_bandwidth(bandwidth, digits=6).replace(" ", "")


def _line(axis: str, found: Links, mesh: Mesh) -> str:
    bandwidth = format_bandwidth(found.links[axis].bandwidth, digits=3)
    return f"{axis}: {mesh.shape[axis]} ranks, {bandwidth}, {found.sources[axis]}"
