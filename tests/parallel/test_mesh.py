"""The device mesh: its axes, what is left, and sizes that do not fit."""

import jax
import pytest
from jax.sharding import AxisType

import sfpo_jax as sfpo


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({}, (1, 8, 1)),
        ({"node": 2}, (2, 4, 1)),
        ({"node": 2, "op": 2}, (2, 2, 2)),
        ({"node": -1, "data": 2}, (4, 2, 1)),
        ({"data": 1, "op": -1}, (1, 1, 8)),
        ({"node": 8, "data": 1, "op": 1}, (8, 1, 1)),
    ],
)
def test_the_axes(sizes: dict[str, int], expected: tuple[int, ...]) -> None:
    mesh = sfpo.make_mesh(**sizes, devices=jax.devices()[:8])
    assert mesh.axis_names == ("node", "data", "op")
    assert tuple(mesh.shape.values()) == expected
    # Plain arrays and PartitionSpecs go together on axes of this type only.
    assert set(mesh.axis_types) == {AxisType.Auto}


def test_some_of_the_devices() -> None:
    devices = jax.devices()[2:5]
    mesh = sfpo.make_mesh(devices=devices)
    assert mesh.shape["data"] == 3
    assert set(mesh.devices.flat) == set(devices)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"data": 3}, ("data=3", "8 devices", "-1 takes what is left")),
        ({"node": 3}, ("node=3", "8 devices")),
        ({"node": 16, "data": 1}, ("node=16", "8 devices")),
        ({"data": 0}, ("`data`", "0", "positive size or -1")),
        ({"op": -2}, ("`op`", "-2", "positive size or -1")),
        ({"node": -1, "data": -1}, ("only one axis may be -1", "node", "data")),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, int], words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        sfpo.make_mesh(**sizes, devices=jax.devices()[:8])
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message
