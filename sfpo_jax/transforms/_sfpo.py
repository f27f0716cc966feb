"""The recommended chain: sparsify and 1-bit Adam, their schedules in step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from sfpo_jax._validate import Scalar, check_at_least, check_range
from sfpo_jax.collectives import AxisName
from sfpo_jax.compression import sign
from sfpo_jax.schedules import cosine_sparsity
from sfpo_jax.transforms._freeze import WarmupSteps
from sfpo_jax.transforms._onebit_adam import onebit_adam
from sfpo_jax.transforms._phase import Phase
from sfpo_jax.transforms._sparsify import sparsify
from sfpo_jax.transforms._staged import StagedTransformation
from sfpo_jax.transforms._state import MaskOrFn


class SfpoState(NamedTuple):
    """States of the two parts."""

    sparsify: Any  # SparsifyState
    onebit_adam: Any  # ScaleByOnebitAdamState


def sfpo(
    learning_rate: Scalar | Callable[[jax.Array], Any],
    total_steps: Scalar,
    *,
    warmup_steps: WarmupSteps | None = None,
    base_sparsity: Scalar = 0.7,
    final_sparsity: Scalar = 0.3,
    axis_name: AxisName = None,
    min_size: Scalar = 1024,
    sparsity_mask: MaskOrFn = None,
    sparsity_feedback: bool = True,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    compressor: Any = None,
    error_feedback: bool = True,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    nu_floor: Scalar = 0.01,
    refresh_every: Scalar | None = 16,
    error_dtype: Any = None,
    mask: MaskOrFn = None,
    bucket_size: str = "256MB",
) -> StagedTransformation:
    """SFPO: cosine-annealed sparsification of gradients, then 1-bit Adam.

    Like ``optax.chain(sparsify(cosine_sparsity(base_sparsity, total_steps,
    final_sparsity, begin=warmup_steps)), onebit_adam(...))``, but the steps that make
    the variance see the whole gradient, those of "auto" and of `refresh_every` too:
    masked, they would leave entries with a variance near zero, and give them updates
    without bounds.

    Args:
      learning_rate: a number, or a schedule of the step.
      total_steps: steps of the run.
      warmup_steps: dense steps before the variance is frozen, or "auto"; None = 12 % of
        the run.
      base_sparsity: share of entries dropped at step 0, if it began there.
      final_sparsity: share of entries dropped at the end; 0 is the published formula,
        0.3 the published cure for late oscillation.
      axis_name: mesh axis (or axes) of data parallelism; None is one worker.
      min_size: tensors of fewer entries are not sparsified.
      sparsity_mask: leaves to sparsify, a tree of bools or a function of the tree.
      sparsity_feedback: add what was dropped to later gradients; without, small
        entries that matter are lost for good. Costs a residual of the gradient's size.
      compressor: what goes on the wire; None = ``compression.sign(relaxation=1.5)``.
      b1, b2, eps, weight_decay, error_feedback, mu_dtype, nu_dtype, nu_floor,
        refresh_every, error_dtype, mask, bucket_size: as in `onebit_adam`. A packed
        `mu_dtype` needs `refresh_every=None`.

    Returns:
      The transformation.

    Raises:
      ValueError: an argument outside its range; a warm-up longer than the run.

    Example:
      >>> import jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> tx = sfpo.sfpo(1e-3, total_steps=1000, weight_decay=0.05)
      >>> params = {"w": jnp.ones((64, 64))}
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> int(state.onebit_adam.freeze.step)
      120
    """
    check_at_least("total_steps", total_steps, 1, "the number of steps of the run")
    check_range("base_sparsity", base_sparsity, 0, 1, "the share dropped at first")
    check_range("final_sparsity", final_sparsity, 0, 1, "the share dropped at the end")
    warmup = _default_warmup(total_steps) if warmup_steps is None else warmup_steps
    adam = onebit_adam(
        learning_rate,
        b1,
        b2,
        eps,
        weight_decay,
        warmup_steps=warmup,
        total_steps=total_steps,
        axis_name=axis_name,
        compressor=sign(relaxation=1.5) if compressor is None else compressor,
        error_feedback=error_feedback,
        mu_dtype=mu_dtype,
        nu_dtype=nu_dtype,
        nu_floor=nu_floor,
        refresh_every=refresh_every,
        error_dtype=error_dtype,
        mask=mask,
        bucket_size=bucket_size,
    )
    masking = sparsify(
        cosine_sparsity(base_sparsity, total_steps, final_sparsity),
        min_size=min_size,
        mask=sparsity_mask,
        error_feedback=sparsity_feedback,
        error_dtype=error_dtype,
        axis_name=axis_name,
    )

    def init_fn(params: optax.Params) -> SfpoState:
        return SfpoState(masking.init(params), adam.init(params))

    def masked(
        updates: Any, state: Any, params: Any, phase: Phase | None = None
    ) -> tuple[Any, Any]:
        # A step that brings the variance up to date needs the whole gradient.
        is_on = state.onebit_adam.compresses_next
        if phase is not None:
            is_on = jnp.bool_(phase == "compressed")
        return masking.update(
            updates,
            state.sparsify,
            params,
            sparsity_is_on=is_on,
            is_finite=phase is not None,
        )

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        phase: Phase | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, SfpoState]:
        del extra_args
        updates, sparse = masked(updates, state, params, phase)
        updates, adapted = adam.update(updates, state.onebit_adam, params, phase=phase)
        return updates, SfpoState(sparse, adapted)

    def apply_fn(updates: Any, state: Any, params: Any) -> tuple[Any, SfpoState]:
        updates, sparse = masked(updates, state, params)
        params, adapted = adam.apply(updates, state.onebit_adam, params)
        return params, SfpoState(sparse, adapted)

    def send_fn(updates: Any, state: Any, phase: Phase) -> tuple[Any, SfpoState]:
        updates, sparse = masked(updates, state, None, phase)
        way, adapted = adam.send(updates, state.onebit_adam, phase)
        return way, SfpoState(sparse, adapted)

    def receive_fn(
        way: Any, state: Any, params: Any, phase: Phase
    ) -> tuple[Any, SfpoState]:
        updates, adapted = adam.receive(way, state.onebit_adam, params, phase)
        return updates, state._replace(onebit_adam=adapted)

    return StagedTransformation(init_fn, update_fn, apply_fn, send_fn, receive_fn)


def _default_warmup(total_steps: Scalar) -> Any:
    """12 % of the run, at least one step."""
    if not isinstance(total_steps, jax.Array):
        return max(1, round(0.12 * total_steps))
    return jnp.maximum(jnp.round(0.12 * total_steps), 1).astype(jnp.int32)
