"""The order of devices in a mesh: groups inside hosts, hosts along `node`.

The last axes of a mesh are its innermost, and neighbours in the list of devices are
neighbours along `op`, then `data`. With all devices of a host side by side, what is
sent most travels over the fastest links, and only `node` leaves a host.
"""

import warnings
from collections.abc import Sequence
from typing import Any


def host_of(device: Any) -> int:
    """The group of devices that fast links join: the slice, else the process."""
    slice_index = getattr(device, "slice_index", None)
    return device.process_index if slice_index is None else slice_index


def order_devices(devices: Sequence[Any], node: int) -> list[Any]:
    """Devices host by host, for `node` groups of equal size.

    Args:
      devices: the devices; of a host in the order they are given.
      node: groups along the axis `node`; it divides the devices.

    Returns:
      The same devices. On one host the order is that given.

    Raises:
      ValueError: a group would lie on two hosts, though there are several.

    Warns:
      UserWarning: one group over several hosts: the links between hosts are then part
        of `data` or `op`, and nothing tells them apart.
    """
    hosts: dict[int, list[Any]] = {}
    for device in devices:
        hosts.setdefault(host_of(device), []).append(device)
    ordered = [device for host in sorted(hosts) for device in hosts[host]]
    if len(hosts) == 1:
        return list(devices)
    sizes = [len(hosts[host]) for host in sorted(hosts)]
    if node == 1:
        warnings.warn(
            f"the mesh has node=1 over {len(hosts)} hosts: their slow links become "
            f"part of `data` and `op`; make it node={len(hosts)}, and what crosses "
            "them can be compressed.",
            stacklevel=3,
        )
        return ordered
    group = len(devices) // node
    if any(size % group for size in sizes):
        held = ", ".join(str(size) for size in sizes)
        raise ValueError(
            f"the mesh node={node} has groups of {group} devices, which do not fit "
            f"hosts of {held}: a group (data x op) must lie inside one host, so make "
            f"`node` a multiple of {len(hosts)}."
        )
    return ordered
