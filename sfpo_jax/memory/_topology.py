"""GPUs that are not there, from the plugin that would drive them if they were."""

import importlib
import importlib.util
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from sfpo_jax.memory._devices import Device

AXES = ("node", "data", "op")
_PLUGINS = ("xla_cuda13", "xla_cuda12")
_SKIP_CHECK = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


class MissingCompilerError(ImportError):
    """The GPU compiler was asked for and is not installed; the message says how."""


def install_command() -> str:
    """What installs the compiler: JAX's own version of it, no NVIDIA libraries.

    Example:
      >>> install_command().startswith("pip install 'jax-cuda13-plugin==")
      True
    """
    version = metadata.version("jax")
    names = ("jax-cuda13-plugin", "jax-cuda13-pjrt")
    pinned = " ".join(f"'{name}=={version}'" for name in names)
    return f"pip install {pinned} nvidia-cuda-nvcc nvidia-nvvm"


def compiler_problem() -> str | None:
    """Why XLA's GPU compiler cannot be used here; None when it can."""
    plugin = _plugin()
    if plugin is None:
        return "jax-cuda13-plugin is not installed"
    name = f"jax-{plugin.removeprefix('xla_')}-plugin"
    version, wanted = _installed(name), metadata.version("jax")
    if version is not None and version != wanted:
        return f"{name} is {version}, JAX is {wanted}: the versions must be equal"
    if _installed("nvidia-cuda-nvcc") is None and shutil.which("ptxas") is None:
        return "nvidia-cuda-nvcc, which assembles the GPU code, is not installed"
    return None


def gpu_devices(device: Device, nodes: int, per_node: int) -> list[Any]:
    """Devices of this kind that exist only for the compiler, node by node.

    Raises:
      MissingCompilerError: the compiler is not installed.
    """
    from jax.experimental import topologies

    problem = compiler_problem()
    if problem is not None:
        raise MissingCompilerError(
            f"the GPU compiler cannot be used: {problem}; {install_command()}"
        )

    def create() -> list[Any]:
        return topologies.get_topology_desc(
            platform="cuda",
            topology_name=device.name,
            topology=f"1x{nodes}x{per_node}",
            target_config=device.target_config(),
        ).devices

    with _unchecked_cuda():
        try:
            return create()
        except NotImplementedError:
            # A backend that started before found no driver and dropped the plugin.
            plugin = importlib.import_module(f"jax_plugins.{_plugin()}")
            plugin.initialize()
            return create()


def planning_mesh(
    device: Device, mesh_shape: Mapping[str, int], compiler: str = "gpu"
) -> Mesh:
    """A mesh of devices that need not exist, axes of the Auto type.

    Args:
      device: the card; ignored where the compiler is the CPU's.
      mesh_shape: sizes by axis. `node` counts hosts, all others lie within one; of
        `node`, `data`, `op` those not given have size 1.
      compiler: "gpu", or "cpu" for the CPU devices of this process.

    Raises:
      ValueError: a size below 1, or more CPU devices than there are.
      MissingCompilerError: as `gpu_devices`.
    """
    shape = _with_all_axes(mesh_shape)
    nodes, number = shape["node"], math.prod(shape.values())
    if compiler == "gpu":
        devices = gpu_devices(device, nodes, number // nodes)
    else:
        devices = jax.devices("cpu")
        if len(devices) < number:
            raise ValueError(
                f"`mesh_shape` needs {number} CPU devices, there are {len(devices)}: "
                f"set XLA_FLAGS=--xla_force_host_platform_device_count={number} before "
                f"JAX starts, or install the GPU compiler: {install_command()}"
            )
    return _mesh(shape, devices[:number])


def local_mesh(mesh_shape: Mapping[str, int]) -> Mesh:
    """The same mesh of the devices at hand.

    Raises:
      ValueError: a size below 1, or more devices than there are.
    """
    shape = _with_all_axes(mesh_shape)
    number, devices = math.prod(shape.values()), jax.devices()
    if len(devices) < number:
        raise ValueError(
            f"`mesh_shape` needs {number} devices, there are {len(devices)}: name a "
            "`device`, e.g. 'a100-80gb', to compile for cards that are not there."
        )
    return _mesh(shape, devices[:number])


def _with_all_axes(mesh_shape: Mapping[str, int]) -> dict[str, int]:
    shape = {name: 1 for name in AXES} | dict(mesh_shape)
    if min(shape.values()) < 1:
        given = dict(mesh_shape)
        raise ValueError(f"`mesh_shape` must have sizes of 1 or more, got {given}.")
    return shape


def _mesh(shape: Mapping[str, int], devices: list[Any]) -> Mesh:
    return jax.make_mesh(
        tuple(shape.values()),
        tuple(shape),
        axis_types=(AxisType.Auto,) * len(shape),
        devices=devices,
    )


def _plugin() -> str | None:
    """The installed plugin's module in the namespace package `jax_plugins`."""
    for name in _PLUGINS:
        try:
            if importlib.util.find_spec(f"jax_plugins.{name}") is not None:
                return name
        except ModuleNotFoundError:
            return None
    return None


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@contextmanager
def _unchecked_cuda() -> Iterator[None]:
    """Lets the plugin start without a driver, whose version it would check."""
    before = os.environ.get(_SKIP_CHECK)
    os.environ[_SKIP_CHECK] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SKIP_CHECK]
        else:
            os.environ[_SKIP_CHECK] = before
