"""Plans a program: lowers it for devices that need not exist, compiles, reads."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from sfpo_jax.memory._cache import Cache, cache_folder
from sfpo_jax.memory._compile import measure
from sfpo_jax.memory._devices import Device, find_device
from sfpo_jax.memory._flops import count_flops
from sfpo_jax.memory._ledger import classify, make_ledger
from sfpo_jax.memory._lowered import keep_used, program_devices
from sfpo_jax.memory._plan import Plan
from sfpo_jax.memory._topology import (
    MissingCompilerError,
    compiler_problem,
    gpu_devices,
    install_command,
    planning_mesh,
)
from sfpo_jax.units import format_bytes, parse_bytes

_NOTEWORTHY = 0.01  # of the arguments
_COMPILERS = ("auto", "gpu", "cpu")


def plan(
    step: Any,
    *args: Any,
    device: str = "a100-80gb",
    mesh_shape: Mapping[str, int] | None = None,
    budget: str | None = None,
    compiler: str = "auto",
    cache: bool | str | Path = True,
) -> Plan:
    """How much memory a program takes on a GPU, found without one.

    XLA's own GPU compiler assigns every buffer, for a card it knows by description
    only; nothing runs, no array is made. It needs the extra `plan`.

    Args:
      step: anything with `.lower(*args)`: a jitted function, a train step. With
        `mesh_shape` instead ``build(mesh) -> (step, *args)``: a step closes over its
        mesh and the size of its state may depend on it, so both are made anew.
      *args: arrays or ShapeDtypeStructs, of which only shapes, dtypes and shardings
        are read; those without a sharding lie on one device.
      device: "a100-40gb", "a100-80gb", "h100-80gb", "h200" or "b200".
      mesh_shape: sizes by axis, e.g. ``{"node": 2, "data": 8}``: 2 hosts of 8 GPUs.
      budget: what a device may hold, a size with its unit ("40GB"); None is all its
        memory.
      compiler: "gpu"; "cpu", which is quick and wrong by what the two compilers do
        differently; "auto" takes the GPU's and falls back with a note.
      cache: keep measurements below ``$XDG_CACHE_HOME/sfpo_jax``; a folder of your own,
        or False for none.

    Returns:
      The plan; ``print`` it.

    Raises:
      ValueError: an unknown device, a budget without a unit, more CPU devices than
        there are.
      TypeError: `step` has no `.lower`, or with `mesh_shape` is no builder.
      MissingCompilerError: compiler="gpu" without the extra; the message has the
        command to install it.
      CompileError: XLA cannot compile the program.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> step = jax.jit(
      ...     lambda params, x: params - (x @ params).sum(), donate_argnums=0
      ... )
      >>> shapes = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 2
      >>> made = sfpo.plan(step, *shapes, compiler="cpu", cache=False)
      >>> made.ledger["parameters"], made.alias_bytes, made.fits
      (262144, 262144, True)
      >>> made.total_bytes == sum(made.ledger.values())
      True
    """
    card = find_device(device)
    limit = budget_bytes(card, budget)
    compiler, notes = choose_compiler(compiler)
    if mesh_shape is None:
        if not hasattr(step, "lower"):
            raise TypeError(
                f"`step` must have .lower(*args), got {step!r}: pass jax.jit(step), or "
                "build(mesh) -> (step, *args) together with `mesh_shape`."
            )
        target = Target(compiler, card, None)
    else:
        target = Target(compiler, card, planning_mesh(card, mesh_shape, compiler))
        step, args = build_step(step, target.mesh)
    lowered, shapes, devices = target.lower(step, args)
    if compiler == "gpu" and platform_of(devices) == "cpu":
        compiler = "cpu"
        notes.append(
            "the step is bound to CPU devices, so the CPU compiler planned it: pass "
            "build(mesh) -> (step, *args) with mesh_shape={'data': ...}"
        )
    if compiler == "cpu":
        notes.append(
            "compiled for a CPU: arguments and output are exact, temporaries are not "
            "those of a GPU; a step of more than one device has CPU collectives"
        )
    mesh = target.mesh if target.mesh is not None else getattr(step, "mesh", None)
    shape = dict(mesh.shape) if mesh is not None else {}
    axes = shape or {"devices": len(devices)}
    where = card.target_config() if compiler == "gpu" else "cpu"
    folder = cache_folder() if cache is True else Path(cache) if cache else None
    measured = measure(lowered, where, axes, Cache(folder))
    if measured.without_triton:
        notes.append(
            "compiled with xla_gpu_enable_triton_gemm=false: some product does not "
            "tile without autotuning"
        )
    if measured.constant_bytes > _NOTEWORTHY * measured.argument_bytes:
        size = format_bytes(measured.constant_bytes, digits=3)
        notes.append(
            f"{size} of arrays are part of the program and not in the total: pass what "
            "the function closes over as arguments"
        )
    flops, note = _count(step, shapes, len(devices))
    return Plan(
        device=card.name,
        mesh_shape=shape,
        compiler=compiler,
        argument_bytes=measured.argument_bytes,
        output_bytes=measured.output_bytes,
        alias_bytes=measured.alias_bytes,
        temporary_bytes=measured.temporary_bytes,
        host_bytes=measured.host_bytes,
        budget_bytes=limit,
        memory_bytes=card.memory_bytes,
        flops=flops,
        wire_bytes=measured.wire_bytes,
        ledger=make_ledger(measured, keep_used(classify(step, shapes), lowered)),
        buffers=measured.buffers,
        notes=(*notes, *note),
        timeline=measured.timeline,
    )


def open_step(
    step: Any,
    args: Sequence[Any],
    card: Device,
    mesh_shape: Mapping[str, int] | None,
    compiler: str,
) -> tuple[Any, Sequence[Any]]:
    """(step, arguments) of what `plan` takes, built where it has to be."""
    if mesh_shape is None:
        return step, args
    return build_step(
        step, planning_mesh(card, mesh_shape, choose_compiler(compiler)[0])
    )


def budget_bytes(card: Device, budget: str | None) -> int:
    """What a device may hold: all its memory where nothing is said."""
    return card.memory_bytes if budget is None else parse_bytes(budget, name="budget")


class Target(NamedTuple):
    """Where a program is to run."""

    compiler: str
    card: Device | None  # None: what is at hand, by the compiler "cpu"
    mesh: Any  # None: one device

    def lower(self, step: Any, args: Sequence[Any]) -> tuple[Any, Sequence[Any], Any]:
        """The program, its arguments' shapes, and the devices it is for."""
        shapes = jax.tree.map(_shape, tuple(args))
        lowered = step.lower(*shapes)
        devices = program_devices(lowered)
        is_placed = any(
            getattr(leaf, "sharding", None) is not None
            for leaf in jax.tree.leaves(shapes)
        )
        if self.compiler == "cpu" or is_placed or platform_of(devices) != "cpu":
            return lowered, shapes, devices
        # Nothing says where the arguments lie: they go where the plan is for.
        if self.mesh is not None:
            sharding: Any = NamedSharding(self.mesh, PartitionSpec())
        else:
            assert self.card is not None
            sharding = SingleDeviceSharding(gpu_devices(self.card, 1, 1)[0])

        def place(leaf: Any) -> Any:
            if not isinstance(leaf, jax.ShapeDtypeStruct):
                return leaf
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        shapes = jax.tree.map(place, shapes)
        lowered = step.lower(*shapes)
        return lowered, shapes, program_devices(lowered)


def choose_compiler(compiler: str) -> tuple[str, list[str]]:
    """The compiler that is there, and what to say about it."""
    if compiler not in _COMPILERS:
        raise ValueError(
            f"`compiler` must be one of {', '.join(_COMPILERS)}, got {compiler!r}."
        )
    problem = None if compiler == "cpu" else compiler_problem()
    if problem is None:
        return ("gpu" if compiler == "auto" else compiler), []
    remedy = f"{problem}; {install_command()}"
    if compiler == "gpu":
        raise MissingCompilerError(f"the GPU compiler cannot be used: {remedy}")
    return "cpu", [f"the GPU compiler cannot be used: {remedy}"]


def build_step(build: Callable[[Any], Any], mesh: Any) -> tuple[Any, tuple[Any, ...]]:
    remedy = "with `mesh_shape` pass build(mesh) -> (step, *args)"
    if hasattr(build, "lower") or not callable(build):
        raise TypeError(f"`step` is bound to its mesh already, got {build!r}: {remedy}")
    made = build(mesh)
    if not isinstance(made, (tuple, list)) or not made or not hasattr(made[0], "lower"):
        raise TypeError(
            f"`step` returned {type(made).__name__}, not a step with .lower and its "
            f"arguments: {remedy}."
        )
    return made[0], tuple(made[1:])


def _shape(leaf: Any) -> Any:
    """A leaf without its data, with its sharding where someone chose one."""
    if isinstance(leaf, jax.Array):
        sharding = leaf.sharding if leaf.committed else None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    if isinstance(leaf, np.ndarray):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return leaf


def platform_of(devices: Sequence[Any]) -> str:
    return devices[0].platform


def _count(
    step: Any, args: Sequence[Any], devices: int
) -> tuple[int | None, tuple[str, ...]]:
    """FLOPs of one device, and what to know about them."""
    try:
        if hasattr(step, "trace"):
            jaxpr = step.trace(*args).jaxpr
        else:
            jaxpr = jax.make_jaxpr(step)(*args)
    # Tracing runs the user's code, which may fail in any way; the bytes are there.
    except Exception as error:
        return None, (f"FLOPs not counted: {type(error).__name__} while tracing",)
    total, unknown = count_flops(jaxpr)
    if unknown:
        note = f"{unknown} loops of unknown length are counted as running once"
        return total // devices, (note,)
    return total // devices, ()
