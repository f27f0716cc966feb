"""Devices: a CPU that shows several, and the mesh a configuration asks for."""

import os

import jax
from jax.sharding import Mesh

from experiments.models.operator import Sizes, check_operator
from sfpo_jax import Operator, make_mesh
from sfpo_jax.parallel import current_hosts
from sfpo_jax.training import Parallel, check_batch


def show_cpu_devices(count: int) -> None:
    """Makes the CPU show `count` devices; call it before anything touches a device.

    A number asked for in `XLA_FLAGS`, or found by an earlier use of JAX, stays. With
    several hosts each shows one: XLA's CPU collectives between processes of several
    devices are known to crash.
    """
    if current_hosts().count > 1:
        count = 1
    if "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", ""):
        return
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        # The back end has started: its devices are the ones there are.
        return


def make_run_mesh(parallel: Parallel, batch_size: int) -> Mesh:
    """The mesh of `parallel.mesh` over all devices, for batches of `batch_size`.

    Raises:
      ValueError: sizes that do not fit the devices, or a batch that does not divide
        over them.
    """
    sizes = parallel.mesh
    try:
        node = current_hosts().count if sizes.node == "hosts" else sizes.node
        mesh = make_mesh(node=node, data=sizes.data, op=sizes.op)
    except ValueError as error:
        raise ValueError(f"`parallel.mesh`: {error}") from None
    check_batch(batch_size, parallel, mesh.shape["node"] * mesh.shape["data"])
    return mesh


def make_operator(parallel: Parallel, mesh: Mesh, sizes: Sizes) -> Operator | None:
    """How the products of a model are shared along `op`; None where it is one device.

    Raises:
      ValueError: a model, or pieces, that do not divide over it.
    """
    ranks = mesh.shape["op"]
    if ranks == 1:
        return None
    pieces = parallel.operator
    operator = Operator(pieces.chunk_size, pieces.prefetch_depth)
    check_operator(sizes, operator, ranks)
    return operator
