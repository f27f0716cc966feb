"""The GPUs that programs are planned for, and the facts XLA's compiler asks of them.

The compiler decides tile sizes, fusions and therefore memory by these numbers, so they
are copied from XLA's own descriptions of the cards, not from data sheets. Those lie in
https://github.com/openxla/xla in `xla/backends/gpu/target_config/specs`, named `spec`
below.
"""

import difflib
from typing import NamedTuple


class Device(NamedTuple):
    """One GPU as XLA sees it; sizes in bytes, bandwidth in bytes per second."""

    name: str  # what `device=` takes
    description: str  # what the driver calls it
    spec: str  # the file the facts are from
    memory_bytes: int  # all of it, before JAX takes its share
    memory_bandwidth: int
    l2_cache_bytes: int
    cores: int
    fpus_per_core: int
    shared_memory_per_core: int
    shared_memory_per_block_optin: int
    clock_ghz: float
    capability: int  # major version of the compute capability
    extension: str  # of the instruction set, e.g. wgmma on Hopper

    def target_config(self) -> str:
        """The card as a `GpuTargetConfigProto` in text form."""
        return f"""gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32
          threads_per_core_limit: 2048 core_count: {self.cores}
          fpus_per_core: {self.fpus_per_core} clock_rate_ghz: {self.clock_ghz}
          shared_memory_per_block: 49152
          shared_memory_per_core: {self.shared_memory_per_core}
          shared_memory_per_block_optin: {self.shared_memory_per_block_optin}
          block_dim_limit_x: 2147483647
          block_dim_limit_y: 65535 block_dim_limit_z: 65535
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          memory_bandwidth: {self.memory_bandwidth}
          l2_cache_size: {self.l2_cache_bytes}
          device_memory_size: {self.memory_bytes}
          cuda_compute_capability {{
            major: {self.capability} feature_extension: {self.extension}
          }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        device_description_str: "{self.description}"
        """


_A100 = Device(
    name="a100-80gb",
    description="NVIDIA A100-SXM4-80GB",
    spec="a100_sxm_80.txtpb",
    memory_bytes=85_100_068_864,
    memory_bandwidth=2_039_040_000_000,
    l2_cache_bytes=41_943_040,
    cores=108,
    fpus_per_core=64,
    shared_memory_per_core=167_936,
    shared_memory_per_block_optin=166_912,
    clock_ghz=1.41,
    capability=8,
    extension="NONE",
)

_H100 = Device(
    name="h100-80gb",
    description="NVIDIA H100 80GB HBM3",
    spec="h100_sxm.txtpb",
    memory_bytes=84_942_979_072,
    memory_bandwidth=3_352_320_000_000,
    l2_cache_bytes=52_428_800,
    cores=132,
    fpus_per_core=128,
    shared_memory_per_core=233_472,
    shared_memory_per_block_optin=232_448,
    clock_ghz=1.98,
    capability=9,
    extension="ACCELERATED_FEATURES",
)

DEVICES = {
    device.name: device
    for device in (
        _A100._replace(
            name="a100-40gb",
            description="NVIDIA A100-SXM4-40GB",
            spec="a100_sxm_40.txtpb",
            memory_bytes=42_331_013_120,
            memory_bandwidth=1_555_200_000_000,
        ),
        _A100,
        _H100,
        _H100._replace(
            name="h200",
            description="NVIDIA H200 141GB HBM3e",
            spec="h200.txtpb",
            memory_bytes=151_397_597_184,
            memory_bandwidth=4_800_000_000_000,
        ),
        _H100._replace(
            name="b200",
            description="NVIDIA B200",
            spec="b200.txtpb",
            memory_bytes=191_514_411_008,
            memory_bandwidth=7_672_320_000_000,
            l2_cache_bytes=132_644_864,
            cores=148,
            clock_ghz=1.965,
            capability=10,
        ),
    )
}


def find_device(name: str) -> Device:
    """The card of this name.

    Raises:
      ValueError: an unknown name; the message lists the known ones.

    Example:
      >>> find_device("h200").memory_bytes
      151397597184
    """
    if name in DEVICES:
        return DEVICES[name]
    known = ", ".join(DEVICES)
    near = difflib.get_close_matches(str(name).lower(), DEVICES, n=1)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise ValueError(f"`device` is unknown, got {name!r}: {hint}known are {known}.")
