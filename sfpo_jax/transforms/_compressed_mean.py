"""Error-feedback averaging of gradients, in front of any optimizer.

Karimireddy et al. 2019, "Error Feedback Fixes SignSGD and other Gradient Compression
Schemes", https://arxiv.org/abs/1901.09847, with error feedback on the server's side as
well (Tang et al. 2019, "DoubleSqueeze", https://arxiv.org/abs/1905.05957).
"""

from typing import Any, NamedTuple

import jax
import optax

from sfpo_jax.collectives import AxisName, WireLayout, axis_size, vary
from sfpo_jax.compression import Compressor
from sfpo_jax.transforms._exchange import Exchange
from sfpo_jax.transforms._if_finite import reduce_if_finite
from sfpo_jax.transforms._moments import load, resolve_kind, store
from sfpo_jax.transforms._state import (
    PerRank,
    Selection,
    bucket_entries,
    own,
    per_rank,
    select,
    warn_if_reduced,
    zeros_per_rank,
    zeros_server_error,
)


class CompressedMeanState(NamedTuple):
    """State of `compressed_mean`; empty without error feedback."""

    worker_error: PerRank  # tree of the leaves' shapes
    server_error: PerRank  # [rows / N, width] of each bucket's groups


def compressed_mean(
    compressor: Compressor,
    axis_name: AxisName,
    *,
    error_feedback: bool = True,
    error_dtype: Any = None,
    bucket_size: str = "256MB",
) -> optax.GradientTransformationExtraArgs:
    """Averages gradients over an axis through a compressor, with error feedback.

    The mean is bit-identical on all ranks, so any optimizer may follow. An optimizer
    that divides by its variance (Adam) turns the +-scale noise that `sign` gives to
    entries without any gradient into steps: there use `onebit_adam`, or a compressor
    that sends zeros as zeros.

    A step whose gradient is not finite, on any rank, leaves the state as it was and
    gives NaN on all ranks, as a dense mean would for the entries concerned; see
    `optax.apply_if_finite`.

    Args:
      compressor: what goes on the wire, from `sfpo_jax.compression`.
      axis_name: mesh axis (or axes) of data parallelism; None is one worker.
      error_feedback: keep what compression lost, on both sides.
      error_dtype: of the residuals: float32, bfloat16, or "int8", one byte an entry;
        None = float32.
      bucket_size: leaves are sent together up to this many bytes of float32.

    Returns:
      The transformation. With `axis_name`, `init` runs inside `shard_map`, or outside
      under `jax.set_mesh(mesh)`; `state_specs` tells how to shard its state.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import sfpo_jax as sfpo
      >>> compressor = sfpo.compression.sign()
      >>> tx = optax.chain(sfpo.compressed_mean(compressor, None), optax.sgd(1.0))
      >>> grads = jnp.array([1.0, -3.0])
      >>> updates, state = tx.update(grads, tx.init(grads))
      >>> print(updates)
      [-2.  2.]
    """
    entries = bucket_entries(bucket_size)
    kind = resolve_kind(
        "error_dtype", error_dtype, ("float32", "bfloat16", "float64", "int8")
    )

    def layout_of(chosen: Selection) -> WireLayout:
        return WireLayout(chosen.sizes(), compressor, entries)

    def init_fn(params: optax.Params) -> CompressedMeanState:
        if not error_feedback:
            return CompressedMeanState(PerRank(()), PerRank(()))
        chosen = select(params)
        kept = (kind, chosen.working_dtype(), axis_name)
        worker = zeros_per_rank(chosen.shapes(), *kept)
        server = zeros_server_error(layout_of(chosen), *kept)
        return CompressedMeanState(PerRank(chosen.state(worker)), server)

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        is_finite: bool = False,
        **extra_args: Any,
    ) -> tuple[optax.Updates, CompressedMeanState]:
        del params, extra_args
        chosen = select(updates)
        if not chosen.places:
            return updates, state
        work = chosen.working_dtype()
        warn_if_reduced(chosen.chosen(), axis_name)

        def reduce() -> tuple[list[jax.Array], CompressedMeanState]:
            buckets = layout_of(chosen).buckets(axis_size(axis_name))
            server, errors, held = None, [], ()
            if error_feedback:
                errors = own(chosen.read(state.worker_error.tree), axis_name)
                held = own(state.server_error.tree, axis_name)
                server = [[load(x, work) for x in rows] for rows in held]
            exchange = Exchange(compressor, buckets, axis_name)
            mean = exchange.mean(
                chosen.widened(), [load(e, work) for e in errors], server
            )
            if not error_feedback:
                return mean.leaves, state
            worker = map(store, mean.worker_error, errors)
            new = (
                chosen.state(list(worker)),
                jax.tree.map(store, mean.server_error, held),
            )
            new = per_rank(new, axis_name)
            held = state.server_error._replace(tree=new[1])
            return mean.leaves, CompressedMeanState(PerRank(new[0]), held)

        old = vary(state, axis_name)
        means, new = reduce_if_finite(reduce, chosen, old, axis_name, is_finite)
        return chosen.replace(means), new

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
