"""Devices host by host, on machines that are not here."""

from typing import NamedTuple

import jax
import numpy as np
import pytest

import sfpo_jax as sfpo
from sfpo_jax.parallel._device_order import order_devices
from sfpo_jax.parallel._links import is_inside_host


class Device(NamedTuple):
    """What the order looks at."""

    id: int
    process_index: int
    slice_index: int | None = None


def scattered(hosts: int, each: int) -> list[Device]:
    """Devices in the order of their id, which goes round the hosts."""
    return [Device(i, i % hosts) for i in range(hosts * each)]


@pytest.mark.parametrize(("hosts", "each", "node"), [(2, 4, 2), (3, 2, 3), (2, 4, 4)])
def test_a_group_lies_inside_one_host(hosts: int, each: int, node: int) -> None:
    ordered = order_devices(scattered(hosts, each), node)
    assert sorted(d.id for d in ordered) == list(range(hosts * each))
    groups = np.array([d.process_index for d in ordered]).reshape(node, -1)
    assert (groups == groups[:, :1]).all()
    assert [g[0] for g in groups] == sorted(g[0] for g in groups)
    for group in np.array([d.id for d in ordered]).reshape(node, -1):
        assert list(group) == sorted(group)


def test_a_slice_is_a_host() -> None:
    devices = [Device(i, i, slice_index=i // 4) for i in reversed(range(8))]
    ordered = order_devices(devices, 2)
    assert [d.slice_index for d in ordered] == [0] * 4 + [1] * 4


def test_one_host_keeps_its_order() -> None:
    devices = [Device(i, 0) for i in (2, 0, 1, 3)]
    assert order_devices(devices, 2) == devices


def test_a_group_over_two_hosts_is_refused() -> None:
    words = "node=2 has groups of 6 devices, .* hosts of 4, 4, 4: .* multiple of 3"
    with pytest.raises(ValueError, match=words):
        order_devices(scattered(3, 4), 2)


def test_one_group_over_several_hosts_is_said() -> None:
    with pytest.warns(UserWarning, match="node=1 over 2 hosts: .* make it node=2"):
        ordered = order_devices(scattered(2, 4), 1)
    assert [d.process_index for d in ordered] == [0] * 4 + [1] * 4


def test_axes_inside_a_host() -> None:
    ordered = order_devices(scattered(2, 4), 2)
    devices = np.empty(8, object)
    devices[:] = ordered
    shaped = devices.reshape(2, 2, 2)
    assert [is_inside_host(shaped, place) for place in range(3)] == [False, True, True]


def test_the_mesh_of_one_process_is_as_before() -> None:
    devices = jax.devices()[:8]
    mesh = sfpo.make_mesh(node=2, op=2, devices=devices)
    assert list(mesh.devices.flat) == devices
