"""Gradients of all parameters alive at once, where they were to be released."""

from sfpo_jax.auditing._program import Audited
from sfpo_jax.auditing._report import Finding
from sfpo_jax.collectives import read_arrays
from sfpo_jax.memory import Buffer, covered
from sfpo_jax.units import format_bytes

# Of what may be released; the gradients of one layer, or of a few, are less.
_SHARE = 0.5
_GATHERED = "all_gather"


def find_live_gradients(audited: Audited) -> list[Finding]:
    """What has the parameters' shapes at the fullest moment, and is not kept.

    Arrays of a parameter's whole shape that the program makes there, but for what the
    forward pass keeps and for weights gathered, are gradients or made of them. Of a
    program with loops over layers the stacks are asked; what lies outside, such as an
    embedding, gets its gradient whole.
    """
    if not audited.releases_gradients:
        return []
    turns = [loop.turns or 0 for _, loop in audited.loops]
    parameters = audited.parameters
    stacks = [leaf for leaf in parameters if audited.is_stack(leaf, turns)]
    missing = list(stacks or parameters)
    total = sum(leaf.bytes for leaf in missing)
    alive: list[Buffer] = []
    for buffer in filter(_is_made, audited.inspected.buffers):
        # A gradient is whole before it is scattered, and this device's part after.
        dims = _dims(buffer)
        for leaf in missing:
            if dims in (leaf.shape, audited.own(leaf).dims):
                missing.remove(leaf)
                alive.append(buffer)
                break
    if not alive or total - sum(x.bytes for x in missing) < _SHARE * total:
        return []
    size, origin = covered(alive), alive[0].origin
    return [
        Finding(
            "gradients",
            size,
            f"{origin.file}:{origin.line}" if origin.file else audited.definition,
            f"{len(alive)} array{'s' * (len(alive) > 1)} of parameters' whole shapes, "
            f"{format_bytes(size, digits=3)}, live at the fullest moment beside the "
            "parameters: a gradient is kept whole",
            "make_layered_train_step applies each layer's gradient where it is made; "
            "clip with its `max_norm`, and accumulate in its `microbatches`",
        )
    ]


def _dims(buffer: Buffer) -> tuple[int, ...]:
    arrays = read_arrays(buffer.shape)
    return arrays[0].dims if arrays else ()


def _is_made(buffer: Buffer) -> bool:
    name = buffer.origin.op_name
    return bool(name) and not buffer.is_activation and _GATHERED not in name
