"""What kind of work each instruction of a compiled program is."""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sfpo_jax.collectives import Instruction, parse_hlo
from sfpo_jax.memory import Origin, origins

PRODUCTS = "products, attention"
NATIVE = "native kernels"
ELEMENTWISE = "element-wise, reductions"
COPIES = "copies"
COLLECTIVES = "collectives"
INPUT = "waiting for input"
IDLE = "idle, host, between operations"

# Where several run at once, the time is that of the first of these.
ORDER = (PRODUCTS, NATIVE, ELEMENTWISE, COPIES, COLLECTIVES)
CATEGORIES = (*ORDER, INPUT, IDLE)

_MODULE = re.compile(r"HloModule ([\w.\-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')

_PRODUCT_OPCODES = {"dot", "convolution", "ragged-dot", "scaled-dot"}
_COPY_OPCODES = {"copy", "copy-start", "copy-done", "transpose", "bitcast-convert"}
_COLLECTIVE_OPCODES = (
    "all-reduce",
    "all-gather",
    "all-to-all",
    "reduce-scatter",
    "collective-",
    "ragged-all-to-all",
)
# Their time is that of what they run.
_CONTAINERS = {"while", "conditional"}
_FUSED = {"fusion", "call", "async-start", "async-done", "async-update"}
_PRODUCT_NAMES = re.compile(r"gemm|cublas|cudnn|cutlass|conv|fmha|attention|matmul|dot")


class Work(NamedTuple):
    """An instruction."""

    opcode: str
    kind: str | None  # None: it only runs others
    origin: Origin | None


class Program(NamedTuple):
    """A compiled program."""

    module: str
    work: dict[str, Work]  # by instruction
    kernels: dict[str, Work]  # by the names that XLA gives its own kernels

    def find(self, module: str, name: str) -> Work | None:
        """The instruction behind an event of a trace, None of another program's."""
        if module not in ("", self.module):
            return None
        # Kernels of a CUDA graph have no instruction beside them, and its name.
        return self.work.get(name) or self.kernels.get(name)


def read_program(hlo: str) -> Program:
    """The instructions of an optimised program, from its text."""
    module = _MODULE.match(hlo)
    computations = parse_hlo(hlo).computations
    made_by = origins(hlo)
    work = {
        x.name: Work(x.opcode, _kind(x, computations), made_by.get(x.name))
        for instructions in computations.values()
        for x in instructions
    }
    kernels = {name.replace(".", "_"): found for name, found in work.items()}
    return Program(module[1] if module else "", work, kernels)


def kind_by_name(name: str) -> str | None:
    """The kind of an operation of which only the name is known."""
    lowered = name.lower()
    if "nccl" in lowered or lowered.startswith(_COLLECTIVE_OPCODES):
        return COLLECTIVES
    if "sfpo" in lowered:
        return NATIVE
    if lowered.startswith(("memcpy", "memset", "copy")):
        return COPIES
    if lowered.startswith(tuple(_CONTAINERS)):
        return None
    return PRODUCTS if _PRODUCT_NAMES.search(lowered) else ELEMENTWISE


def _kind(
    instruction: Instruction, computations: Mapping[str, Sequence[Instruction]]
) -> str | None:
    opcode = instruction.opcode
    if opcode in _CONTAINERS:
        return None
    if opcode.startswith(_COLLECTIVE_OPCODES):
        return COLLECTIVES
    if opcode in _PRODUCT_OPCODES:
        return PRODUCTS
    if opcode in _COPY_OPCODES:
        return COPIES
    if opcode == "custom-call":
        target = _TARGET.search(instruction.rest)
        name = target[1] if target else ""
        if name.startswith("sfpo_"):
            return NATIVE
        return PRODUCTS if _PRODUCT_NAMES.search(name.lower()) else ELEMENTWISE
    if opcode in _FUSED and instruction.called:
        inner = [
            _kind(x, computations)
            for name in instruction.called
            for x in computations.get(name, ())
        ]
        for kind in (COLLECTIVES, PRODUCTS, NATIVE):
            if kind in inner:
                return kind
        # A call that is one loop or one branch.
        return None if None in inner else ELEMENTWISE
    return ELEMENTWISE
