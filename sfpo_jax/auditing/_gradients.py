"""Gradients of all parameters alive at once, where they were to be released."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from sfpo_jax.auditing._leaves import Leaf
from sfpo_jax.auditing._program import Audited
from sfpo_jax.auditing._report import Finding
from sfpo_jax.collectives import Array, read_arrays
from sfpo_jax.memory import Origin
from sfpo_jax.units import format_bytes

# Of what may be released; the gradients of one layer, or of a few, are less.
_SHARE = 0.5
_GATHERED = "all_gather"
_BACKWARD = "transpose("
# What hands arrays on, and makes none.
_HANDS_ON = frozenset(("parameter", "get-tuple-element", "tuple", "while", "bitcast"))


class _Made(NamedTuple):
    """An array of the backward pass, or made of such."""

    array: Array
    origin: Origin


def find_live_gradients(audited: Audited) -> list[Finding]:
    """Arrays of the parameters' whole shapes that the backward pass fills.

    Of a program with loops over layers the stacks are asked: a stack that the backward
    pass makes holds the gradients of all layers. What lies outside, such as an
    embedding, gets its gradient whole. Without such loops all parameters are asked, by
    what lives at the fullest moment, but for what the forward pass keeps and for
    weights gathered.
    """
    if not audited.releases_gradients:
        return []
    turns = [loop.turns or 0 for _, loop in audited.loops]
    stacks = [x for x in audited.parameters if audited.is_stack(x, turns)]
    if stacks:
        found = _match(audited, stacks, _made_in_program(audited))
    else:
        found = _match(audited, audited.parameters, _made_at_peak(audited))
    asked = sum(leaf.bytes for leaf in stacks or audited.parameters)
    if not found or sum(leaf.bytes for leaf in found) < _SHARE * asked:
        return []
    size = sum(made.array.bytes for made in found.values())
    largest = max(found.values(), key=lambda made: made.array.bytes).origin
    shape = "stack" if stacks else "array"
    number = f"{len(found)} {shape}{'s' * (len(found) > 1)}"
    return [
        Finding(
            "gradients",
            size,
            f"{largest.file}:{largest.line}" if largest.file else audited.definition,
            f"{number} of gradients, {format_bytes(size, digits=3)}, as large as the "
            "parameters that they are of: none is released where it is made",
            "make_layered_train_step applies each layer's gradient where it is made; "
            "clip with its `max_norm`, and accumulate in its `microbatches`",
        )
    ]


def _match(
    audited: Audited, leaves: Iterable[Leaf], made: Iterable[_Made]
) -> dict[Leaf, _Made]:
    """Each leaf with an array of its own that has its shape, where there is one."""
    found: dict[Leaf, _Made] = {}
    missing = list(leaves)
    for one in made:
        for leaf in missing:
            # A gradient is whole before it is scattered, and this device's part after.
            if one.array.dims in (leaf.shape, audited.own(leaf).dims):
                found[leaf] = one
                missing.remove(leaf)
                break
    return found


def _made_in_program(audited: Audited) -> Iterator[_Made]:
    """What instructions of the backward pass make, those within a fusion apart."""
    computations = audited.program.computations
    fused = {
        name
        for lines in computations.values()
        for line in lines
        if line.opcode == "fusion"
        for name in line.called
    }
    for name, lines in computations.items():
        for line in lines if name not in fused else ():
            origin = audited.origins.get(line.name)
            if origin is None or line.opcode in _HANDS_ON:
                continue
            if _BACKWARD in origin.op_name and _GATHERED not in origin.op_name:
                yield from (_Made(array, origin) for array in line.arrays)


def _made_at_peak(audited: Audited) -> Iterator[_Made]:
    for buffer in audited.inspected.buffers:
        name = buffer.origin.op_name
        if name and not buffer.is_activation and _GATHERED not in name:
            for array in read_arrays(buffer.shape):
                if math.prod(array.dims) > 1:
                    yield _Made(array, buffer.origin)
