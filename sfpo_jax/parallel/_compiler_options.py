"""What XLA has to be told so that a step's transfers go well."""

from typing import Any

from jax.sharding import Mesh

_COPIES = 32  # arrays between host and device that may travel at the same time
_JOINED = 32 * 2**20  # bytes of transfers that XLA makes one
_WAITING = 64  # transfers that wait for their turn, where each begins as it can


def transfer_options(
    mesh: Mesh, stages: int, offloads: bool = False, begins_early: bool = False
) -> dict[str, Any] | None:
    """Options that run transfers under arithmetic on GPUs, and in order on CPUs.

    By default XLA's GPU compiler leaves instructions where they stand, so that most
    transfers are waited for at once. Twice the stages may be in flight, as bits and
    scales travel apart. More is no gain, and memory: FSDP would gather weights further
    ahead, at 8 in place of 4 another 1.9 GB for GPT-3 13B on 8 GPUs.

    Args:
      mesh: the devices.
      stages: of layers, or pieces of an operator, that travel at the same time.
      offloads: whether arrays travel between host and device. A layer is several, and
        by default one at a time may be on its way.
      begins_early: whether a transfer begins as soon as it can, however many are on
        their way. By default it does so as late as XLA thinks it may, by numbers that
        know neither the links nor how long a loop takes.

    Returns:
      None where nothing is sent.
    """
    platform = mesh.devices.flat[0].platform
    if platform == "cpu" and mesh.size > 1:
        # With the default scheduler XLA runs a collective in a branch beside others,
        # and joins the one with the other: a crash, or wrong numbers (JAX 0.10.2).
        return {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    is_gpu = platform in ("gpu", "cuda", "rocm")
    if not is_gpu or (mesh.size == 1 and not offloads):
        return None
    options: dict[str, Any] = {"xla_gpu_enable_latency_hiding_scheduler": True}
    if mesh.size > 1:
        limit = "xla_gpu_experimental_parallel_collective_overlap_limit"
        options[limit] = _WAITING if begins_early else 2 * stages
        if begins_early:
            early = "xla_gpu_experimental_collective_start_as_early_as_possible"
            options[early] = True
            # XLA counts what a device gets of it.
            joined = "xla_gpu_reduce_scatter_combine_threshold_bytes"
            options[joined] = _JOINED // mesh.size
    if offloads:
        options["xla_gpu_experimental_parallel_async_compute_limit"] = _COPIES
    return options
