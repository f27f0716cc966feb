"""Parameters that differ between ranks between two synchronisations.

A transformation that lets ranks take steps of their own keeps, for each, how far it is
from the parameters that all share. A training step takes gradients there, and what lies
in its state, is tested and saved, stays alike on all ranks.
"""

from typing import Any, Protocol, runtime_checkable

import jax
import optax

from sfpo_jax.transforms._state import PerRank


@runtime_checkable
class HasDrift(Protocol):
    """State of a transformation whose ranks take steps of their own."""

    drift: PerRank  # shared parameters less this rank's own, a tree like theirs


def _has_drift(node: Any) -> bool:
    return isinstance(node, HasDrift)


def _drifting(opt_state: Any) -> list[HasDrift]:
    nodes = jax.tree.leaves(opt_state, is_leaf=_has_drift)
    return [node for node in nodes if _has_drift(node)]


def takes_local_steps(opt_state: Any) -> bool:
    """Whether ranks take steps of their own, by a state or its shapes."""
    return bool(_drifting(opt_state))


def local_params(params: Any, opt_state: Any) -> Any:
    """Where this rank takes its gradient: `params`, less its drift.

    `make_train_step` calls it by itself; a loop of one's own has to.

    Args:
      params: the parameters that all ranks share.
      opt_state: this rank's part of the state of any transformation, as `update` takes
        it inside `shard_map`.

    Returns:
      The parameters themselves where nothing in the state drifts.

    Example:
      >>> import jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> tx = sfpo.zero_one_adam(0.1, warmup_steps=1, sync_every=2)
      >>> shared = jnp.array([1.0, -2.0])
      >>> state = tx.init(shared)
      >>> for _ in range(2):
      ...     grads = 2 * local_params(shared, state)
      ...     updates, state = tx.update(grads, state, shared)
      ...     shared = shared + updates
      >>> [round(float(x), 2) for x in shared]
      [0.9, -1.9]
      >>> [round(float(x), 2) for x in local_params(shared, state)]
      [0.81, -1.8]
    """
    drifting = _drifting(opt_state)
    if not drifting:
        return params
    leaves, treedef = jax.tree.flatten(params)
    for node in drifting:
        drifts = treedef.flatten_up_to(node.drift.tree)
        for place, drift in enumerate(drifts):
            if not isinstance(drift, optax.MaskedNode):
                p = leaves[place]
                moved = p.astype(drift.dtype) - drift.reshape(p.shape)
                leaves[place] = moved.astype(p.dtype)
    return treedef.unflatten(leaves)
