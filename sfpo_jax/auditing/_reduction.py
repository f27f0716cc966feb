"""Gradients that travel dense over an axis where they were to be compressed."""

import math
from collections.abc import Sequence

from sfpo_jax.auditing._program import Audited
from sfpo_jax.auditing._report import Finding
from sfpo_jax.collectives import Array, Transfer, transfers
from sfpo_jax.transforms import COMPRESSED_SCOPE, PHASE_SCOPES
from sfpo_jax.units import format_bytes

_DENSE = ("all-reduce", "reduce-scatter")
_FLOATS = ("f64", "f32", "bf16", "f16")
# Of what all gradients would send; below lie norms, biases and low-rank factors.
_SHARE = 1 / 64


def find_dense_reductions(audited: Audited) -> list[Finding]:
    """One finding for each axis: what its dense reductions of gradients send.

    Of a transformation with two phases the compressed one is looked at: its warm-up is
    meant to be dense.
    """
    axes = set(audited.compressed_axes)
    sizes = [math.prod(audited.own(leaf).dims) for leaf in audited.parameters]
    if not axes or not sizes:
        return []
    moved = transfers(
        audited.inspected.text,
        audited.inspected.mesh_shape,
        COMPRESSED_SCOPE,
        tuple(PHASE_SCOPES.values()),
    )
    found: dict[str, list[Transfer]] = {}
    for transfer in moved:
        if axes & set(transfer.axis.split(",")) and _is_gradient(transfer, sizes):
            found.setdefault(transfer.axis, []).append(transfer)
    findings = []
    for axis, sent in found.items():
        size = round(sum(t.sent * t.times for t in sent))
        largest = max(sent, key=lambda t: t.sent * t.times)
        origin = audited.origins.get(largest.name)
        kinds = " and ".join(sorted({t.opcode.removesuffix("-start") for t in sent}))
        dtypes = ", ".join(sorted({dtype for t in sent for dtype in t.dtypes}))
        findings.append(
            Finding(
                "reduction",
                size,
                f"{origin.file}:{origin.line}" if origin and origin.file else "",
                f"{kinds} of gradients in {dtypes} over '{axis}', where compressed "
                f"ones were asked for: {format_bytes(size, digits=3)} a step",
                "differentiate each device's own loss, inside shard_map with "
                "check_vma=False or in make_train_step, and average nothing before "
                "the transformation",
            )
        )
    return findings


def _is_gradient(transfer: Transfer, sizes: Sequence[int]) -> bool:
    """Whether a collective reduces floats, as many as parameters or layers have."""
    if not transfer.opcode.startswith(_DENSE):
        return False
    floats = [array for array in transfer.arrays if array.dtype in _FLOATS]
    entries = sum(map(_entries, floats))
    is_large = entries * transfer.times >= _SHARE * sum(sizes)
    # Joined to one array, or leaf by leaf: a stack's turn by turn.
    known = {*sizes, *(size // transfer.times for size in sizes)}
    is_joined = 2 * entries * transfer.times >= sum(sizes)
    return is_large and (is_joined or any(_entries(x) in known for x in floats))


def _entries(array: Array) -> int:
    return array.bytes // Array(array.dtype, (), False).bytes
