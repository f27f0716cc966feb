"""The public face of 0/1 Adam; the algorithm itself is in `_zero_one_core`."""

from collections.abc import Callable
from typing import Any

import jax
import optax

from sfpo_jax._validate import Scalar, check_at_least, is_known
from sfpo_jax.collectives import AxisName
from sfpo_jax.transforms._freeze import WarmupSteps
from sfpo_jax.transforms._in_place import step_rule
from sfpo_jax.transforms._onebit_adam import onebit_core
from sfpo_jax.transforms._state import MaskOrFn
from sfpo_jax.transforms._zero_one_core import ZeroOneAdam, ZeroOneAdamState


def zero_one_adam(
    learning_rate: Scalar | Callable[[jax.Array], Any],
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    weight_decay: Scalar = 0.0,
    *,
    warmup_steps: WarmupSteps,
    sync_every: Scalar,
    double_every: Scalar | None = None,
    total_steps: Scalar | None = None,
    axis_name: AxisName = None,
    compressor: Any = None,
    error_feedback: bool = True,
    nu_floor: Scalar = 0.01,
    refresh_every: Scalar | None = None,
    error_dtype: Any = None,
    mask: MaskOrFn = None,
    bucket_size: str = "256MB",
) -> optax.GradientTransformationExtraArgs:
    r"""0/1 Adam: 1-bit Adam that sends once for several steps (Lu et al. 2022).

    After the warm-up of `onebit_adam` every rank takes steps of its own, with its own
    momentum, from the parameters that all share; each `sync_every` steps the ways they
    have come are averaged, as one bit an entry with error feedback on both sides. For
    links under some 100 Mbit/s, on which even one bit a step takes longer than the
    passes: `sync_every` divides what is sent, about two bits a parameter.

    `updates` move the shared parameters, which stay as they are (but for decay) between
    synchronisations. Gradients are to be taken at `local_params(params, state)`;
    `make_train_step` does that, and needs no other argument. Test and save the shared
    parameters.

    A step whose gradient is not finite, on any rank, is skipped by all: zero updates,
    all state as it was.

    Args:
      learning_rate: a number, or a schedule of the steps that were not skipped.
      b1: decay of the first moment, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the denominator.
      weight_decay: decoupled decay.
      warmup_steps: dense steps, or "auto", as in `onebit_adam`.
      sync_every: J, steps from one synchronisation to the next; 1 is 1-bit Adam. 2 to
        16 are usual: ranks that go further apart learn less together.
      double_every: steps after which the interval doubles, from 1 at the freeze up to
        `sync_every`; None: `sync_every` from the start.
      total_steps: steps of the run, for "auto" and to check `warmup_steps`.
      axis_name: mesh axis (or axes) of data parallelism; None is one worker.
      compressor: what goes on the wire; None = `compression.sign()`.
      error_feedback: keep what compression lost, on both sides. Leave it on.
      nu_floor: as in `onebit_adam`.
      refresh_every: k, the first synchronisation k steps or more after the variance was
        last up to date also averages the gradients exactly and updates it with the
        weight of all these steps; None freezes it for good.
      error_dtype: of the residuals on both sides: float32, bfloat16 or "int8".
      mask: leaves to decay, a tree of bools or a function of the parameters to one.
      bucket_size: as in `onebit_adam`.

    Returns:
      The transformation. With `axis_name`, `init` runs inside `shard_map`, or outside
      under `jax.set_mesh(mesh)`, and `update` under `shard_map(...,
      check_vma=False)`; `state_specs` tells how to shard its state: momenta, drifts and
      residuals [N, ...] along the axis.

    Raises:
      ValueError: an argument outside its range, or a combination that cannot work.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import sfpo_jax as sfpo
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
      >>> tx = sfpo.zero_one_adam(0.1, warmup_steps=2, sync_every=2, axis_name="data")
      >>> step = sfpo.make_train_step(loss_fn, tx, sfpo.make_mesh())
      >>> state, shared = step.init({"w": jnp.zeros(4)}), []
      >>> batch = {"x": jnp.ones((16, 4)), "y": jnp.ones(16)}
      >>> for _ in range(4):
      ...     state, metrics = step(state, batch)
      ...     shared.append(round(float(state.params["w"][0]), 2))
      >>> shared  # two dense steps, one that each rank takes, one that all agree on
      [0.1, 0.2, 0.2, 0.31]
    """
    rule = step_rule(learning_rate, weight_decay, mask)
    _check_steps("sync_every", sync_every, "from one synchronisation to the next")
    if double_every is not None:
        _check_steps("double_every", double_every, "until the interval doubles")
    base = onebit_core(
        b1,
        b2,
        eps,
        warmup_steps=warmup_steps,
        total_steps=total_steps,
        axis_name=axis_name,
        compressor=compressor,
        error_feedback=error_feedback,
        mu_dtype=None,
        nu_dtype=None,
        nu_floor=nu_floor,
        refresh_every=refresh_every,
        error_dtype=error_dtype,
        bucket_size=bucket_size,
    )
    core = ZeroOneAdam(base, sync_every, double_every)

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, ZeroOneAdamState]:
        del extra_args
        target = rule.target(updates, params, state.count)
        chosen, moves, state = core.update(updates, state, target)
        return chosen.replace(moves), state

    return optax.GradientTransformationExtraArgs(core.init, update_fn)


def _check_steps(name: str, steps: Scalar, what: str) -> None:
    check_at_least(name, steps, 1, f"the steps {what}")
    if is_known(steps) and int(steps) != steps:
        raise ValueError(f"`{name}` must be a whole number of steps, got {steps}.")
