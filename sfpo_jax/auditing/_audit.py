"""Compiles a step and looks for what it does otherwise than was asked of it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from sfpo_jax.auditing._copies import copies_note, find_copies
from sfpo_jax.auditing._donation import find_unreused
from sfpo_jax.auditing._gradients import find_live_gradients
from sfpo_jax.auditing._growth import find_growth
from sfpo_jax.auditing._offload import find_lost_offloads, offload_note
from sfpo_jax.auditing._program import Audited
from sfpo_jax.auditing._reduction import find_dense_reductions
from sfpo_jax.auditing._report import AuditReport, Finding
from sfpo_jax.memory import Inspected, inspect_step
from sfpo_jax.parallel import LayeredTrainStep, Step
from sfpo_jax.transforms import COMPRESSED_SCOPE, is_per_rank

_CHECKS: tuple[Callable[[Audited], list[Finding]], ...] = (
    find_unreused,
    find_copies,
    find_lost_offloads,
    find_growth,
    find_live_gradients,
    find_dense_reductions,
)
_NOTES = copies_note, offload_note


def audit(
    step: Any,
    *args: Any,
    device: str | None = None,
    mesh_shape: Mapping[str, int] | None = None,
    compiler: str = "auto",
    compressed_axes: Sequence[str] | None = None,
    releases_gradients: bool | None = None,
) -> AuditReport:
    """Finds what a compiled step does otherwise than was asked; nothing runs.

    Args:
      step: anything with `.lower(*args)`: a jitted function, a train step. With
        `mesh_shape` instead ``build(mesh) -> (step, *args)``, as `plan` takes it.
      *args: arrays or ShapeDtypeStructs, of which only shapes, dtypes and shardings
        are read.
      device: a card that need not be there, as in `plan`; None compiles for the devices
        at hand.
      mesh_shape: sizes by axis, e.g. ``{"data": 8}``.
      compiler: with `device`, as in `plan`.
      compressed_axes: mesh axes over which gradients are to travel compressed. None:
        those that the transformation of a train step reduces over itself, where it
        has residuals or the phases of 1-bit Adam; of another step those that residuals
        among its arguments are cut over, and all where they are cut over none.
      releases_gradients: no more than one layer's gradient is to live at once. None:
        asked of `make_layered_train_step`'s steps and of no other.

    Returns:
      The report: true where something was found. ``print`` it.

    Raises:
      ValueError: an unknown device or axis, more devices than there are.
      TypeError: `step` has no `.lower`, or with `mesh_shape` is no builder.
      MissingCompilerError: compiler="gpu" without the extra.
      CompileError: XLA cannot compile the program.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> def update(mu, grad):
      ...     return 0.9 * mu.astype(jnp.float32) + grad
      >>> mu = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
      >>> grad = jax.ShapeDtypeStruct((64, 64), jnp.float32)
      >>> report = sfpo.audit(jax.jit(update, donate_argnums=0), mu, grad)
      >>> [finding.kind for finding in report.findings]
      ['donation', 'growth']
      >>> report.findings[1].message
      'mu: goes in as bfloat16 and comes back as float32; the next step is ...'
    """
    inspected = inspect_step(step, args, device, mesh_shape, compiler)
    unknown = set(compressed_axes or ()) - set(inspected.mesh_shape)
    if unknown:
        raise ValueError(
            f"`compressed_axes` has {sorted(unknown)}, no axis of the mesh: it has "
            f"{', '.join(inspected.mesh_shape) or 'none'}."
        )
    if compressed_axes is None:
        compressed_axes = _compressed_axes(inspected)
    if releases_gradients is None:
        releases_gradients = isinstance(inspected.step, LayeredTrainStep)
    audited = Audited(inspected, tuple(compressed_axes), releases_gradients)
    found = [finding for check in _CHECKS for finding in check(audited)]
    found.sort(key=lambda finding: -finding.bytes)
    return AuditReport(
        findings=tuple(found),
        device=inspected.device,
        compiler=inspected.platform,
        mesh_shape=inspected.mesh_shape,
        notes=(*inspected.notes, *filter(None, (note(audited) for note in _NOTES))),
    )


def _compressed_axes(inspected: Inspected) -> tuple[str, ...]:
    """Those over which a transformation in the step compresses, as its state tells.

    Residuals that are not cut over any axis belong to a transformation without one. In
    a step over several devices what it compresses has been reduced before.
    """
    args: Any = inspected.args
    if isinstance(inspected.step, Step):
        # Gradients that wait are each rank's own, too, and no residuals.
        args = args[0].opt_state
    leaves = jax.tree.leaves(args, is_leaf=is_per_rank)
    nodes = [node for node in leaves if is_per_rank(node)]
    if isinstance(inspected.step, Step):
        is_compressed = nodes or COMPRESSED_SCOPE in inspected.text
        return inspected.step.reduces if is_compressed else ()
    specs = [
        leaf.sharding.spec
        for leaf in jax.tree.leaves(nodes)
        if isinstance(getattr(leaf, "sharding", None), NamedSharding)
    ]
    first = [spec[0] for spec in specs if len(spec) and spec[0] is not None]
    cut = {
        axis for axes in first for axis in ([axes] if isinstance(axes, str) else axes)
    }
    wide = [axis for axis, size in inspected.mesh_shape.items() if size > 1]
    return tuple(axis for axis in wide if nodes and (axis in cut or not cut))
