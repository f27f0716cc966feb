"""Devices that are not there, and the compiler that may not be there either."""

from importlib import metadata

import pytest

from sfpo_jax.memory import (
    MissingCompilerError,
    _topology,
    compiler_problem,
    find_device,
    install_command,
    planning_mesh,
)
from tests.memory.programs import needs_gpu_compiler

CARD = find_device("h100-80gb")


def test_the_command_installs_jaxs_own_version() -> None:
    version = metadata.version("jax")
    assert f"'jax-cuda13-plugin=={version}'" in install_command()
    assert f"'jax-cuda13-pjrt=={version}'" in install_command()


def test_a_missing_plugin_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_topology, "_PLUGINS", ("xla_cuda99",))
    assert "not installed" in str(compiler_problem())
    with pytest.raises(MissingCompilerError, match="pip install 'jax-cuda13-plugin=="):
        planning_mesh(CARD, {"data": 8})


def test_another_version_than_jaxs_is_a_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_topology, "_plugin", lambda: "xla_cuda13")
    versions = {"jax-cuda13-plugin": "0.9.0", "nvidia-cuda-nvcc": "13"}
    monkeypatch.setattr(_topology, "_installed", versions.get)
    assert "jax-cuda13-plugin is 0.9.0, JAX is" in str(compiler_problem())
    versions["jax-cuda13-plugin"] = metadata.version("jax")
    assert compiler_problem() is None
    del versions["nvidia-cuda-nvcc"]
    monkeypatch.setattr(_topology.shutil, "which", lambda _: None)
    assert "nvidia-cuda-nvcc" in str(compiler_problem())


def test_sizes_below_one_and_too_many_cpu_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"sizes of 1 or more, got \{'data': 0}"):
        planning_mesh(CARD, {"data": 0})
    with pytest.raises(ValueError, match="needs 4096 CPU devices, there are"):
        planning_mesh(CARD, {"data": 4096}, "cpu")


def test_a_cpu_mesh_has_all_axes() -> None:
    mesh = planning_mesh(CARD, {"data": 2, "expert": 2}, "cpu")
    assert dict(mesh.shape) == {"node": 1, "data": 2, "op": 1, "expert": 2}


@needs_gpu_compiler
def test_nodes_are_hosts() -> None:
    mesh = planning_mesh(CARD, {"node": 2, "data": 2, "op": 2})
    hosts = [[d.process_index for d in node.flat] for node in mesh.devices]
    assert hosts == [[0] * 4, [1] * 4]
    assert mesh.devices.flat[0].device_kind == "NVIDIA H100 80GB HBM3"
