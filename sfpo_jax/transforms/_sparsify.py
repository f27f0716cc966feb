r"""Sparsification of gradients: only the largest entries of each tensor pass.

SFPO keeps entry i when \|g_i\| >= quantile(\|g\|, s). Here that is made exact on every
input: the k = n - ceil(s (n - 1)) largest magnitudes pass, ties to the lower index.
Error feedback and momentum correction follow Lin et al. 2018, "Deep Gradient
Compression", https://arxiv.org/abs/1712.01887.

Masking saves no memory by itself (the dense gradient exists first), and no bytes unless
what follows sends a sparse format: it regularises.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sfpo_jax._validate import Scalar, check_at_least, check_range, is_known
from sfpo_jax.collectives import AxisName, all_finite, varying_axes
from sfpo_jax.kernels import (
    kept_count,
    select_largest_of_each,
    sparsify_leaves,
)
from sfpo_jax.schedules import Schedule
from sfpo_jax.transforms._moments import load, resolve_kind, store
from sfpo_jax.transforms._state import (
    MaskOrFn,
    PerRank,
    Selection,
    increment,
    own,
    per_rank,
    select,
    zeros_per_rank,
)


class SparsifyState(NamedTuple):
    """State of `sparsify`."""

    # Steps that were not skipped, int32[].
    count: jax.Array  # pyright: ignore[reportIncompatibleMethodOverride]
    residual: PerRank  # what was dropped so far, a leaf's shape; empty without feedback
    velocity: PerRank  # momentum of the correction, likewise


def sparsify(
    sparsity: Scalar | Schedule,
    *,
    error_feedback: bool = False,
    momentum: Scalar | None = None,
    min_size: Scalar = 1024,
    mask: MaskOrFn = None,
    error_dtype: Any = None,
    axis_name: AxisName = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps the largest entries of each tensor and zeroes the rest.

    Of n entries exactly k = n - ceil(s (n - 1)) pass, whatever their values. With error
    feedback the dropped ones are added to the next gradient,

    .. math::
        r_{t+1} = (g_t + r_t) - \mathrm{kept}(g_t + r_t),

    and with momentum correction the residual accumulates a momentum instead: u = m u +
    g, v = v + u, v's largest pass, and u and v are cleared where they did.

    A step whose gradient is not finite, on any rank, leaves the state as it was; what
    is not finite counts as largest and passes, for what follows to skip. With the extra
    argument `sparsity_is_on` False, a step passes as it is and leaves the residual.

    Args:
      sparsity: share of entries dropped, in [0, 1], or a schedule of the step.
      error_feedback: keep what was dropped for later steps. Each rank then has its own
        residual, of a gradient's size.
      momentum: factor m of the momentum correction, in [0, 1); implies error feedback.
      min_size: tensors of fewer entries pass dense.
      mask: leaves to sparsify, a tree of bools or a function of the tree; None = all.
        Integer, boolean and empty leaves always pass.
      error_dtype: of the residuals: float32, bfloat16, or "int8", one byte an entry;
        None = float32.
      axis_name: mesh axis the ranks agree over on a skipped step.

    Returns:
      The transformation.

    Raises:
      ValueError: an argument outside its range.

    Example:
      >>> import jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> tx = sfpo.sparsify(0.5, min_size=1)
      >>> grads = jnp.array([3.0, -4.0, 1.0, 0.5, 2.0])
      >>> updates, _ = tx.update(grads, tx.init(grads))
      >>> print(updates)
      [ 3. -4.  0.  0.  2.]
    """
    if not callable(sparsity):
        check_range("sparsity", sparsity, 0.0, 1.0, "the share of entries dropped")
    if momentum is not None:
        check_range("momentum", momentum, 0.0, 1.0, "a decay factor", open_high=True)
    check_at_least("min_size", min_size, 0, "the size from which tensors are masked")
    kind = resolve_kind("error_dtype", error_dtype, ("float32", "bfloat16", "int8"))
    has_residual = error_feedback or momentum is not None

    def init_fn(params: optax.Params) -> SparsifyState:
        chosen = select(params, mask)

        def zeros(wanted: bool) -> PerRank:
            if not wanted:
                return PerRank(())
            zeros = zeros_per_rank(chosen.shapes(), kind, jnp.float32, axis_name)
            return PerRank(chosen.state(zeros))

        return SparsifyState(
            count=jnp.zeros([], jnp.int32),
            residual=zeros(has_residual),
            velocity=zeros(momentum is not None),
        )

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        sparsity_is_on: jax.Array | bool = True,
        is_finite: bool = False,
        **extra_args: Any,
    ) -> tuple[optax.Updates, SparsifyState]:
        del params, extra_args
        share = sparsity(state.count) if callable(sparsity) else sparsity
        is_on = jnp.asarray(sparsity_is_on)
        # A schedule's rounding may leave [0, 1] by an ulp.
        share = jnp.clip(jnp.asarray(share, jnp.float32), 0.0, 1.0)
        share = jnp.where(is_on, share, 0.0)
        chosen = select(updates, mask)
        finite = jnp.bool_(True)
        if not is_finite:
            finite = all_finite(select(updates).chosen(), axis_name)
        grads = chosen.widened()
        residual = _read(chosen, state.residual, has_residual, axis_name)
        velocity = _read(chosen, state.velocity, momentum is not None, axis_name)
        wanted = _wanted(chosen.sizes(), share, min_size)
        next_count = jnp.where(finite, increment(state.count), state.count)

        if momentum is None and _is_fusible(chosen.chosen(), residual):
            is_new = finite if has_residual else is_on
            cut = sparsify_leaves(
                grads, wanted, residual=residual, is_on=is_on, is_new=is_new
            )
            held = state.residual
            if has_residual:
                left = per_rank(list(cut.residual), axis_name)
                held = PerRank(chosen.state(left))
            return chosen.replace(cut.kept), state._replace(
                count=next_count, residual=held
            )

        if momentum is not None:
            velocity = [
                load(u, g.dtype) * momentum + g
                for g, u in zip(grads, velocity, strict=True)
            ]
            grads = velocity
        if has_residual:
            grads = [g + load(r, g.dtype) for g, r in zip(grads, residual, strict=True)]
        masks = _masks(grads, wanted)
        # What the leaf's dtype rounds away, or cannot hold, stays in the residual.
        sent = [
            jnp.where(is_on, _narrowed(jnp.where(m, g, 0), old.dtype), old)
            for g, m, old in zip(grads, masks, chosen.chosen(), strict=True)
        ]
        dropped = [g - s.astype(g.dtype) for g, s in zip(grads, sent, strict=True)]
        cleared = [jnp.where(m, 0, u) for m, u in zip(masks, velocity, strict=False)]

        def keep(old: PerRank, values: list[jax.Array], is_used: bool) -> PerRank:
            if not is_used:
                return old
            held = _read(chosen, old, is_used, axis_name)
            new = [store(x, like) for x, like in zip(values, held, strict=True)]
            new = optax.tree.where(finite & is_on, new, held)
            return PerRank(chosen.state(per_rank(new, axis_name)))

        return chosen.replace(sent), SparsifyState(
            count=next_count,
            residual=keep(state.residual, dropped, has_residual),
            velocity=keep(state.velocity, cleared, momentum is not None),
        )

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _read(
    chosen: Selection, node: PerRank, is_used: bool, axis_name: AxisName
) -> list[Any]:
    return own(chosen.read(node.tree), axis_name) if is_used else []


def _is_fusible(leaves: Sequence[jax.Array], residual: Sequence[Any]) -> bool:
    """Whether one kernel takes them all: float32, varying over the same mesh axes."""
    arrays = [*leaves, *residual]
    if not leaves or any(getattr(x, "dtype", None) != jnp.float32 for x in arrays):
        return False
    return len({varying_axes(x) for x in leaves}) == 1


def _wanted(
    sizes: Sequence[int], share: jax.Array, min_size: Scalar
) -> list[jax.Array | int]:
    """Entries to keep of each leaf: uint32, the size itself where all are."""
    if is_known(min_size):
        return [n if n < min_size else kept_count(n, share) for n in sizes]
    return [jnp.where(n < min_size, jnp.uint32(n), kept_count(n, share)) for n in sizes]


def _masks(
    arrays: Sequence[jax.Array], wanted: Sequence[jax.Array | int]
) -> list[jax.Array]:
    """bool of each array's shape: the entries that pass."""
    masks = [jnp.ones_like(x, dtype=jnp.bool_) for x in arrays]
    places = [i for i, count in enumerate(wanted) if not isinstance(count, int)]
    large = [arrays[i] for i in places]
    chosen = select_largest_of_each(large, [jnp.asarray(wanted[i]) for i in places])
    for place, mask in zip(places, chosen, strict=True):
        masks[place] = mask
    return masks


def _narrowed(x: jax.Array, dtype: Any) -> jax.Array:
    """In a dtype, its largest number where a finite x is beyond it."""
    if x.dtype == dtype:
        return x
    limit = jnp.asarray(jnp.finfo(dtype).max, dtype).astype(x.dtype)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -limit, limit), x).astype(dtype)
