"""Values for the host's memory that the compiled program keeps on the device."""

import inspect
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax

from sfpo_jax.auditing._places import equations, place_of
from sfpo_jax.auditing._program import Audited, name_some
from sfpo_jax.auditing._report import Finding
from sfpo_jax.collectives import Array

_OFFLOADED = "names_which_can_be_offloaded"


class _Asked(NamedTuple):
    """A value that is put into the host's memory."""

    place: str
    shape: tuple[int, ...]
    itemsize: int
    bytes: int  # of all turns of the loops around it


def find_lost_offloads(audited: Audited) -> list[Finding]:
    """Values put there, names a policy offloads, and state that comes in from there.

    The CPU's compiler knows no other memory for what it computes: of it, only state is
    asked.
    """
    findings = _lost_state(audited)
    if audited.inspected.jaxpr is not None:
        findings += _unknown_names(audited)
        if audited.inspected.platform != "cpu":
            findings += _lost_values(audited)
    return findings


def offload_note(audited: Audited) -> str:
    """What was not looked at; "" where all was."""
    if audited.inspected.platform != "cpu" or audited.inspected.jaxpr is None:
        return ""
    if next(_asked(audited), None) is None:
        return ""
    return (
        "values put into the host's memory were not looked for, as a CPU's compiler "
        "does not tell it from its own: compile for a GPU, by `device` and the extra "
        "`plan`"
    )


def _lost_values(audited: Audited) -> list[Finding]:
    held = [
        array
        for lines in audited.program.computations.values()
        for line in lines
        for array in line.arrays
        if array.is_host
    ]
    devices = math.prod(audited.inspected.mesh_shape.values())
    lost = [asked for asked in _asked(audited) if not _is_held(asked, held, devices)]
    findings = []
    for place in dict.fromkeys(asked.place for asked in lost):
        # Computed again, a value is put there twice and kept once.
        unique = set(asked for asked in lost if asked.place == place)
        shapes = name_some([str(list(asked.shape)) for asked in sorted(unique)])
        findings.append(
            Finding(
                "offload",
                sum(asked.bytes for asked in unique),
                place,
                f"{shapes}: put into the host's memory, and the compiled program has "
                "no such array there; it stays on the device",
                "let a loop carry it or the step return it: XLA drops the way there "
                "and back within one straight piece of a program",
            )
        )
    return findings


def _asked(audited: Audited) -> Iterator[_Asked]:
    for equation, times in equations(audited.inspected.jaxpr):
        if equation.primitive.name != "device_put":
            continue
        for variable in equation.outvars:
            aval = variable.aval
            if getattr(aval, "memory_space", None) == jax.memory.Space.Host:
                shape, itemsize = tuple(aval.shape), aval.dtype.itemsize
                size = math.prod(shape) * itemsize * times
                yield _Asked(place_of(equation), shape, itemsize, size)


def _is_held(asked: _Asked, held: Sequence[Array], devices: int) -> bool:
    """Whether the host has such an array, a part of one, or a stack of them."""
    for array in held:
        dims = array.dims[len(array.dims) - len(asked.shape) :]
        parts = [
            whole // part
            for whole, part in zip(asked.shape, dims, strict=False)
            if part and whole % part == 0
        ]
        is_like = len(parts) == len(asked.shape) and math.prod(parts) <= devices
        if is_like and array._replace(dims=()).bytes == asked.itemsize:
            return True
    return False


def _unknown_names(audited: Audited) -> list[Finding]:
    """Names that a policy of `jax.checkpoint` offloads and no value has."""
    jaxpr = audited.inspected.jaxpr
    found = [equation for equation, _ in equations(jaxpr)]
    known = {e.params["name"] for e in found if e.primitive.name == "name"}
    findings = {}
    for equation in found:
        policy = equation.params.get("policy")
        # JAX has no question that asks a policy for its names.
        wanted = inspect.getclosurevars(policy).nonlocals if callable(policy) else {}
        for name in sorted(set(wanted.get(_OFFLOADED, ())) - known):
            findings[name] = Finding(
                "offload",
                0,
                place_of(equation),
                f"'{name}' is to be offloaded, and no value under this "
                f"jax.checkpoint is called so: {', '.join(sorted(known)) or 'none is'}",
                f"jax.ad_checkpoint.checkpoint_name(x, '{name}')",
            )
    return list(findings.values())


def _lost_state(audited: Audited) -> list[Finding]:
    """State that comes in from the host's memory and goes out on the device."""
    inputs, outputs = audited.program.parameters, audited.program.outputs
    lost = [
        pair
        for pair in audited.pairs
        if 0 <= pair.before[0].number < len(inputs)
        and 0 <= pair.after.number < len(outputs)
        and inputs[pair.before[0].number].is_host
        and not outputs[pair.after.number].is_host
    ]
    if not lost:
        return []
    lost.sort(key=lambda pair: -pair.after.bytes)
    names = name_some([pair.before[0].name for pair in lost])
    return [
        Finding(
            "offload",
            sum(pair.after.bytes for pair in lost),
            lost[0].after.place or audited.definition,
            f"{names}: comes in from the host's memory and goes out on the device, "
            "where it stays from the second step on",
            "jax.jit(step, out_shardings=...) with the state's own shardings",
        )
    ]
