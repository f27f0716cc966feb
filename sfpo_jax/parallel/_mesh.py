"""The device mesh: `node` (slow links), `data` (fast links), `op` (operator level)."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from sfpo_jax.parallel._device_order import order_devices


def make_mesh(
    node: int = 1,
    data: int = -1,
    op: int = 1,
    *,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """A mesh with axes `node`, `data`, `op`, one size of which may be -1: what is left.

    Devices of a host lie side by side, so that `op` and `data` stay inside hosts and
    only `node` crosses the links between them.

    Args:
      node: groups joined by slow links, e.g. hosts.
      data: devices of a group that share its batch.
      op: devices that share one sample.
      devices: the devices; None = all.

    Raises:
      ValueError: sizes that do not multiply to the number of devices, or groups of
        data x op devices that do not fit into hosts.

    Warns:
      UserWarning: node=1 over several hosts.

    Example:
      >>> import sfpo_jax as sfpo
      >>> mesh = sfpo.make_mesh(node=2)
      >>> mesh.axis_names, mesh.shape["node"]
      (('node', 'data', 'op'), 2)
    """
    devices = list(jax.devices() if devices is None else devices)
    sizes = {"node": node, "data": data, "op": op}
    free = [name for name, size in sizes.items() if size == -1]
    for name, size in sizes.items():
        if size < 1 and size != -1:
            raise ValueError(f"`{name}` must be a positive size or -1, got {size}.")
    if len(free) > 1:
        raise ValueError(f"only one axis may be -1 (what is left), got {free}.")
    known = math.prod(size for size in sizes.values() if size != -1)
    if free and len(devices) % known == 0:
        sizes[free[0]] = len(devices) // known
    if math.prod(sizes.values()) != len(devices):
        given = ", ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"the mesh {given} does not fit {len(devices)} devices: the product of its "
            "axes must be their number; -1 takes what is left."
        )
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=order_devices(devices, sizes["node"]),
    )
