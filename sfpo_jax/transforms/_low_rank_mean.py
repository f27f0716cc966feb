"""Averaging gradients by factors of low rank, in front of any optimizer.

Vogels, Karimireddy, Jaggi 2019, "PowerSGD: Practical Low-Rank Gradient Compression for
Distributed Optimization", https://arxiv.org/abs/1905.13727.
"""

from typing import Any, NamedTuple

import jax
import optax

from sfpo_jax._validate import Scalar, check_at_least, check_range, is_known
from sfpo_jax.collectives import (
    MIN_COMPRESSION,
    AxisName,
    Factors,
    first_basis,
    plan_factors,
    reduce_low_rank,
    vary,
)
from sfpo_jax.transforms._if_finite import reduce_if_finite
from sfpo_jax.transforms._moments import load, resolve_kind, store
from sfpo_jax.transforms._state import (
    MaskOrFn,
    PerRank,
    Selection,
    own,
    per_rank,
    select,
    warn_if_reduced,
    zeros_per_rank,
)


class LowRankMeanState(NamedTuple):
    """State of `low_rank_mean`; only tensors that travel as factors have any."""

    worker_error: PerRank  # tree of the leaves' shapes; () without error feedback
    basis: Any  # tree of Q, [cols, rank], alike on all ranks


def low_rank_mean(
    rank: Scalar,
    axis_name: AxisName,
    *,
    min_compression: Scalar = MIN_COMPRESSION,
    seed: int | jax.Array = 0,
    mask: MaskOrFn = None,
    error_feedback: bool = True,
    error_dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Averages gradients over an axis by factors of low rank, with error feedback.

    A tensor [a, b, ...] travels as a matrix M_i [rows, cols], its axes cut in two where
    rows + cols is least. With its error e_i and Q [cols, rank] of the step before:

        M_i = gradient_i + e_i;  P = orthonormal(mean_i M_i Q);  Q = mean_i M_i^T P
        mean = P Q^T;  e_i = M_i - mean;  Q becomes columns of length 1

    A device sends 2 (N - 1) / N * 4 rank (rows + cols) bytes, whatever N is, in two
    all-reduces for all leaves together, and a scalar. Vectors, scalars, what `mask`
    leaves out and what `min_compression` rules out travel exactly in the first of them.
    The mean is bit-identical on all ranks, so any optimizer may follow; where the mean
    of the M_i has no more than `rank` dimensions it is exact.

    It is another estimate of the gradient than the mean, and needs its own search for a
    learning rate. A step whose gradient is not finite, on any rank, leaves the state
    as it was and gives NaN on all ranks, as `compressed_mean` does.

    Args:
      rank: columns of the factors; 1 to 4 are usual.
      axis_name: mesh axis (or axes) of data parallelism; None is one worker, whose
        gradient is then its own projection.
      min_compression: tensors of fewer numbers than so many times those of their
        factors travel exactly.
      seed: of the first Q, drawn for each leaf by its number in the tree.
      mask: a tree of bools, a prefix of one, or a function from the tree to one; False
        = travels exactly.
      error_feedback: keep what compression lost. Without it directions that Q does not
        see are lost for good.
      error_dtype: of the errors: float32, bfloat16, or "int8", one byte an entry; None
        = float32. Arithmetic and transfers are in float32, float64 where any leaf is.

    Returns:
      The transformation. With `axis_name`, `init` runs inside `shard_map`, or outside
      under `jax.set_mesh(mesh)`; `state_specs` tells how to shard its state: errors
      [N, ...] along the axis, Q on all ranks alike.

    Raises:
      ValueError: `rank` or `min_compression` below 1 or traced, or no such dtype.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import sfpo_jax as sfpo
      >>> tx = optax.chain(sfpo.low_rank_mean(1, None), optax.sgd(1.0))
      >>> grads = {"w": jnp.outer(jnp.arange(8.0), jnp.ones(8)), "b": jnp.ones(8)}
      >>> state = tx.init(grads)
      >>> state[0].basis["w"].shape  # sent: 8 + 8 numbers for 64, and the vector
      (8, 1)
      >>> updates, state = tx.update(grads, state)
      >>> bool(jnp.allclose(updates["w"], -grads["w"]))  # of rank 1, and so exact
      True
    """
    for name, value in (("rank", rank), ("min_compression", min_compression)):
        if not is_known(value):
            raise ValueError(
                f"`{name}` must be a Python number, got {value!r}: shapes depend on "
                "it; name it in the static_args of `optax.inject_hyperparams`."
            )
    check_at_least("rank", rank, 1, "the columns of a factor; 1 to 4 are usual")
    columns, least = int(rank), float(min_compression)
    if columns != rank:
        raise ValueError(f"`rank` must be a whole number of columns, got {rank!r}.")
    check_range(
        "min_compression",
        min_compression,
        1.0,
        float("inf"),
        "how many numbers of a tensor one of its factors must stand for",
    )
    kind = resolve_kind(
        "error_dtype", error_dtype, ("float32", "bfloat16", "float64", "int8")
    )

    def factored(chosen: Selection) -> dict[int, Factors]:
        """Factors by the place of a leaf among the chosen."""
        allowed = select(chosen.treedef.unflatten(chosen.leaves), mask).places
        found = {}
        for place, (leaf, shape) in enumerate(
            zip(chosen.places, chosen.shapes(), strict=True)
        ):
            factors = plan_factors(shape, columns, least)
            if factors is not None and leaf in allowed:
                found[place] = factors
        return found

    def only(chosen: Selection, places: Any) -> Selection:
        return chosen._replace(places=tuple(chosen.places[i] for i in places))

    def init_fn(params: optax.Params) -> LowRankMeanState:
        chosen = select(params)
        factors, work = factored(chosen), chosen.working_dtype()
        thin, key = only(chosen, factors), jax.random.key(seed)
        basis = [
            first_basis(shape, jax.random.fold_in(key, leaf), work)
            for leaf, shape in zip(thin.places, factors.values(), strict=True)
        ]
        if not error_feedback:
            return LowRankMeanState(PerRank(()), thin.state(basis))
        errors = zeros_per_rank(thin.shapes(), kind, work, axis_name)
        return LowRankMeanState(PerRank(thin.state(errors)), thin.state(basis))

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        is_finite: bool = False,
        **extra_args: Any,
    ) -> tuple[optax.Updates, LowRankMeanState]:
        del params, extra_args
        chosen = select(updates)
        if not chosen.places:
            return updates, state
        factors, work = factored(chosen), chosen.working_dtype()
        thin = only(chosen, factors)
        warn_if_reduced(chosen.chosen(), axis_name)

        def reduce() -> tuple[list[jax.Array], LowRankMeanState]:
            values, held = chosen.widened(), []
            if error_feedback:
                held = own(thin.read(state.worker_error.tree), axis_name)
                for place, error in zip(factors, held, strict=True):
                    values[place] = values[place] + load(error, work)
            found = reduce_low_rank(
                [values[i].reshape(f.rows, f.cols) for i, f in factors.items()],
                thin.read(state.basis),
                [x for i, x in enumerate(values) if i not in factors],
                axis_name,
            )
            mean, exact = iter(found.mean), iter(found.exact)
            means = [
                next(mean).reshape(x.shape) if i in factors else next(exact)
                for i, x in enumerate(values)
            ]
            new = state._replace(basis=thin.state(found.basis))
            if not error_feedback:
                return means, new
            errors = [
                store(e.reshape(shape), like)
                for e, shape, like in zip(
                    found.worker_error, thin.shapes(), held, strict=True
                )
            ]
            errors = per_rank(thin.state(errors), axis_name)
            return means, new._replace(worker_error=PerRank(errors))

        old = state._replace(worker_error=vary(state.worker_error, axis_name))
        means, new = reduce_if_finite(reduce, chosen, old, axis_name, is_finite)
        return chosen.replace(means), new

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)
