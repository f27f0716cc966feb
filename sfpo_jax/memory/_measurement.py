"""What a compilation tells about a program's memory."""

from typing import NamedTuple

from sfpo_jax.memory._buffers import Buffer
from sfpo_jax.memory._timeline import Timeline


class Measurement(NamedTuple):
    """Bytes of one device, as the compiler assigned them."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    activation_bytes: int  # of the temporaries
    host_bytes: int  # of the host's memory, for this device
    constant_bytes: int  # arrays that are part of the program, besides
    parameters: dict[int, int]  # argument bytes by number, as far as they are told
    buffers: tuple[Buffer, ...]
    wire_bytes: dict[str, int]
    without_triton: bool
    timeline: Timeline | None = None
