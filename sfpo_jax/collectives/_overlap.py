"""What a compiled program does while a transfer is on its way.

A GPU runs the instructions of a scheduled program one after the other, but for
asynchronous collectives and copies between host and device: between a start and its
done others run. Only what takes long hides it, and in a training step that is matrix
products.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from sfpo_jax.collectives._hlo import Instruction, Program, parse_hlo
from sfpo_jax.collectives._wire import read_transfers

_BODY = re.compile(r'\bbody=%?([\w.\-]+).*"known_trip_count":\{"n":"(\d+)"\}')
_PRODUCT = re.compile(
    r'[\s})](?:dot|convolution)\(|custom_call_target="__cu(?:blas|dnn)'
)
_DONE = re.compile(r" [a-z\-]+-done\(.*?%?([\w.\-]+)\)")
_IS_SYNC = re.compile(r'"is_sync":true')


class Overlap(NamedTuple):
    """One transfer of a program, and what runs beside it.

    Attributes:
      opcode: a collective's name in HLO, without "-start"; "to host" or "from host".
      shape: what it returns, as HLO writes it.
      axis: the mesh axis it runs over, several joined by a comma; "host".
      sent: bytes one device sends, each time it runs.
      products: instructions with a matrix product or a convolution between its start
        and its done; 0 for one that is waited for at once.
      turns: of the loop in whose body it stands; 1 outside, or where it is not known.
    """

    opcode: str
    shape: str
    axis: str
    sent: float
    products: int
    turns: int


def overlaps(hlo: str, mesh_shape: Mapping[str, int]) -> list[Overlap]:
    """The transfers of a compiled and scheduled program, in its order.

    Each stands there once, however often it runs. A loop, a branch or a fusion counts
    as one product where there is any in it.

    Args:
      hlo: the optimised program, `compiled.as_text()`.
      mesh_shape: axis names and sizes of the mesh it was compiled for.
    """
    program = parse_hlo(hlo)
    turns = {found[1]: int(found[2]) for found in _BODY.finditer(hlo)}
    holds: dict[str, bool] = {}
    found: list[Overlap] = []
    for name, instructions in program.computations.items():
        flying: dict[str, tuple[int, int]] = {}  # start -> (place in `found`, products)
        count = 0
        for instruction in instructions:
            line = instruction.rest
            if done := _DONE.search(line):
                if done[1] in flying:
                    place, before = flying.pop(done[1])
                    found[place] = found[place]._replace(products=count - before)
                continue
            for transfer in read_transfers(instruction, turns.get(name, 1), mesh_shape):
                opcode, is_start, _ = transfer.opcode.partition("-start")
                if is_start and not _IS_SYNC.search(line):
                    flying[instruction.name] = len(found), count
                axis, sent, times = transfer.axis, transfer.sent, transfer.times
                found.append(Overlap(opcode, instruction.shape, axis, sent, 0, times))
            if copy := _host_copy(program, instruction, turns.get(name, 1)):
                flying[instruction.name] = len(found), count
                found.append(copy)
            count += _is_product(program, instruction, holds)
    return found


def _host_copy(
    program: Program, instruction: Instruction, turns: int
) -> Overlap | None:
    """The start of a copy from a stack in the host's memory, or into one."""
    if not instruction.opcode.endswith("-start"):
        return None
    arrays = instruction.arrays
    here = [array.bytes for array in arrays if not array.is_host]
    if len(here) == len(arrays) or not here:
        return None
    inner = [
        i.opcode for name in instruction.called for i in program.computations[name]
    ]
    opcode = "to host" if "dynamic-update-slice" in inner else "from host"
    return Overlap(opcode, instruction.shape, "host", max(here), 0, turns)


def _is_product(
    program: Program, instruction: Instruction, holds: dict[str, bool]
) -> bool:
    """Whether an instruction, or what it calls, multiplies matrices.

    `holds` keeps the answers for computations.
    """
    if _PRODUCT.search(instruction.rest):
        return True
    for name in instruction.called:
        if name not in holds:
            inner = program.computations.get(name, ())
            holds[name] = any(_is_product(program, each, holds) for each in inner)
        if holds[name]:
            return True
    return False
