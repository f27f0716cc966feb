"""The two phases of 1-bit Adam, and how a step decides on them for all its parts.

By itself a transformation decides in the compiled program, in a loop of one turn or
none. Its transfers then lie inside that loop, where no arithmetic outside can run
beside them. A step that updates many units, and has arithmetic to run meanwhile,
decides once for all of them and says so: `tx.update(..., phase=, is_finite=True)`.
"""

from typing import Any, Literal, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

Phase = Literal["warmup", "compressed"]

# Names of the two phases in a compiled program's metadata.
WARMUP_SCOPE = "sfpo_warmup"
COMPRESSED_SCOPE = "sfpo_compressed"
# And of steps of `zero_one_adam`: those that ranks take by themselves, and those that
# send bits and a dense gradient.
LOCAL_SCOPE = "sfpo_local"
REFRESH_SCOPE = "sfpo_refresh"
# By the names under which reports have them.
PHASE_SCOPES = {
    "warmup": WARMUP_SCOPE,
    "refresh": REFRESH_SCOPE,
    "local": LOCAL_SCOPE,
    "compressed": COMPRESSED_SCOPE,
}
SCOPES: dict[Phase, str] = {"warmup": WARMUP_SCOPE, "compressed": COMPRESSED_SCOPE}


def scope_of(phase: str | None) -> str | None:
    """The scope name of a phase, None for None; ValueError for one that nobody has."""
    if phase is not None and phase not in PHASE_SCOPES:
        raise ValueError(
            f"`phase` must be one of {', '.join(PHASE_SCOPES)} or None, got {phase!r}."
        )
    return None if phase is None else PHASE_SCOPES[phase]


@runtime_checkable
class HasPhase(Protocol):
    """State of a transformation that has the two phases."""

    compresses_next: jax.Array  # bool[], or led by axes of units stacked


def compresses_next(state: Any) -> jax.Array | None:
    """Whether the next step is a compressed one for all units in a state, bool[].

    Units go out of step where one has skipped an update of its own. As long as one of
    them needs a dense step, all take one. None: nothing in the state has phases.
    """

    def is_phased(node: Any) -> bool:
        return isinstance(node, HasPhase)

    nodes = [n for n in jax.tree.leaves(state, is_leaf=is_phased) if is_phased(n)]
    if not nodes:
        return None
    ready = [jnp.all(node.compresses_next) for node in nodes]
    return jnp.all(jnp.stack(ready))
