"""The public faces of 1-bit Adam; the algorithm itself is in `_onebit_core`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sfpo_jax._validate import (
    Scalar,
    check_at_least,
    check_range,
    is_known,
)
from sfpo_jax.collectives import AxisName
from sfpo_jax.compression import Compressor, sign
from sfpo_jax.transforms._freeze import WarmupSteps, freeze_rule
from sfpo_jax.transforms._in_place import step_rule
from sfpo_jax.transforms._moments import resolve_kind
from sfpo_jax.transforms._onebit_core import OnebitAdam
from sfpo_jax.transforms._onebit_state import ScaleByOnebitAdamState
from sfpo_jax.transforms._phase import Phase
from sfpo_jax.transforms._staged import StagedTransformation
from sfpo_jax.transforms._state import MaskOrFn, bucket_entries, select

_FLOATS = ("float32", "bfloat16", "float64")


def scale_by_onebit_adam(
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    warmup_steps: WarmupSteps,
    total_steps: Scalar | None = None,
    axis_name: AxisName = None,
    compressor: Any = None,
    error_feedback: bool = True,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    nu_floor: Scalar = 0.01,
    refresh_every: Scalar | None = None,
    error_dtype: Any = None,
    bucket_size: str = "256MB",
) -> optax.GradientTransformationExtraArgs:
    """Rescales updates by 1-bit Adam: `onebit_adam` without learning rate and decay.

    Arguments, state and errors are those of `onebit_adam`.

    Example:
      >>> import jax.numpy as jnp
      >>> import sfpo_jax as sfpo
      >>> tx = sfpo.scale_by_onebit_adam(warmup_steps=10)
      >>> grads = jnp.array([0.5, -2.0])
      >>> updates, _ = tx.update(grads, tx.init(grads))
      >>> print(updates.round(3))
      [ 1. -1.]
    """
    core = onebit_core(
        b1,
        b2,
        eps,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        axis_name=axis_name,
        compressor=compressor,
        error_feedback=error_feedback,
        mu_dtype=mu_dtype,
        nu_dtype=nu_dtype,
        nu_floor=nu_floor,
        refresh_every=refresh_every,
        error_dtype=error_dtype,
        bucket_size=bucket_size,
    )

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        phase: Phase | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleByOnebitAdamState]:
        del params, extra_args
        chosen, directions, state, _ = core.step(updates, state, phase=phase)
        return chosen.replace(directions), state

    return optax.GradientTransformationExtraArgs(core.init, update_fn)


def onebit_adam(
    learning_rate: Scalar | Callable[[jax.Array], Any],
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    *,
    warmup_steps: WarmupSteps,
    total_steps: Scalar | None = None,
    axis_name: AxisName = None,
    compressor: Any = None,
    error_feedback: bool = True,
    mu_dtype: Any = None,
    nu_dtype: Any = None,
    nu_floor: Scalar = 0.01,
    refresh_every: Scalar | None = None,
    error_dtype: Any = None,
    mask: MaskOrFn = None,
    bucket_size: str = "256MB",
) -> StagedTransformation:
    r"""1-bit Adam with decoupled weight decay (Tang et al. 2021).

    Exact AdamW on the exactly averaged gradient for `warmup_steps` steps; then the
    variance v is frozen and the momentum is averaged with the compressor and error
    feedback, about two bits a parameter and step on the wire:

    .. math::
        p \leftarrow p - \eta \left( \frac{m / (1 - b_1^t)}
        {\sqrt{v / (1 - b_2^W)} + \epsilon} + \lambda p \right)

    with t counting this step and W the step of the freeze; the first compressed step is
    the one with count W. An entry that had no gradient before the freeze enters no
    scale and gets no update but its decay. Updates have the dtype of the gradients.

    With `axis_name` the gradients must be each rank's own. Inside an auto-sharded `jit`
    with `axis_name=None` the compiler has already averaged them densely: the algorithm
    is then that of one worker, and nothing is saved on the wire.

    A step whose gradient is not finite, on any rank, is skipped by all: zero updates,
    all state as it was.

    Args:
      learning_rate: a number, or a schedule of the steps that were not skipped.
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the denominator.
      weight_decay: decoupled decay.
      warmup_steps: W, or "auto": frozen when the L1 norm of v is within 4 % of its
        value 1 / (1 - b2) steps before, at 20 % of `total_steps` at the latest.
      total_steps: steps of the run, for "auto" and to check `warmup_steps`.
      axis_name: mesh axis (or axes) of data parallelism; None is one worker.
      compressor: what goes on the wire; None = `compression.sign()`.
      error_feedback: keep what compression lost, on both sides. Leave it on.
      mu_dtype: of the first moment: float32, bfloat16, "int8" (one byte, as in
        `adamw8bit`), or "packed": the bytes it arrived in, 1/8 byte a parameter.
      nu_dtype: of the second moment: float32, bfloat16, "int8", or "factored" (means
        of rows and columns).
      nu_floor: after the freeze, v counts as at least this share of the mean of its
        block. It touches almost nothing after a dense warm-up, and keeps a run alive
        whose warm-up was masked; 0 is the published algorithm.
      refresh_every: k, every k-th step after the freeze is dense and updates v with the
        weight of k steps, so that v follows the training for 1/k of the dense bytes;
        None, the published algorithm, freezes v for good.
      error_dtype: of the residuals on both sides: float32, bfloat16 or "int8".
      mask: leaves to decay, a tree of bools or a function of the parameters to one.
      bucket_size: leaves are sent together up to this many bytes of float32: larger
        transfers gain nothing, and joining leaves costs a copy.

    A dtype of None is float32, or float64 where a parameter is float64.

    Returns:
      The transformation. With `axis_name`, `init` runs inside `shard_map`, or outside
      under `jax.set_mesh(mesh)`; `state_specs` tells how to shard its state.

    Raises:
      ValueError: an argument outside its range, or a combination that cannot work.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import sfpo_jax as sfpo
      >>> tx = sfpo.onebit_adam(0.1, warmup_steps=10)
      >>> params = jnp.array([1.0, -2.0])
      >>> state = tx.init(params)
      >>> for _ in range(40):
      ...     updates, state = tx.update(2 * params, state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> bool(jnp.abs(params).max() < 0.5)
      True
    """
    rule = step_rule(learning_rate, weight_decay, mask)
    core = onebit_core(
        b1,
        b2,
        eps,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        axis_name=axis_name,
        compressor=compressor,
        error_feedback=error_feedback,
        mu_dtype=mu_dtype,
        nu_dtype=nu_dtype,
        nu_floor=nu_floor,
        refresh_every=refresh_every,
        error_dtype=error_dtype,
        bucket_size=bucket_size,
    )

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        *,
        phase: Phase | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ScaleByOnebitAdamState]:
        del extra_args
        target = rule.target(updates, params, state.count)
        chosen, directions, new_state, taken = core.step(updates, state, phase=phase)
        steps = [jnp.where(taken, x, 0) for x in target.steps(directions)]
        return chosen.replace(steps), new_state

    def apply_fn(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
        target = rule.target(updates, params, state.count)
        chosen, moved, new_state, _ = core.step(updates, state, target)
        leaves = chosen.treedef.flatten_up_to(params)
        return chosen._replace(leaves=leaves).replace(moved), new_state

    def send_fn(updates: Any, state: Any, phase: Phase) -> tuple[Any, Any]:
        return core.send(select(updates), state, phase)

    def receive_fn(way: Any, state: Any, params: Any, phase: Phase) -> tuple[Any, Any]:
        chosen = select(params)
        target = rule.target(params, params, state.count)
        found, new_state = core.receive(chosen, way, state, phase)
        return chosen.replace(target.steps(found)), new_state

    return StagedTransformation(core.init, update_fn, apply_fn, send_fn, receive_fn)


def onebit_core(
    b1: Scalar,
    b2: Scalar,
    eps: Scalar,
    *,
    warmup_steps: WarmupSteps,
    total_steps: Scalar | None,
    axis_name: AxisName,
    compressor: Any,
    error_feedback: bool,
    mu_dtype: Any,
    nu_dtype: Any,
    nu_floor: Scalar,
    refresh_every: Scalar | None,
    error_dtype: Any,
    bucket_size: str,
) -> OnebitAdam:
    """Checks the arguments once, at build time."""
    check_range("b1", b1, 0.0, 1.0, "a decay factor", open_high=True)
    check_range("b2", b2, 0.0, 1.0, "a decay factor", open_high=True)
    check_at_least("eps", eps, 0.0, "added to the denominator")
    check_range("nu_floor", nu_floor, 0.0, 1.0, "a share of the mean variance")
    if compressor is not None and not isinstance(compressor, Compressor):
        raise TypeError(
            f"`compressor` must be a compressor such as sfpo_jax.compression.sign(), "
            f"got {compressor!r}."
        )
    mu = resolve_kind("mu_dtype", mu_dtype, (*_FLOATS, "int8", "packed"))
    is_packed = isinstance(mu, str)
    error = resolve_kind("error_dtype", error_dtype, (*_FLOATS, "int8"))
    if is_packed and error is not None and error.name in ("bfloat16", "int8"):
        raise ValueError(
            f'`error_dtype` must be float32 with `mu_dtype="packed"`, got {error}: '
            "during the warm-up its buffer holds the first moment."
        )
    if refresh_every is not None:
        _check_refresh(refresh_every, is_packed)
    return OnebitAdam(
        b1=b1,
        b2=b2,
        eps=eps,
        freeze=freeze_rule(warmup_steps, total_steps, b2),
        axis_name=axis_name,
        compressor=sign() if compressor is None else compressor,
        has_feedback=error_feedback,
        is_packed=is_packed,
        mu_dtype=None if is_packed else mu,
        nu_dtype=resolve_kind("nu_dtype", nu_dtype, (*_FLOATS, "int8", "factored")),
        nu_floor=nu_floor,
        refresh_every=refresh_every,
        error_dtype=error,
        bucket_entries=bucket_entries(bucket_size),
    )


def _check_refresh(refresh_every: Scalar, is_packed: bool) -> None:
    if is_known(refresh_every) and int(refresh_every) != refresh_every:
        raise ValueError(
            f"`refresh_every` must be a whole number of steps, got {refresh_every}."
        )
    check_at_least(
        "refresh_every", refresh_every, 2, "the steps from one dense step to the next"
    )
    if is_packed:
        raise ValueError(
            '`refresh_every` must be None with `mu_dtype="packed"`, got '
            f"{refresh_every}: the moment of a dense step does not fit in one bit."
        )
