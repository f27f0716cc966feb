"""A step compiled to be read: the program, its arguments, its fullest moment."""

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding

from sfpo_jax.memory._buffers import Buffer
from sfpo_jax.memory._compile import compile_and_read
from sfpo_jax.memory._devices import find_device
from sfpo_jax.memory._ledger import argument_names
from sfpo_jax.memory._lowered import keep_used
from sfpo_jax.memory._planner import Target, build_step, choose_compiler, platform_of
from sfpo_jax.memory._topology import local_mesh, planning_mesh


class Inspected(NamedTuple):
    """A compiled step.

    Attributes:
      step: what was compiled.
      args: its arguments, as shapes with their shardings.
      arg_names: what the step calls them, "" where that cannot be told.
      jaxpr: what it was traced to; None where it cannot be traced.
      args_info: (arguments, keywords), each leaf with its shape, dtype and `donated`.
      out_info: what it returns, as shapes.
      used: numbers of the arguments' leaves that the program takes, in its order.
      text: the optimised HLO.
      buffers: temporaries at the fullest moment, largest first.
      device: the card's name, or what the devices at hand are.
      platform: whose compiler it was: "cpu", "cuda", ...
      mesh_shape: mesh axes and their sizes; empty for a program on one device.
      notes: what to know about the compilation.
    """

    step: Any
    args: tuple[Any, ...]
    arg_names: tuple[str, ...]
    jaxpr: Any
    args_info: Any
    out_info: Any
    used: tuple[int, ...]
    text: str
    buffers: tuple[Buffer, ...]
    device: str
    platform: str
    mesh_shape: dict[str, int]
    notes: tuple[str, ...]


def inspect_step(
    step: Any,
    args: tuple[Any, ...],
    device: str | None,
    mesh_shape: Mapping[str, int] | None,
    compiler: str,
) -> Inspected:
    """Compiles a step for devices at hand or for a card that is not there.

    Arguments and errors are those of `plan`; without a `device` those at hand are
    taken, with their own compiler.
    """
    notes: list[str] = []
    if device is None:
        target = Target("cpu", None, local_mesh(mesh_shape) if mesh_shape else None)
    else:
        card = find_device(device)
        compiler, notes = choose_compiler(compiler)
        mesh = planning_mesh(card, mesh_shape, compiler) if mesh_shape else None
        target = Target(compiler, card, mesh)
    if target.mesh is not None:
        step, args = build_step(step, target.mesh)
    elif not hasattr(step, "lower"):
        raise TypeError(
            f"`step` must have .lower(*args), got {step!r}: pass jax.jit(step), or "
            "build(mesh) -> (step, *args) together with `mesh_shape`."
        )
    with warnings.catch_warnings():
        # A donation that fails is a finding, told with its bytes and its line.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        lowered, shapes, devices = target.lower(step, args)
        compiled, assigned, _ = compile_and_read(lowered)
        jaxpr = step.trace(*shapes).jaxpr if hasattr(step, "trace") else None
    mesh = target.mesh if target.mesh is not None else getattr(step, "mesh", None)
    mesh = mesh if mesh is not None else _mesh_of(shapes)
    numbers = list(range(len(jax.tree.leaves(lowered.args_info))))
    return Inspected(
        step=step,
        args=tuple(shapes),
        arg_names=tuple(argument_names(step, len(lowered.args_info[0]))),
        jaxpr=jaxpr,
        args_info=lowered.args_info,
        out_info=lowered.out_info,
        used=tuple(keep_used(numbers, lowered)),
        text=compiled.as_text() or "",
        buffers=assigned.buffers if assigned else (),
        device=device or devices[0].device_kind,
        platform=platform_of(devices),
        mesh_shape=dict(mesh.shape) if mesh is not None else {},
        notes=tuple(notes),
    )


def _mesh_of(args: Any) -> Any:
    """The mesh that some argument lies over; None where none does."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(args))
    return next((s.mesh for s in shardings if isinstance(s, NamedSharding)), None)
